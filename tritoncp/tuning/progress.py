"""Progress output of a tuning run."""

from __future__ import annotations

from typing import Any


class Tally:
    """Counters of a run, shown as a progress bar on a terminal, else by a line for each target and every
    twentieth candidate; reasons of failures are printed. Without a console nothing is shown.

    total, left_out: number of candidates of all targets, and of those for which there was no time
    """

    def __init__(self, total: int = 0, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.total, self.target, self.best = total, "", "–"
        self.tried = self.pruned = self.failed = self.left_out = 0
        self._console = console or Console(quiet=True)
        columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=total)
        self._step, self._why = ("", -1), ""

    def __str__(self) -> str:
        counts = f"tried {self.tried}, pruned {self.pruned}, failed {self.failed}"
        return f"{self.target}: {counts}, best {self.best}" if self.target else "nothing tried"

    def __enter__(self) -> Tally:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._print(str(self))

    def count(self, why: str | None = None, **steps: int) -> None:
        """Increase counters by name, and show them. why: reason of a failure, to print"""
        for name, n in steps.items():
            setattr(self, name, getattr(self, name) + n)
        self._bar.update(self._task, completed=self.tried, description=str(self))
        if why and why != self._why:
            self._print(f"{self.target}: {why}")
        self._why, last = why or self._why, self._step
        self._step = self.target + self.best, self.tried // 20
        if self._step != last and not self._console.is_terminal:
            self._print(str(self))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
