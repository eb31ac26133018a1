"""The progress bar of a mask whose pairs have to be evaluated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tritoncp.core.log_lines import is_first_rank

DELAY = 2.0  # seconds without a bar


class Bar:
    """A bar of progress on stderr that appears after DELAY seconds, on a terminal and on rank 0 only.

    Until then it reads the clock once per chunk of pairs.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._begin = time.monotonic()
        self._progress: Any = None

    def is_due(self) -> bool:
        """Return whether the bar is due: DELAY is over, on a terminal and on rank 0."""
        if self._progress is None and time.monotonic() - self._begin > DELAY:
            from rich.console import Console  # imported here, since quick masks do not need rich
            from rich.progress import Progress

            console = Console(stderr=True)
            off = not (console.is_terminal and is_first_rank())
            self._progress = Progress(console=console, transient=True, auto_refresh=False, disable=off)
            self._progress.add_task(self._title, total=self._total)
            self._progress.start()
        return self._progress is not None and not self._progress.disable

    def show(self, left: int) -> None:
        """Show that ``left`` of the total are left."""
        self._progress.update(self._progress.task_ids[0], completed=self._total - left, refresh=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def bar(title: str, total: int) -> Iterator[Bar]:
    """Yield a :class:`Bar` of ``total`` items, and remove it at the end."""
    shown = Bar(title, total)
    try:
        yield shown
    finally:
        shown.stop()
