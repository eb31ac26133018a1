"""Option types and console of all commands; errors become messages. Loads neither torch nor Triton."""

from __future__ import annotations

import contextlib
import errno
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tritoncp.core.environment import DEBUG, parse_seconds

INTERRUPTED = 130  # 128 + SIGINT, the convention of shells
JOBS = click.IntRange(1, 1024)  # number of processes that compile at a time
PIPE_WIDTH = 10_000  # columns if the output is not a terminal


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn errors into messages, in a ``with`` block: a ValueError is a usage error (exit code 2), errors of
    files and memory are failures (1), all others are bugs in tritoncp. Ctrl-C exits with 130."""
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
    """Convert an exception to a click exception with a message and an exit code."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return click.ClickException("out of memory: use smaller sizes, or a machine with more memory")
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return click.UsageError(text if len(text) <= 1000 else f"{text[:1000]}...")
    refused = isinstance(error, RuntimeError) and not isinstance(error, RecursionError | NotImplementedError)
    if refused or isinstance(error, OSError | ImportError):
        return click.ClickException(text)
    first = text.splitlines()[0][:300]
    return click.ClickException(
        f"a bug in tritoncp, {type(error).__name__}: {first}; TRITONCP_DEBUG=1 shows the traceback"
    )


class Seconds(click.ParamType):
    """A time such as 20, 90s, 15m or 1.5h, up to a day. zero: whether 0 is accepted"""

    name = "seconds"

    def __init__(self, zero: bool = False) -> None:
        self.zero = zero

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return min(86400.0, value if isinstance(value, float) else parse_seconds(value, self.zero))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Tokens(click.IntRange):
    """A number of tokens in a range, such as 1000, 128K or 1M."""

    name = "tokens"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        from tritoncp.masks.expressions import count

        try:
            tokens = count(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return int(super().convert(tokens, param, ctx))


class OutputFile(click.Path):
    """A file to write, in a folder that exists. A file that cannot be written is refused before any work."""

    def __init__(self, suffix: str = "") -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self.suffix = suffix

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        path: Path = click.Path.convert(self, value, param, ctx)  # type: ignore[assignment]
        if self.suffix and path.suffix != self.suffix:
            self.fail(f"{str(path)!r}: the file has to be called *{self.suffix}", param, ctx)
        try:
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.unlink()
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be written: {error.strerror}", param, ctx)
        return path


def make_output_folder(path: Path) -> None:
    """Make a folder for results, before any work. Raises click.UsageError, as OutputFile does, if files
    cannot be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise click.UsageError(f"nothing can be written to {str(path)!r}: {error.strerror}") from error


def make_console(stderr: bool = False, **options: Any) -> Any:
    """Make a rich console with these options; in a pipe or a file its tables are as wide as their text, so
    that no cell is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPE_WIDTH, **options)


def make_bar(console: Any) -> Any:
    """Make a rich bar of progress below the lines of a console: a context manager, shown on a terminal only.
    It has no thread, since processes may be forked while it is shown: pass refresh=True to update()."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    off = not console.is_terminal
    return Progress(*columns, console=console, transient=True, auto_refresh=False, disable=off)
