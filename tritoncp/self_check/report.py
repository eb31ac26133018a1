"""Output of `tritoncp check`: a line for each case, the machine, the verdict, and a line for a bug report."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from tritoncp.doctor import examine, summary_rows
from tritoncp.perf.suite import machine
from tritoncp.self_check.cases import CheckRequest, Result, choose_dtypes


@dataclass(frozen=True)
class CheckReport:
    """The result of a check.

    results: a result for each case, in the order of the cases
    stopped: the reason if the check ended before its last case
    absent:  the ranks that were lost
    """

    request: CheckRequest
    facts: dict[str, Any]
    results: Sequence[Result]
    seconds: float
    stopped: str | None = None
    absent: Sequence[int] = ()

    @property
    def right(self) -> bool:
        """Whether no case was wrong, and all cases ran, or, unless the command is strict, the budget ended
        after at least one case of each schedule."""
        if not all(result.right for result in self.results if result.ran):
            return False
        if all(result.ran for result in self.results):
            return self.stopped in (None, self.request.late)
        return self.stopped == self.request.late and not self.request.strict and not self.untested

    @property
    def untested(self) -> list[str]:
        """Schedules of which no case ran."""
        tested = {result.case.schedule for result in self.results if result.ran}
        return [x for x in dict.fromkeys(result.case.schedule for result in self.results) if x not in tested]

    def as_json(self) -> dict[str, Any]:
        cases = [result.as_json() for result in self.results]
        fields = {"facts": self.facts, "seconds": self.seconds, "stopped": self.stopped, "right": self.right}
        return fields | {"cases": cases}


def collect_facts(device: torch.device, world: str) -> dict[str, Any]:
    """Collect the facts of `tritoncp doctor`, the driver and the commit; the caller sets ``ranks``."""
    environment = machine.environment(device)
    note = "float16 replaces bfloat16, to which the interpreter truncates instead of rounding"
    return {
        **examine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor(),
        "host": platform.node(),
        **{name: environment.get(name) for name in ("driver", "cuda", "commit")},
        "world": world,
        "ranks": None,
        "notes": [note] if torch.float16 in choose_dtypes(device) else [],
    }


def print_line(console: Console, line: str, style: str = "") -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()  # so that the line is written even if this process is killed


def print_case(console: Console, result: Result, number: int, total: int) -> None:
    """Print the row of a case: its number, verdict, name and error."""
    case, verdict = result.case, "right" if result.right else "WRONG"
    row = f"{case.schedule:12} {case.mask:9} {case.dtype:8}  {describe(result)}"
    line = f"{number:{len(str(total))}}/{total} {verdict}  {row}"
    print_line(console, line, "" if result.right else "red")


def print_report(console: Console, report: CheckReport) -> None:
    """Print facts and verdict."""
    facts = report.facts
    rows = [*summary_rows(facts), *((name, facts[name] or "-") for name in ("device", "driver", "world"))]
    rows += [(f"rank {i}", " ".join(rank.values())) for i, rank in enumerate(facts["ranks"] or ())]
    for label, texts in {"note": "notes", "problem": "problems", "advice": "advice"}.items():
        rows += [(label, text) for text in facts[texts]]
    for label, text in rows:
        print_line(console, f"{label:<16} " + text.replace("\n", "\n" + " " * 17))
    for line in format_verdict(report):
        print_line(console, line, "green" if report.right else "red")


def describe(result: Result) -> str:
    """Format the error of a case, or the reason if there is none."""
    if result.error is None:
        return result.why or ""
    place = "summed over ranks" if result.rank is None else f"on rank {result.rank}"
    also = ", ".join(str(rank) for rank in result.ranks if rank != result.rank)
    numbers = f"{result.error:.1e} off, {result.allowed:.1e} allowed"
    return f"{result.tensor} {numbers}, {place}{f' (also {also})' if also else ''}"


def format_verdict(report: CheckReport) -> Iterator[str]:
    """Format the last lines: counts, cases that did not run, the worst case, and a line for a bug report."""
    ran = [result for result in report.results if result.ran]
    wrong = [result for result in ran if not result.right]
    yield f"{len(ran) - len(wrong)} of {len(ran)} cases are right, {report.seconds:.1f} s"
    if left_out := [result.case for result in report.results if not result.ran]:
        kinds = ", ".join(dict.fromkeys(f"{case.mask} {case.dtype}" for case in left_out))
        yield f"not run: {len(left_out)} more, of {kinds}: {report.stopped}"
    elif report.stopped:
        yield f"stopped: {report.stopped}"
    if report.untested and report.stopped == report.request.late:
        yield f"no case ran of {', '.join(report.untested)}: pass more seconds, --budget"
    if wrong:
        # Failed cases without an error first.
        worst = max(wrong, key=lambda x: math.inf if x.error is None else x.error / (x.allowed or 1.0))
        line = f"{worst.case.name}: {describe(worst)}"
        yield f"worst: {line}"
        yield f"for a report: {format_facts(report.facts)}, {line}"


def format_facts(facts: dict[str, Any]) -> str:
    """Format versions and device in one line, to paste into a bug report."""
    parts = [f"{name} {facts['versions'][name]}" for name in ("tritoncp", "torch", "triton")]
    parts += [facts["device"], *(gpu["architecture"] for gpu in facts["devices"][:1])]
    ptxas = dict(summary_rows(facts))["ptxas"].replace("\n", "; ")
    labels = {"driver": facts["driver"], "ptxas": ptxas, "NCCL": facts["nccl"]}
    return ", ".join([*parts, *(f"{label} {text}" for label, text in labels.items() if text), facts["world"]])
