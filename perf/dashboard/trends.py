"""Trends of cases over runs: change points, their possible causes, and the newest time against its level.

The series of logarithms of times, without outliers, is split where that lowers the sum of squares around the
pieces' means by more than a penalty (PELT, arXiv 1101.1438, by ruptures). The penalty was chosen by
simulation, see tests/perf/dashboard/test_trends.py: with 1 % noise and 2 % of points 10 to 30 % too slow, 120
points, a step of 3 % is detected within 3 points in 99 of 100 series, and 2 in 1000 flat series are split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.special import stdtrit

from tritoncp.perf.records.history import ATTRIBUTES, Point

try:
    import ruptures
except ImportError:  # releases up to 1.1.10 do not support Python 3.14
    ruptures = None

MISSING = (  # text of the page without ruptures
    "Changes of level are not detected, since the package ruptures is not installed (there is no release for "
    "Python 3.14): make the page with Python 3.11 to 3.13 and pip install ruptures."
)
WINDOW = 9  # points of the running median
CLIP = 2.0  # standard deviations from the running median, beyond which points are clipped
LEAST_POINTS = 5  # least points of a piece
PENALTY = 4.0  # smallest gain of a cut, in variances times log(points)
LEAST = 0.01  # smallest relative change of the level that is reported
NEAR = 3  # points before and after a change that are searched for causes
LEAST_BEFORE = 4  # least points of a level for a sure verdict on the newest one
CONFIDENCE = 0.99  # level of the interval around the newest point's ratio to its level
GROSS = 6.0  # robust standard deviations from the median, beyond which points are left out of the noise
LARGE = 0.1  # relative change that is reported even if it is not sure, by noise or too few points
# Most urgent first. "maybe": a large change that noise, or too few points, may explain
STATUSES = (
    *("fails now", "slower", "maybe slower", "fails still", "faster", "maybe faster", "as before"),
    "first run",
)


class Change(NamedTuple):
    """A new level from point ``at`` on; before and after are medians, in the unit of the series."""

    at: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


class Cause(NamedTuple):
    """An attribute that changed near a change of level. away: number of points after it (0: at it)"""

    name: str
    before: str
    after: str
    away: int


class Newest(NamedTuple):
    """The newest time divided by the level before it, and the interval of that ratio; None if unknown.

    status: one of STATUSES; earlier: number of points in the level before it
    """

    status: str
    earlier: int
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Trend(NamedTuple):
    """The trend of a case on one series: points in order of time, changes of level, comparison of the newest
    point. loss: the present level divided by the lowest earlier one, at least 1"""

    points: list[Point]
    changes: list[Change]
    newest: Newest
    loss: float

    @property
    def urgency(self) -> tuple[float, ...]:
        """Sort key: new failures, slower cases by ratio, old failures, cases slower than their best level,
        then by distance below the goal."""
        last, newest = self.points[-1], self.newest
        slower = newest.status in ("slower", "maybe slower")
        groups = newest.status == "fails now", slower, newest.status == "fails still", self.loss > 1
        group = next((i for i, member in enumerate(groups) if member), len(groups))
        size = (newest.ratio or 1.0) if slower else self.loss
        return group, -size, last.worst or math.inf


def find_trend(points: Sequence[Point]) -> Trend:
    """Find the changes of a case, whose points are in order of time, and compare its newest one."""
    timed = [i for i, point in enumerate(points) if point.ms]
    times = [points[i].ms or 1.0 for i in timed]
    changes = find_changes(times)
    if points[-1].ms:
        newest = compare_newest(times, changes)
    else:
        newest = Newest("fails now" if len(points) > 1 and points[-2].ms else "fails still", 0)
    lowest = min((change.before for change in changes), default=math.inf)
    loss = max(1.0, changes[-1].after / lowest) if changes else 1.0
    return Trend([*points], [change._replace(at=timed[change.at]) for change in changes], newest, loss)


def find_changes(values: Sequence[float]) -> list[Change]:
    """Find the changes of level in positive numbers, in order; none without the package ruptures.

    >>> find_changes([1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 1.1, 1.11, 1.1, 1.09, 1.1, 1.1])
    [Change(at=6, before=1.0, after=1.1)]
    """
    if ruptures is None or len(values) < 2 * LEAST_POINTS:
        return []
    logs = np.log(np.asarray(values, dtype=np.float64))
    noise = max(_estimate_noise(logs), LEAST / 20)
    level = _running_median(logs)
    clean = level + np.clip(logs - level, -CLIP * noise, CLIP * noise)
    search = ruptures.KernelCPD(kernel="linear", min_size=LEAST_POINTS).fit(clean[:, None] / noise)
    ends = search.predict(pen=PENALTY * np.log(len(logs)))
    return _merge_pieces(np.asarray(values), [0, *ends])


def compare_newest(values: Sequence[float], changes: Sequence[Change] = ()) -> Newest:
    """Compare the newest of some positive numbers with the numbers before it, since the last of ``changes``.

    A change of level is detected after LEAST_POINTS; this compares the newest value at once with the values
    before it. In logarithms, with m the mean and s the standard deviation of the n values before it, the next
    value of the same level and a normal noise lies with probability 1 - a within

        m ± t(1 - a/2; n - 1) · s · √(1 + 1/n)

    (a prediction interval for one observation: Hahn and Meeker, Statistical Intervals, 1991, chapter 4).
    Values farther than GROSS · 1.4826 · MAD (the median distance from the median) from the median of the n
    are left out first, so that a disturbed value neither moves the level nor widens the interval. The
    newest is slower if it is above the interval and by more than LEAST above the level. A change by more
    than LARGE that is not sure, or has fewer than LEAST_BEFORE values before it, is a "maybe".

    >>> compare_newest([1.0, 1.01, 0.99, 1.0, 1.01, 1.15]).status, compare_newest([1.0, 1.0, 1.6]).status
    ('slower', 'maybe slower')
    """
    start = changes[-1].at if changes else 0
    *earlier, newest = np.log(np.asarray(values[start:], dtype=np.float64))
    if not earlier:
        return Newest("first run", 0)
    level, noise, count = _estimate_level(np.asarray(earlier))
    distance = float(newest) - level
    word = "slower" if distance > 0 else "faster"
    unsure = f"maybe {word}" if abs(distance) > math.log1p(LARGE) else "as before"
    if len(earlier) < LEAST_BEFORE:
        return Newest(unsure, count, math.exp(distance))
    width = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * noise * math.sqrt(1 + 1 / count)
    sure = abs(distance) > max(width, math.log1p(LEAST))
    low, ratio, high = (math.exp(distance + side * width) for side in (-1, 0, 1))
    return Newest(word if sure else unsure, count, ratio, low, high)


def _estimate_level(logs: np.ndarray) -> tuple[float, float, int]:
    """Return mean, standard deviation and count of the values that are not grossly away from their median."""
    distances, least_noise = np.abs(logs - np.median(logs)), LEAST / 20
    inliers = logs[distances <= GROSS * max(1.4826 * float(np.median(distances)), least_noise)]
    deviation = float(inliers.std(ddof=1)) if len(inliers) > 1 else 0.0
    return float(inliers.mean()), max(deviation, least_noise), len(inliers)


def _estimate_noise(logs: np.ndarray) -> float:
    """Estimate the noise as the median difference of neighbours, over √2, on which steps and outliers have
    little effect."""
    return float(1.4826 * np.median(np.abs(np.diff(logs))) / np.sqrt(2))


def _running_median(x: np.ndarray) -> np.ndarray:
    """Return the running median, with mirrored ends (the end points are not repeated, so that an outlier
    there counts once)."""
    width = min(WINDOW, len(x) - (len(x) + 1) % 2)
    padded = np.pad(x, width // 2, mode="reflect")
    return np.median(sliding_window_view(padded, width), axis=1)


def _merge_pieces(values: np.ndarray, edges: list[int]) -> list[Change]:
    """Return the changes between pieces, after merging neighbours that differ by less than LEAST."""
    while True:
        medians = [float(np.median(values[a:b])) for a, b in pairwise(edges)]
        sizes = [abs(np.log(after / before)) for before, after in pairwise(medians)]
        if not sizes or min(sizes) >= LEAST:
            return [Change(int(at), *pair) for at, *pair in zip(edges[1:], medians, medians[1:])]
        del edges[1 + int(np.argmin(sizes))]


def find_causes(points: Sequence[Point], at: int) -> list[Cause]:
    """List other changes at point ``at`` or up to NEAR points away, nearest first.

    >>> from tritoncp.perf.records.history import Series
    >>> points = [Point("r", "t", "c", Series("d"), {"torch": v}, {}) for v in ("2.12", "2.13")]
    >>> find_causes(points, 1)
    [Cause(name='torch', before='2.12', after='2.13', away=0)]
    """
    nearby = []
    for i in range(max(1, at - NEAR), min(len(points), at + NEAR + 1)):
        before, after = points[i - 1].env, points[i].env
        nearby += [
            Cause(name, str(before[name]), str(after[name]), i - at)
            for name in ATTRIBUTES
            if name in before and name in after and before[name] != after[name]
        ]
    return sorted(nearby, key=lambda cause: abs(cause.away))
