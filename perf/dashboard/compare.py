"""Comparison of two sets of measurements: a ratio and its confidence interval for each case.

The logarithm of a case's time is the mean over runs of the logarithms of their medians. Its variance is the
variance between the runs; with one run, the variance of its median by order statistics (McKean and Schrader,
Comm. Stat. B 13, 1984), which does not include the variance between runs.
"""

from __future__ import annotations

import math
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tritoncp.perf.exit_codes import InputError
from tritoncp.perf.records.history import BrokenLine, Point, read

LEVEL = 0.95
Z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)


class Estimate(NamedTuple):
    """An estimate of the logarithm of a time, with its variance (or None) and degrees of freedom."""

    mean: float
    variance: float | None
    freedom: float


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
        """Whether the case is broken; or, with a limit, slower by more than it with an interval above 1.

        >>> ComparedCase("c", "d", 1.0, 1.06, 1.06, 1.02, 1.1, (3, 3)).regressed(0.05)
        True
        >>> ComparedCase("c", "d", 1.0, 1.06, 1.06, 0.98, 1.15, (3, 3)).regressed(0.05)
        False
        """
        if limit is None or self.ratio is None:
            return self.broken
        return self.ratio > 1 + limit and (self.low is None or self.low > 1)


class Comparison(NamedTuple):
    """Rows, worst first, and the cases that have no row, with their device if there are several.

    missing: cases measured before but not after: on the same series, or on any if no series has the case
    after
    new: cases measured after but not before
    absent_series: series measured before but not after, of whose cases another series has a time after
    """

    rows: list[ComparedCase]
    missing: list[str]
    new: list[str]
    absent_series: list[str]

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
    low, high = _ratio_interval(first, second)
    return ComparedCase(*key, time_before, time_after, math.exp(second.mean - first.mean), low, high, runs)


def estimate(points: Sequence[Point]) -> Estimate | None:
    """Estimate the time of a case from several runs; None if all failed.

    >>> from tritoncp.perf.records.history import Series
    >>> figures = {"ms": 2.0, "samples": [1.98, 1.99, 2.0, 2.01, 2.02] * 4}
    >>> result = estimate([Point("r", "t", "c", Series("GPU"), {}, {"tritoncp": figures})])
    >>> round(math.exp(result.mean), 3), round(math.sqrt(result.variance), 4)
    (2.0, 0.0026)
    """
    timed_points = [point for point in points if point.ms]
    if not timed_points:
        return None
    logs = [math.log(point.ms) for point in timed_points if point.ms]
    if len(logs) > 1:
        spread = statistics.variance(logs) / len(logs)
        return Estimate(statistics.fmean(logs), spread, len(logs) - 1)
    samples = timed_points[0].own.get("samples", ())
    return Estimate(logs[0], median_variance(samples), max(1, len(samples) - 1))


def median_variance(samples: Sequence[float]) -> float | None:
    """Return the variance of the logarithm of the median of samples; None for too few of them."""
    n, ordered = len(samples), sorted(samples)
    if n < 5:
        return None
    # The median's interval is from here to -rank.
    rank = max(0, round((n + 1) / 2 - Z * math.sqrt(n / 4)) - 1)
    return (math.log(ordered[n - 1 - rank] / ordered[rank]) / (2 * Z)) ** 2


def _ratio_interval(before: Estimate, after: Estimate) -> tuple[float | None, float | None]:
    """Return the confidence interval of the ratio after over before, by Welch's degrees of freedom."""
    if before.variance is None or after.variance is None:
        return None, None
    from scipy.special import stdtrit

    total = before.variance + after.variance
    parts = before.variance**2 / before.freedom + after.variance**2 / after.freedom
    width = float(stdtrit(total**2 / parts, (1 + LEVEL) / 2)) * math.sqrt(total) if parts else 0.0
    middle = after.mean - before.mean
    return math.exp(middle - width), math.exp(middle + width)


def _sort_key(row: ComparedCase) -> tuple[bool, float]:
    """Return the sort key of a row: failures, then what is surely slower or has no interval, then the others,
    with the largest ratio first.

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
    """Read the points of a side of a comparison. word: a file or folder; else, in the history, a commit (or a
    name that git resolves to one), a version, a run, or a device. tell: called with every broken line

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
        command = ["git", "rev-parse", "--verify", "--quiet", f"{word}^{{commit}}"]
        try:
            word = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "no commit"
        except OSError:  # git is not installed
            return []
    return [point for point in points if str(point.env.get("commit", "")).startswith(word.lower())]


def lines(comparison: Comparison, limit: float | None) -> list[tuple[str, ...]]:
    """Format the rows, worst first: case, before, after, change, confidence interval, verdict."""
    return [
        (
            comparison.label(row),
            format_time(row.before),
            format_time(row.after),
            "" if row.ratio is None else f"{100 * (row.ratio - 1):+.1f} %",
            "unknown" if row.low is None or row.high is None
            else f"{100 * (row.low - 1):+.1f} … {100 * (row.high - 1):+.1f} %",
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
