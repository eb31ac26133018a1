"""Comparison of two sets of measurements: a ratio and its confidence interval for each case and suite."""

from __future__ import annotations

import math
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tritoncp.perf.dashboard.estimates import LEVEL, estimate, format_interval, ratio_interval
from tritoncp.perf.dashboard.suites import Suite, list_suites
from tritoncp.perf.exit_codes import InputError
from tritoncp.perf.records.history import BrokenLine, Point, read


class ComparedCase(NamedTuple):
    """A case on both sides. before, after: milliseconds; ratio: after / before, None if a
    side failed; low, high: its confidence interval, None if unknown."""

    case: str
    series: str
    before: float | None
    after: float | None
    ratio: float | None
    low: float | None
    high: float | None
    runs: tuple[int, int]
    why: str = ""

    @property
    def broken(self) -> bool:
        """Whether the case fails after, and did not before."""
        return self.before is not None and self.after is None

    def regressed(self, limit: float | None) -> bool:
        """Whether the case is broken or, with a limit, slower by more than the limit with an interval above
        1.

        >>> ComparedCase("c", "d", 1.0, 1.06, 1.06, 1.02, 1.1, (3, 3)).regressed(0.05)
        True
        >>> ComparedCase("c", "d", 1.0, 1.06, 1.06, 0.98, 1.15, (3, 3)).regressed(0.05)
        False
        """
        if limit is None or self.ratio is None:
            return self.broken
        return self.ratio > 1 + limit and (self.low is None or self.low > 1)


class Comparison(NamedTuple):
    """Rows, worst first, suites, and the cases that have no row, with their device if there are several.

    missing: cases measured before but not after: on the same series, or on any if no series has the case
    after
    new: cases measured after but not before
    absent_series: series measured before but not after, whose cases have a time after on another series
    """

    rows: list[ComparedCase]
    missing: list[str]
    new: list[str]
    absent_series: list[str]
    suites: list[Suite]

    def label(self, row: ComparedCase) -> str:
        """Return the name of a row, with its device if there are several."""
        return label(row.case, row.series, len({other.series for other in self.rows}) > 1)

    @property
    def geomean(self) -> float | None:
        """Geometric mean of the ratios; None if there is none."""
        logs = [math.log(row.ratio) for row in self.rows if row.ratio]
        return math.exp(statistics.fmean(logs)) if logs else None


def compare(before: Sequence[Point], after: Sequence[Point]) -> Comparison:
    """Compare the common cases of two sides on equal series; if the sides have no common series, on any.

    >>> from tritoncp.perf.records.history import Series
    >>> def side(times):
    ...     runs = enumerate({"tritoncp": {"ms": ms}} for ms in times)
    ...     return [Point(str(i), "t", "c", Series("GPU"), {}, contenders) for i, contenders in runs]
    >>> row = compare(side([1.0, 1.01, 0.99]), side([1.1, 1.11, 1.09])).rows[0]
    >>> f"{row.ratio:.2f} [{row.low:.2f}, {row.high:.2f}]"
    '1.10 [1.08, 1.12]'
    """
    common = {point.series for point in before} & {point.series for point in after}
    series = {str(item) for item in common} or {""}
    cases = {point.case for point in after}
    first, second = (group_points(points, bool(common)) for points in (before, after))
    dropped = [key for key in first if key not in second]
    rows = [_make_row(key, first[key], second[key]) for key in first if key in second]
    several = len({name for _, name in [*first, *second]}) > 1
    return Comparison(
        sorted(rows, key=_sort_key, reverse=True),
        [label(*key, several) for key in dropped if key[1] in series or key[0] not in cases],
        [label(*key, several) for key in second if key not in first],
        sorted({name for case, name in dropped if name not in series and case in cases}),
        list_suites([(key[1], first[key], second[key]) for key in first if key in second]),
    )


def label(case: str, series: str, several: bool) -> str:
    """Return the name of a case, with its device if there are several."""
    return f"{case} on {series}" if several and series else case


