"""Columns of numbers for the page: logarithms of times as whole numbers, ordered by byte.

Narrow columns (16 bits) suffice for charts. Wide ones (32 bits) hold the figures that two runs are compared
by, to eight digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tritoncp.perf.dashboard.compare import count_samples, median_variance
from tritoncp.perf.records.history import Point

STEP, NONE = 2.5e-4, -32768  # an error of at most an eighth of a per mille; a failure or an absent baseline
WIDE_STEP, WIDE_NONE = 2.5e-8, -(2**31)
LEAST_ERROR = 1e-12  # stands for an error of zero, which has no logarithm
Numbers = tuple[Sequence[int], Sequence[int]]


def pack_columns(
    lines: Sequence[Sequence[Point]],
    numbers: Sequence[Numbers],
    units: Sequence[float],
    families: Sequence[str],
) -> bytes:
    """Pack the columns of all points of all lines, one after another.

    int32: run; env; logarithm of time over the line's unit; logarithm of the standard error of the logarithm
    of time. int16: samples; logarithms of time over lower quartile, upper quartile over time, and each
    family's time over tritoncp's.

    numbers: of each line the numbers of runs and of envs; units: of each line
    """
    columns = [_make_columns(*line, families) for line in zip(lines, numbers, units, strict=True)]
    return b"".join(_split_byte_planes(np.concatenate(column)) for column in zip(*columns, strict=True))


def median_time(points: Sequence[Point]) -> float:
    """Return the median time of a line, which is the unit of its logarithms; 1 without times."""
    times = [point.ms for point in points if point.ms]
    return float(np.median(times)) if times else 1.0


def _make_columns(
    points: Sequence[Point], numbers: Numbers, unit: float, families: Sequence[str]
) -> list[np.ndarray]:
    own_figures = [point.own for point in points]
    speedups = [point.speedups() for point in points]
    wide = [
        *numbers,
        [quantize(figures.get("ms"), unit, WIDE_STEP, WIDE_NONE) for figures in own_figures],
        [quantize(_standard_error(figures), 1.0, WIDE_STEP, WIDE_NONE) for figures in own_figures],
    ]
    narrow = [
        [min(count_samples(figures), -NONE - 1) for figures in own_figures],
        [quantize(figures.get("ms"), figures.get("low", figures.get("ms"))) for figures in own_figures],
        [quantize(figures.get("high", figures.get("ms")), figures.get("ms")) for figures in own_figures],
    ]
    narrow += [[quantize(figures.get(name), 1.0) for figures in speedups] for name in families]
    return [*(np.array(x, "<i4") for x in wide), *(np.array(x, "<i2") for x in narrow)]


def _standard_error(figures: dict[str, Any]) -> float | None:
    """Return the standard error of the logarithm of a median; None where it is unknown."""
    variance = median_variance(figures) if "ms" in figures else None
    return None if variance is None else max(math.sqrt(variance), LEAST_ERROR)


def quantize(x: float | None, unit: float | None, step: float = STEP, none: int = NONE) -> int:
    """Return the logarithm of a positive number over a unit as a multiple of the step; ``none`` for None.

    >>> quantize(1.01, 1.0), quantize(None, 1.0)
    (40, -32768)
    """
    if x is None or unit is None:
        return none
    return max(none + 1, min(-none - 1, round(math.log(x / unit) / step)))


def _split_byte_planes(x: np.ndarray) -> bytes:
    """Reorder bytes by significance, all lowest bytes first, which deflate compresses better."""
    return np.ascontiguousarray(x.view(np.uint8).reshape(len(x), -1).T).tobytes()
