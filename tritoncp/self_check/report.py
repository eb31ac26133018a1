"""What the check says: a table or plain lines, facts, the worst case, and one line for a report."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tritoncp import doctor
from tritoncp.self_check import facts as machine
from tritoncp.self_check.cases import Case, Result

HEAD = ("schedule", "mask", "dtype", "pass", "error", "allowed", "ms", "tensor", "rank", "")


@dataclass(frozen=True)
class Report:
    """The outcome of a check. stopped: why it ended before its last case; absent: ranks that were lost."""

    facts: dict[str, Any]
    results: Sequence[Result]
    seconds: float
    stopped: str | None = None
    absent: Sequence[int] = ()

    @property
    def right(self) -> bool:
        return self.stopped is None and all(result.right for result in self.results)

    @property
    def worst(self) -> Result | None:
        """The case that is furthest off; one without an answer before any, one that did not run after all."""
        wrong = [result for result in self.results if not result.right]
        return max(wrong, key=lambda one: (not is_left_out(one), one.excess), default=None)

    def speaker(self, world_size: int) -> int:
        """The rank that shows the report: the first that is not lost."""
        return min(set(range(world_size)) - set(self.absent))

    def as_json(self) -> dict[str, Any]:
        cases = [result.as_json() for result in self.results]
        return {
            "facts": self.facts,
            "cases": cases,
            "seconds": self.seconds,
            "stopped": self.stopped,
            "right": self.right,
        }


def is_left_out(result: Result) -> bool:
    return (result.why or "").startswith("not run")


def fields(result: Result) -> list[str]:
    """The row of a case, in the order of HEAD."""
    number = lambda x, form: "-" if x is None else format(x, form)  # noqa: E731
    verdict = "right" if result.right else "NOT RUN" if is_left_out(result) else "WRONG"
    others = [rank for rank in result.ranks if rank != result.rank]
    rank = "-" if result.tensor is None else "sum"
    if result.rank is not None:
        rank = str(result.rank) + (f" (also {', '.join(map(str, others))})" if others else "")
    numbers = number(result.error, ".2e"), number(result.allowed, ".2e"), number(result.ms, ".2f")
    return [*result.case, *numbers, result.tensor or "-", rank, verdict]


def as_line(result: Result) -> str:
    """A case without a terminal."""
    *case, error, allowed, ms, tensor, rank, verdict = fields(result)
    said = result.why or f"{tensor} off by {error}, allowed {allowed}, {ms} ms, rank {rank}"
    return f"{verdict:7} {' '.join(case)}: {said}"


class Display:
    """Cases as they are done: a bar on a terminal, a line each where there is none."""

    def __init__(self, console: Console, enabled: bool):
        self.console, self.enabled = console, enabled
        self.shown: set[Case] = set()
        self.status = console.status("compiling and comparing") if enabled and console.is_terminal else None

    def __enter__(self) -> Display:
        if self.status:
            self.status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.status:
            self.status.stop()

    def show(self, result: Result) -> None:
        if self.status:
            self.status.update(as_line(result))
        elif self.enabled:
            self.console.print(as_line(result), markup=False, highlight=False, soft_wrap=True)
            self.console.file.flush()  # also where it goes to a file, and this process may be killed
            self.shown.add(result.case)


def show_report(report: Report, console: Console, shown: Container[Case]) -> None:
    """The table, without a terminal the lines that were not ``shown`` yet; then the facts and the verdict."""
    if console.is_terminal:
        table = Table(*HEAD, title="tritoncp check")
        for result in report.results:
            table.add_row(*map(escape, fields(result)), style=None if result.right else "red")
        console.print(table)
    for result in report.results:
        untold = result.why and not is_left_out(result) if console.is_terminal else result.case not in shown
        if untold:
            console.print(as_line(result), markup=False, highlight=False, soft_wrap=True)
    for label, value in [*doctor.rows(report.facts), *machine.rows(report.facts)]:
        text = escape(value).replace("\n", "\n" + " " * 17)
        console.print(f"[bold]{label:<16}[/bold] {text}", highlight=False, soft_wrap=True)
    for label, style in (("problems", "red"), ("advice", "yellow")):
        for line in report.facts.get(label, ()):
            console.print(f"[{style}]{label:<16}[/{style}] {escape(line)}", highlight=False, soft_wrap=True)
    for line in verdict(report):
        style = "green" if report.right else "red"
        console.print(f"[{style}]{escape(line)}[/{style}]", highlight=False, soft_wrap=True)


def verdict(report: Report) -> list[str]:
    """The last lines: how many cases are right, the worst by name, and a line for a report."""
    right = sum(result.right for result in report.results)
    left_out = sum(is_left_out(result) for result in report.results)
    lines = [f"{right} of {len(report.results)} cases are right, {report.seconds:.1f} s"]
    if report.stopped:
        lines.append(f"stopped: {report.stopped}; {left_out} cases did not run")
    if (worst := report.worst) is not None and not is_left_out(worst):
        lines += [
            f"worst: {worst.case.name}: {described(worst)}",
            f"for a report: {for_report(report, worst)}",
        ]
    return lines


def described(result: Result) -> str:
    if result.why:
        return result.why
    *_, error, allowed, _, tensor, rank, _ = fields(result)
    where = "summed over ranks" if result.rank is None else f"on rank {rank}"
    return f"{tensor} {where} is off by {error}, allowed {allowed}"


def for_report(report: Report, worst: Result) -> str:
    """One line that says where and what."""
    facts = report.facts
    versions = facts["versions"]
    parts = [
        *(f"{name} {versions[name]}" for name in ("tritoncp", "torch", "triton")),
        facts["device"],
        *(d["architecture"] for d in facts["devices"][:1]),
        f"driver {facts['driver']}" if facts["driver"] else "",
        *(f"{label} {value}".replace("\n", "; ") for label, value in doctor.rows(facts) if "ptxas" in label),
        f"NCCL {facts['nccl']}" if facts["nccl"] else "",
        facts["world"],
        f"{worst.case.name}: {described(worst)}",
    ]
    return ", ".join(part for part in parts if part)
