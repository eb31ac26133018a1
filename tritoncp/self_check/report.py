"""Output of `tritoncp check`: a table or plain lines, facts, the worst case, and a line for a bug report."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tritoncp.doctor import summary_rows
from tritoncp.self_check import facts as machine
from tritoncp.self_check.cases import Case, Result

HEAD = ("schedule", "mask", "dtype", "pass", "error", "allowed", "ms", "tensor", "rank", "")


@dataclass(frozen=True)
class Report:
    """The result of a check. stopped: why it ended before its last case; absent: the ranks that were lost."""

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
        """The worst failing case: one without a result first, then by excess, then cases that did not run."""
        wrong = [result for result in self.results if not result.right]
        return max(wrong, key=lambda result: (not is_left_out(result), result.excess), default=None)

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


def format_row(result: Result) -> list[str]:
    """Format a case as a row of the table, in the order of HEAD."""
    number = lambda x, form: "-" if x is None else format(x, form)  # noqa: E731
    verdict = "right" if result.right else "NOT RUN" if is_left_out(result) else "WRONG"
    further = [rank for rank in result.ranks if rank != result.rank]
    rank = "-" if result.tensor is None else "sum"
    if result.rank is not None:
        rank = str(result.rank) + (f" (also {', '.join(map(str, further))})" if further else "")
    numbers = number(result.error, ".2e"), number(result.allowed, ".2e"), number(result.ms, ".2f")
    return [*result.case, *numbers, result.tensor or "-", rank, verdict]


def format_line(result: Result) -> str:
    """Format a case as one line of text, for output that is not a terminal."""
    *case, error, allowed, ms, tensor, rank, verdict = format_row(result)
    text = result.why or f"{tensor} off by {error}, allowed {allowed}, {ms} ms, rank {rank}"
    return f"{verdict:7} {' '.join(case)}: {text}"


class Display:
    """Progress output: a status line on a terminal, one line per finished case elsewhere."""

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
            self.status.update(format_line(result))
        elif self.enabled:
            self.console.print(format_line(result), markup=False, highlight=False, soft_wrap=True)
            self.console.file.flush()  # so that a file has the line even if this process is killed
            self.shown.add(result.case)


def show_report(report: Report, console: Console, printed: Container[Case]) -> None:
    """Print the table (or, without a terminal, the lines that are not in ``printed``), facts and verdict."""
    if console.is_terminal:
        table = Table(*HEAD, title="tritoncp check")
        for result in report.results:
            table.add_row(*map(escape, format_row(result)), style=None if result.right else "red")
        console.print(table)
    for result in report.results:
        pending = (
            result.why and not is_left_out(result) if console.is_terminal else result.case not in printed
        )
        if pending:
            console.print(format_line(result), markup=False, highlight=False, soft_wrap=True)
    for label, value in [*summary_rows(report.facts), *machine.list_rows(report.facts)]:
        text = escape(value).replace("\n", "\n" + " " * 17)
        console.print(f"[bold]{label:<16}[/bold] {text}", highlight=False, soft_wrap=True)
    for label, style in (("problems", "red"), ("advice", "yellow")):
        for line in report.facts.get(label, ()):
            console.print(f"[{style}]{label:<16}[/{style}] {escape(line)}", highlight=False, soft_wrap=True)
    for line in format_verdict(report):
        style = "green" if report.right else "red"
        console.print(f"[{style}]{escape(line)}[/{style}]", highlight=False, soft_wrap=True)


def format_verdict(report: Report) -> list[str]:
    """Format the last lines: the number of right cases, the worst case, and a line for a bug report."""
    right = sum(result.right for result in report.results)
    left_out = sum(is_left_out(result) for result in report.results)
    lines = [f"{right} of {len(report.results)} cases are right, {report.seconds:.1f} s"]
    if report.stopped:
        lines.append(f"stopped: {report.stopped}; {left_out} cases did not run")
    if (worst := report.worst) is not None and not is_left_out(worst):
        lines += [
            f"worst: {worst.case.name}: {describe(worst)}",
            f"for a report: {format_report_line(report, worst)}",
        ]
    return lines


def describe(result: Result) -> str:
    if result.why:
        return result.why
    *_, error, allowed, _, tensor, rank, _ = format_row(result)
    location = "summed over ranks" if result.rank is None else f"on rank {rank}"
    return f"{tensor} {location} is off by {error}, allowed {allowed}"


def format_report_line(report: Report, worst: Result) -> str:
    """Format one line with versions, device and the worst case, to paste into a bug report."""
    facts = report.facts
    versions = facts["versions"]
    parts = [
        *(f"{name} {versions[name]}" for name in ("tritoncp", "torch", "triton")),
        facts["device"],
        *(d["architecture"] for d in facts["devices"][:1]),
        f"driver {facts['driver']}" if facts["driver"] else "",
        *(f"{label} {value}".replace("\n", "; ") for label, value in summary_rows(facts) if "ptxas" in label),
        f"NCCL {facts['nccl']}" if facts["nccl"] else "",
        facts["world"],
        f"{worst.case.name}: {describe(worst)}",
    ]
    return ", ".join(part for part in parts if part)
