"""Exit codes of the perf commands, and the errors that end a command with them."""

from __future__ import annotations

from typing import Any

import click

from tritoncp.command_base import INTERRUPTED as INTERRUPTED
from tritoncp.command_base import Command

FINE, REGRESSION, BAD_INPUT, NOTHING_MEASURED = range(4)

EPILOG = (
    "Exit codes: 0 fine; 1 a regression (slower than allowed, failing, wrong, or not measured again); 2 bad "
    "usage, input that cannot be read, or output that cannot be written; 3 nothing was measured or compared."
)


class InputError(click.ClickException):
    """Bad usage, or a file that cannot be read or written: exit code 2."""

    exit_code = BAD_INPUT


class NothingMeasured(click.ClickException):
    """The command ended without a figure: exit code 3."""

    exit_code = NOTHING_MEASURED


class PerfCommand(Command):
    """A command with the exit codes above."""

    file_error = BAD_INPUT

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"epilog": EPILOG} | options)
