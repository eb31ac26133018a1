"""Where a series of times changed its level, and what changed with it.

Logarithms of times, cleaned of outliers, are cut where that lowers the sum of squares around each piece's
mean by more than a penalty (PELT, arXiv 1101.1438, by ruptures). The penalty was chosen by simulation, see
tests/perf/test_changes.py: with 1 % noise and 2 % of points 10 to 30 % too slow, 120 points, a step of 3 % is
found within 3 points in 99 of 100 series, and 2 in 1000 flat ones are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import ruptures
from numpy.lib.stride_tricks import sliding_window_view

from tritoncp.perf.record import ATTRIBUTES, Point

WINDOW = 9  # points whose median says what a point should be about
CLIP = 2.0  # standard deviations that a point may be away from there
LEAST_POINTS = 5  # in a piece
PENALTY = 4.0  # variances times log(points) that a cut has to be worth
LEAST = 0.01  # relative change of the level below which nobody is told
NEAR = 3  # points around a change where its cause may be


class Change(NamedTuple):
    """A new level from point ``at`` on; before and after are medians, in the unit of the series."""

    at: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


class Cause(NamedTuple):
    """An attribute that changed at a point: how many points after the change (0: with it)."""

    name: str
    before: str
    after: str
    away: int


def find(values: Sequence[float], least: float = LEAST) -> list[Change]:
    """Changes of level in positive numbers, in order.

    >>> find([1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 1.1, 1.11, 1.1, 1.09, 1.1, 1.1])
    [Change(at=6, before=1.0, after=1.1)]
    """
    if len(values) < 2 * LEAST_POINTS:
        return []
    logs = np.log(np.asarray(values, dtype=np.float64))
    noise = max(_noise(logs), least / 20)
    level = _running_median(logs)
    clean = level + np.clip(logs - level, -CLIP * noise, CLIP * noise)
    search = ruptures.KernelCPD(kernel="linear", min_size=LEAST_POINTS).fit(clean[:, None] / noise)
    ends = search.predict(pen=PENALTY * np.log(len(logs)))
    return _told(np.asarray(values), [0, *ends], least)


def _noise(logs: np.ndarray) -> float:
    """Standard deviation of neighbours' differences over √2, by their median: steps and outliers hardly
    count."""
    return float(1.4826 * np.median(np.abs(np.diff(logs))) / np.sqrt(2))


def _running_median(x: np.ndarray) -> np.ndarray:
    """Mirrored at the ends without repeating them, so that an outlier there stays alone."""
    width = min(WINDOW, len(x) - (len(x) + 1) % 2)
    padded = np.pad(x, width // 2, mode="reflect")
    return np.median(sliding_window_view(padded, width), axis=1)


def _told(values: np.ndarray, edges: list[int], least: float) -> list[Change]:
    """Pieces as changes between them; those next to each other that differ too little are one."""
    while True:
        medians = [float(np.median(values[a:b])) for a, b in pairwise(edges)]
        sizes = [abs(np.log(after / before)) for before, after in pairwise(medians)]
        if not sizes or min(sizes) >= least:
            return [Change(int(at), *pair) for at, *pair in zip(edges[1:], medians, medians[1:])]
        del edges[1 + int(np.argmin(sizes))]


def causes(points: Sequence[Point], at: int) -> list[Cause]:
    """What else changed at point ``at`` or up to NEAR points away, nearest first.

    >>> from tritoncp.perf.record import Series
    >>> points = [Point("r", "t", "c", Series("d"), {"torch": v}, {}) for v in ("2.12", "2.13")]
    >>> causes(points, 1)
    [Cause(name='torch', before='2.12', after='2.13', away=0)]
    """
    found = []
    for i in range(max(1, at - NEAR), min(len(points), at + NEAR + 1)):
        found += [Cause(*changed, i - at) for changed in changed_attributes(points[i - 1].env, points[i].env)]
    return sorted(found, key=lambda cause: abs(cause.away))


def changed_attributes(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Attributes that both know and that differ: name, before, after."""
    return [
        (name, str(before[name]), str(after[name]))
        for name in ATTRIBUTES
        if name in before and name in after and before[name] != after[name]
    ]