def group_points(points: Iterable[Point], by_series: bool) -> dict[tuple[str, str], list[Point]]:
    """Group points by case and series, with the last point of each run."""
    groups: dict[tuple[str, str], dict[str, Point]] = {}
    for point in points:
        key = point.case, str(point.series) if by_series else ""
        groups.setdefault(key, {})[point.run] = point
    return {key: list(runs.values()) for key, runs in groups.items()}


def _make_row(key: tuple[str, str], before: list[Point], after: list[Point]) -> ComparedCase:
    why = "" if after[-1].ms else after[-1].own["why"]
    first, second = (estimate(points) for points in (before, after))
    runs = (len(before), len(after))
    time_before, time_after = (
        side_estimate and math.exp(side_estimate.mean) for side_estimate in (first, second)
    )
    if why or first is None or second is None:
        return ComparedCase(*key, time_before, None if why else time_after, None, None, None, runs, why)
    low, high = ratio_interval(first, second)
    return ComparedCase(*key, time_before, time_after, math.exp(second.mean - first.mean), low, high, runs)


def _sort_key(row: ComparedCase) -> tuple[bool, float]:
    """Return the sort key of a row: failures, then cases that are surely slower or have no interval, then the
    others, each with the max ratio first.

    >>> rows = [ComparedCase("c", "d", 1, r, r, low, 2, (3, 3)) for r, low in ((1.3, 0.9), (1.02, 1.01))]
    >>> [row.ratio for row in sorted(rows, key=_sort_key, reverse=True)]
    [1.02, 1.3]
    """
    if row.ratio is None:
        return row.after is None, math.inf if row.after is None else -math.inf
    return row.ratio > 1 and (row.low is None or row.low > 1), row.ratio


def newest(points: Sequence[Point], runs: int) -> list[Point]:
    """Select the points of the newest ``runs`` runs of each case and series.

    >>> from tritoncp.perf.records.history import Series
    >>> points = [Point(str(day), f"2026-01-0{day}", "c", Series("GPU"), {}, {}) for day in (1, 3, 2)]
    >>> [point.run for point in newest(points, 2)]
    ['2', '3']
    """
    groups = group_points(sorted(points, key=lambda point: point.time), by_series=True)
    return [point for group in groups.values() for point in group[-runs:]]


def side(
    word: str, history: Path, tell: Callable[[BrokenLine], object] = lambda problem: None
) -> list[Point]:
    """Read the points of a side of a comparison. word: a file or folder; or, in the history, a commit (or a
    name that git resolves to one), a branch (its newest measured commit), a version, a run, or a device.
    tell: called with every broken line

    Raises InputError with a list of the history's commits and devices.
    """
    if not word.strip():
        raise InputError("BEFORE or AFTER is empty: pass a file, commit, run, version or device")
    place = Path(word) if Path(word).exists() else history
    points: list[Point] = []
    if place.exists():
        contents = read(place)
        points = contents.points
        for problem in contents.problems:
            tell(problem)
    if place == Path(word):
        return points
    for selection in (
        [point for point in points if word in (point.run, point.env.get("tritoncp"))],
        _select_commit(points, word),
        _select_branch(points, word),
        [point for point in points if word.lower() in str(point.series).lower()],
    ):
        if selection:
            return selection
    commits = list(dict.fromkeys(str(point.env.get("commit", ""))[:10] for point in points))
    devices = sorted({str(point.series) for point in points})
    raise InputError(
        f"{word!r} is no file, and {history} has no commit, run, version or device like it. Commits there: "
        f"{', '.join(commits[-5:]) or 'none'}; devices: {', '.join(devices) or 'none'}"
    )


def _select_commit(points: Sequence[Point], word: str) -> list[Point]:
    if len(word) < 4 or not set(word.lower()) <= set("0123456789abcdef+"):
        if word.startswith("-"):  # git would read it as an option
            return []
        word = _git("rev-parse", "--verify", "--quiet", f"{word}^{{commit}}").strip() or "no commit"
    return [point for point in points if str(point.env.get("commit", "")).startswith(word.lower())]


