"""The page of a comparison: two sides, their suites and cases, as one file without a script."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tritoncp.perf.dashboard import shell
from tritoncp.perf.dashboard.compare import HEAD, ComparedCase, lines, verdict
from tritoncp.perf.dashboard.gate import Gate
from tritoncp.perf.dashboard.suites import SUITE_HEAD, suite_lines

WIDTH = 120  # of a bar, in pixels
CLASSES = {"TOO SLOW": "worse", "FAILED": "worse", "slower": "unsure", "faster": "better"}


def comparison_page(title: str, sides: Sequence[str], result: Gate) -> str:
    """Make the page, as HTML. sides: a description of each, before and after"""
    rows = result.comparison.rows
    ratios = [bound for row in rows for bound in (row.low, row.ratio, row.high) if bound]
    span = min(0.5, max([0.05, *(abs(math.log(ratio)) for ratio in ratios)]))
    return shell.fill(
        "comparison.html",
        title=title,
        sides=sides,
        result=result,
        suite_head=SUITE_HEAD,
        suites=suite_lines(result.comparison.suites),
        span=math.expm1(span),
        width=WIDTH,
        heads=[*HEAD, f"−{math.expm1(span):.0%} … +{math.expm1(span):.0%}"],
        cases=[
            (cells, CLASSES.get(verdict(row, result.limit), "faint"), _place(row, span))
            for row, cells in zip(rows, lines(result.comparison, result.limit))
        ],
    )


def _place(row: ComparedCase, span: float) -> tuple[float, float, float] | None:
    """Return where the low end, the ratio and the high end are on a bar of logarithms from -span to span.

    >>> _place(ComparedCase("c", "d", 1.0, 1.0, 1.0, 0.5, 1.0, (3, 3)), 0.1)
    (0.0, 60.0, 60.0)
    """
    if row.ratio is None:
        return None
    logs = [math.log(bound or row.ratio) for bound in (row.low, row.ratio, row.high)]
    low, middle, high = (WIDTH * (1 + max(-1.0, min(1.0, log / span))) / 2 for log in logs)
    return low, middle, high
