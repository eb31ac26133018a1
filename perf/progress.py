"""The progress of `tritoncp perf run` on stderr, and the command that continues an interrupted run."""

from __future__ import annotations

import datetime
import shlex
import time
from typing import Any

import click
from click.core import ParameterSource

from tritoncp.perf.records.history import Journal


class Progress:
    """Prints lines; those that end a measurement with their number, and the time left.

    deadline: time.monotonic() after which the run starts nothing
    """

    def __init__(self, deadline: float) -> None:
        self.done = self.total = 0
        self._deadline, self._begin = deadline, time.monotonic()

    def add(self, measurements: int) -> None:
        """Add measurements to those that the run is to make."""
        if not self.total:
            self._begin = time.monotonic()  # of the first measurement
        self.total += measurements

    def show(self, text: str, measured: bool) -> None:
        """Print a line of text; measured: whether it ends one of the measurements."""
        self.done += measured
        if text:
            number = f"[{self.done} of {self.total}{self.format_time_left()}] " if measured else ""
            click.echo(number + text, err=True)

    def format_time_left(self) -> str:
        """Format the time left: for the other measurements at the speed so far, at most to the end of the
        budget."""
        if not 0 < self.done < self.total:
            return ""
        now = time.monotonic()
        seconds = (now - self._begin) / self.done * (self.total - self.done)
        return f", {datetime.timedelta(seconds=round(max(0.0, min(seconds, self._deadline - now))))} left"


def describe_interrupt(progress: Progress, journal: Journal, context: click.Context, ranks: bool) -> str:
    """Describe an interrupted run: what is kept, and the command that continues it. ranks: whether torchrun
    started it."""
    command = resume_command(context)
    if not journal.points:
        return "interrupted before the first measurement: nothing is kept; run the command again"
    start = "under torchrun as before" if ranks else "with"
    return (
        f"interrupted after {progress.done} of {progress.total} measurements; their lines are in "
        f"{journal.path}. Continue {start}:\n  {command}"
    )


def resume_command(context: click.Context) -> str:
    """Return the command line of a context, with --resume."""
    words = context.command_path.split()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not is_typed or not isinstance(parameter, click.Option) or name == "resume":
            continue
        value: Any = context.params[name]
        for part in value if parameter.multiple else (value,):
            words += [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], str(part)]
    return shlex.join([*words, "--resume"])