def _select_branch(points: Sequence[Point], word: str) -> list[Point]:
    """Select the points of the newest commit of a branch that has points, along first parents."""
    of_commits: dict[str, list[Point]] = {}
    for point in points:
        of_commits.setdefault(str(point.env.get("commit", "")).removesuffix("+"), []).append(point)
    for place in ("refs/heads", "refs/remotes"):
        for commit in _git("rev-list", "--first-parent", f"{place}/{word}", "--").split():
            if commit in of_commits:
                return of_commits[commit]
    return []


def _git(*words: str) -> str:
    """Run git and return its output; nothing if it fails or is not installed."""
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True).stdout
    except (OSError, ValueError):  # ValueError: a zero byte in a word
        return ""


def describe_side(word: str, points: Sequence[Point]) -> str:
    """Describe a side: its word, runs, commits, time and versions.

    >>> from tritoncp.perf.records.history import Series
    >>> env = {"commit": "1a2b3c4d5e6f7a8b9c0d", "torch": "2.13.0"}
    >>> describe_side("main", [Point("r", "2026-01-02T10:00", "c", Series("d"), env, {})])
    'main: 1 run of 1a2b3c4d5e, 2026-01-02, torch 2.13.0'
    """
    runs = {point.run for point in points}
    commits = list(dict.fromkeys(str(point.env.get("commit", "no commit"))[:10] for point in points))
    days = sorted({point.time[:10] for point in points})
    names = ("tritoncp", "torch", "triton", "driver")
    versions = {name: sorted({str(p.env[name]) for p in points if name in p.env}) for name in names}
    facts = [
        f"{len(runs)} run{'s' * (len(runs) > 1)} of {' … '.join([*commits[:1], *commits[1:][-1:]])}",
        " … ".join([*days[:1], *days[1:][-1:]]),
        *(f"{name} {' and '.join(found)}" for name, found in versions.items() if found),
    ]
    return f"{word}: {', '.join(facts)}"


def lines(comparison: Comparison, limit: float | None) -> list[tuple[str, ...]]:
    """Format the rows, worst first: case, before, after, change, confidence interval, verdict."""
    return [
        (
            comparison.label(row),
            format_time(row.before),
            format_time(row.after),
            "" if row.ratio is None else f"{100 * (row.ratio - 1):+.1f} %",
            format_interval(row.low, row.high),
            verdict(row, limit),
        )
        for row in comparison.rows
    ]  # fmt: skip


def format_time(ms: float | None) -> str:
    return "failed" if ms is None else f"{ms:.4g}"


def verdict(row: ComparedCase, limit: float | None) -> str:
    """
    >>> verdict(ComparedCase("c", "d", 1.0, 0.9, 0.9, 0.88, 0.92, (3, 3)), None)
    'faster'
    """
    if row.after is None:
        return "FAILED" if row.broken else "fails, as before"
    if row.before is None:
        return "works now"
    if row.regressed(limit):
        return "TOO SLOW"
    if row.low is None or row.high is None:
        return "one figure each"
    return "slower" if row.low > 1 else "faster" if row.high < 1 else "as before"


HEAD = ("case", "before, ms", "after, ms", "change", f"{LEVEL:.0%} interval", "verdict")


def summary(comparison: Comparison, limit: float | None) -> str:
    """Format a summary line: number of cases, geometric mean, cases beyond the limit, cases without a row."""
    mean = comparison.geomean
    text = f"{len(comparison.rows)} cases"
    text += f", geometric mean {100 * (mean - 1):+.1f} %" if mean else ""
    if limit is not None:
        text += f", {sum(row.regressed(limit) for row in comparison.rows)} past {100 * limit:g} %"
    for label, names in (
        ("not measured again", comparison.missing),
        ("new", comparison.new),
        ("no measurement after on", comparison.absent_series),
    ):
        text += f"; {label}: {', '.join(names)}" if names else ""
    return text
