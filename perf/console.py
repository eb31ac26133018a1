"""The console of commands that print tables."""

from __future__ import annotations

import sys
from typing import Any

PIPE_WIDTH = 10_000  # columns of a table that no terminal shows


def make_console(stderr: bool = False) -> Any:
    """Make a rich console whose tables are as wide as their text where no terminal ends the lines: cells are
    not cut in a pipe or a file, whatever COLUMNS says."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPE_WIDTH)
