"""The progress of `tritoncp perf run` and `tritoncp inspect` on stderr."""

from __future__ import annotations

import datetime
import math
import time
from typing import Self

import click

from tritoncp.command_base import make_bar, make_console


class Progress:
    """Progress lines on stderr; those of measurements begin with their number and the remaining time. On a
    terminal there is a bar below them inside of a ``with`` block.

    deadline: time.monotonic() after which no measurement starts
    shown:    whether lines are printed
    """

    def __init__(self, deadline: float = math.inf, shown: bool = True) -> None:
        self.done, self.total, self._shown = 0, 0, shown
        self._deadline, self._begin = deadline, time.monotonic()
        self._bar = make_bar(make_console(stderr=True))
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def add(self, measurements: int) -> None:
        """Increase the expected number of measurements."""
        if not self.total:
            self._begin = time.monotonic()  # start of the first measurement
        self.total += measurements

    def show(self, text: str, measured: bool) -> None:
        """Print a line. measured: whether it is the end of a measurement"""
        self.done += measured
        if self._shown:
            number = f"[{self.done} of {self.total}{self.format_time_left()}] " if measured else ""
            click.echo(number + text, err=True)
            self._bar.update(self._task, completed=self.done, total=self.total, refresh=True)

    def format_time_left(self) -> str:
        """Format the remaining time: the other measurements at the speed so far, or the rest of the budget if
        it is less."""
        if not 0 < self.done < self.total:
            return ""
        now = time.monotonic()
        seconds = (now - self._begin) / self.done * (self.total - self.done)
        return f", {datetime.timedelta(seconds=round(max(0.0, min(seconds, self._deadline - now))))} left"
