"""Estimates of the time of a case from several runs, and confidence intervals of ratios of two estimates.

The logarithm of a case's time is the mean over runs of the logarithms of their medians. Its variance is the
variance between the runs; with one run, the variance of its median by order statistics (McKean and Schrader,
Comm. Stat. B 13, 1984), which does not include the variance between runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tritoncp.perf.records.history import Point

LEVEL = 0.95
Z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)


class Estimate(NamedTuple):
    """An estimate of the logarithm of a time, with its variance (or None) and degrees of freedom."""

    mean: float
    variance: float | None
    freedom: float


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


def ratio_interval(before: Estimate, after: Estimate) -> tuple[float | None, float | None]:
    """Return the confidence interval of the ratio after over before, by Welch's degrees of freedom."""
    if before.variance is None or after.variance is None:
        return None, None
    from scipy.special import stdtrit

    total = before.variance + after.variance
    parts = before.variance**2 / before.freedom + after.variance**2 / after.freedom
    width = float(stdtrit(total**2 / parts, (1 + LEVEL) / 2)) * math.sqrt(total) if parts else 0.0
    middle = after.mean - before.mean
    return math.exp(middle - width), math.exp(middle + width)


def format_interval(low: float | None, high: float | None) -> str:
    """
    >>> format_interval(0.98, 1.021)
    '-2.0 … +2.1 %'
    """
    return "unknown" if low is None or high is None else f"{100 * (low - 1):+.1f} … {100 * (high - 1):+.1f} %"
