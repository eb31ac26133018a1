"""Option types of all commands; errors become messages. Loads neither torch nor Triton."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import click

from tritoncp.core.environment import DEBUG

SECONDS = click.FloatRange(0, 86400, min_open=True)  # to wait: up to a day
INTERRUPTED = 130  # 128 + SIGINT, the convention of shells
OUTPUT_FILE = click.Path(dir_okay=False, path_type=Path)


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn errors into messages of the command: a ValueError of the library is a usage error (exit code 2),
    errors of files and memory are failures (1); anything else is a bug in tritoncp. Ctrl-C ends with 130."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except Exception as error:
        if DEBUG.read():
            raise
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # click ends quietly
        raise _message_of(error) from error


def _message_of(error: Exception) -> click.ClickException:
    """Turn an error of the library into an error of the command: a message and an exit code."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return click.ClickException("this machine has not enough memory for that")
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return click.UsageError(text if len(text) <= 1000 else f"{text[:1000]}...")
    refused = isinstance(error, RuntimeError) and not isinstance(error, RecursionError | NotImplementedError)
    if refused or isinstance(error, OSError | ImportError):
        return click.ClickException(text)
    first = text.splitlines()[0][:300]
    return click.ClickException(
        f"a bug in tritoncp, {type(error).__name__}: {first}; TRITONCP_DEBUG=1 shows the traceback"
    )
