"""The progress of `tritoncp perf run` on stderr."""

from __future__ import annotations

import datetime
import time

import click


class Progress:
    """Lines on stderr; those of measurements begin with their number and the time left.

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
