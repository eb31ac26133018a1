"""Suites of a comparison: the cases of one pass on one device, and the geometric mean of their ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tritoncp.perf.dashboard.estimates import Estimate, format_interval, ratio_interval
from tritoncp.perf.records.history import Point

Sides = tuple[str, list[Point], list[Point]]  # a series, and the points of a case before and after


class Suite(NamedTuple):
    """A suite: its name, device and number of cases that have a time on both sides.

    ratio: geometric mean of the cases' ratios, after / before; low, high: its confidence interval, from the
    means of the suite in each run that has all cases, None without two such runs a side; best, worst: ratios;
    speedups: by family of baselines, geometric means of its time over tritoncp's, before and after
    """

    name: str
    series: str
    cases: int
    ratio: float
    low: float | None
    high: float | None
    best: float
    worst: float
    speedups: dict[str, tuple[float, float]]


def list_suites(cases: Sequence[Sides]) -> list[Suite]:
    """List the suites of the cases of two sides, with the largest ratio first.

    >>> from tritoncp.perf.records.history import Series
    >>> def side(**times):
    ...     return {case: [Point("r", "t", case, Series("d"), {}, {"tritoncp": {"ms": ms}},
    ...                          tags={"pass": "forward"})] for case, ms in times.items()}
    >>> before, after = side(a=1.0, b=1.0), side(a=1.1, b=1.21)
    >>> (suite,) = list_suites([("d", before[case], after[case]) for case in before])
    >>> suite.name, suite.cases, round(suite.ratio, 3), suite.worst
    ('forward', 2, 1.154, 1.21)
    """
    suites: dict[tuple[str, str], list[Sides]] = {}
    for series, *sides in cases:
        before, after = ([point for point in points if point.ms] for points in sides)
        if before and after:
            suites.setdefault((suite_name(after[-1]), series), []).append((series, before, after))
    made = [_make_suite(*key, members) for key, members in suites.items()]
    return sorted(made, key=lambda suite: -suite.ratio)


def suite_name(point: Point) -> str:
    """Return the name of a case's suite: its pass, or the file of a benchmark of pytest-benchmark."""
    return point.tags.get("pass") or point.case.rpartition("::")[0] or "all"


def _make_suite(name: str, series: str, members: Sequence[Sides]) -> Suite:
    ratios = [_mean_log(after) - _mean_log(before) for _, before, after in members]
    firsts, seconds = [before for _, before, _ in members], [after for _, _, after in members]
    sides = _estimate(firsts), _estimate(seconds)
    mean, low, high = statistics.fmean(ratios), None, None
    if all(side.freedom for side in sides):
        mean = sides[1].mean - sides[0].mean
        low, high = ratio_interval(*sides)
    best, worst = math.exp(min(ratios)), math.exp(max(ratios))
    return Suite(
        name, series, len(members), math.exp(mean), low, high, best, worst, _compare_speedups(members)
    )


def _mean_log(points: Sequence[Point]) -> float:
    return statistics.fmean(math.log(point.ms) for point in points if point.ms)


def _estimate(cases: Sequence[Sequence[Point]]) -> Estimate:
    """Estimate the mean logarithm of cases from the runs that have all cases; unknown with fewer than two
    such runs."""
    runs = [{point.run: math.log(point.ms) for point in points if point.ms} for points in cases]
    common = [run for run in runs[0] if all(run in of_case for of_case in runs)]
    means = [statistics.fmean(of_case[run] for of_case in runs) for run in common]
    if len(means) < 2:
        return Estimate(0.0, None, 0)
    return Estimate(statistics.fmean(means), statistics.variance(means) / len(means), len(means) - 1)


def _compare_speedups(members: Sequence[Sides]) -> dict[str, tuple[float, float]]:
    """Return the speedups over each family that was timed on both sides of any case, over those cases."""
    logs: dict[str, list[tuple[float, float]]] = {}
    for _, before, after in members:
        first, second = (_mean_speedups(points) for points in (before, after))
        for family in first.keys() & second.keys():
            logs.setdefault(family, []).append((first[family], second[family]))
    means = {family: [statistics.fmean(side) for side in zip(*pairs)] for family, pairs in logs.items()}
    return {family: (math.exp(means[family][0]), math.exp(means[family][1])) for family in sorted(means)}


def _mean_speedups(points: Sequence[Point]) -> dict[str, float]:
    """Return the mean logarithm of the speedups over each family, over the points that have it."""
    logs: dict[str, list[float]] = {}
    for point in points:
        for family, speedup in point.speedups().items():
            logs.setdefault(family, []).append(math.log(speedup))
    return {family: statistics.fmean(values) for family, values in logs.items()}


SUITE_HEAD = ("suite", "cases", "geometric mean", "95% interval", "best … worst", "baselines ÷ tritoncp")


def suite_lines(suites: Sequence[Suite]) -> list[tuple[str, ...]]:
    """Format suites as cells under SUITE_HEAD, with the speedups before and after."""
    several = len({suite.series for suite in suites}) > 1
    return [
        (
            f"{suite.name} on {suite.series}" if several and suite.series else suite.name,
            str(suite.cases),
            f"{100 * (suite.ratio - 1):+.1f} %",
            format_interval(suite.low, suite.high),
            format_interval(suite.best, suite.worst),
            ", ".join(f"{name} {a:.2f} → {b:.2f}" for name, (a, b) in suite.speedups.items()),
        )
        for suite in suites
    ]
