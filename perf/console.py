"""The console of commands that print tables."""

from __future__ import annotations

import sys
from typing import Any

PIPE_WIDTH = 10_000  # columns if the output is not a terminal


def make_console(stderr: bool = False, **options: Any) -> Any:
    """Make a rich console with these options; in a pipe or a file its tables are as wide as their text, so
    that no cell is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPE_WIDTH, **options)
