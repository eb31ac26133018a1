"""Exit codes of the perf commands, and the errors that end a command with them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tritoncp.command_base import INTERRUPTED as INTERRUPTED

FINE, REGRESSION, BAD_INPUT, NOTHING_MEASURED = range(4)
PAGE_PACKAGES = ("bokeh", "jinja2", "numpy", "scipy")

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


class PerfCommand(click.Command):
    """A command with the exit codes above. Errors of the file system and missing packages are input
    errors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"epilog": EPILOG} | options)

    def invoke(self, ctx: click.Context) -> Any:
        with input_errors():
            return super().invoke(ctx)


@contextmanager
def input_errors() -> Iterator[None]:
    """Turn errors of the file system and missing packages into input errors."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader closed the pipe: click exits without a message
            raise
        raise InputError(str(error)) from error
    except ImportError as error:
        if (error.name or "").split(".")[0] not in PAGE_PACKAGES:
            raise
        packages = " ".join(PAGE_PACKAGES)
        raise InputError(f"{error}. Pages and comparisons need: pip install {packages}") from error
