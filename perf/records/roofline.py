"""Distance of a measured rate to the device's bound, and alarms for rates above it.

The bound of a case is the lower of two measured rates: a bfloat16 matrix product, and a copy through memory
times the FLOPs for each byte. A rate above it is impossible for correct figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tritoncp.perf.records.history import Point

TOLERANCE = 0.1  # bounds are measured, and a kernel that mostly reads may be this much faster than a copy
MOST = 1e30  # FLOPs or bytes; a history from elsewhere may have any number


class Alarm(NamedTuple):
    """A contender whose rate is above the bound; share: its rate over the bound."""

    contender: str
    share: float

    def __str__(self) -> str:
        return f"{self.contender}: {100 * self.share:.0f} % of the bound: the figure or the count is wrong"


def bound_share(ms: float, work: Mapping[str, Any], ceilings: Mapping[str, float]) -> float | None:
    """Return the rate of useful work over the device's bound; None where a part of either is unknown
    or impossible.

    >>> ceilings = {"matmul_tflops": 800.0, "copy_gbytes_per_s": 4000.0}
    >>> bound_share(10.0, {"flops": 4e12, "hbm_bytes": 3e8}, ceilings)
    0.5
    """
    amounts = [work.get(name) for name in ("flops", "hbm_bytes")]
    rates = [ceilings.get(name) for name in ("matmul_tflops", "copy_gbytes_per_s")]
    if not all(x and 0 < x < MOST for x in (*amounts, *rates)):
        return None
    (flops, moved), (tflops, gbytes) = amounts, rates
    return max(flops / (tflops * 1e9), moved / (gbytes * 1e6)) / ms  # type: ignore[operator]


def find_alarms(point: Point) -> list[Alarm]:
    """List the contenders of a measurement that are above the bound by more than the tolerance."""
    figures = {name: row["ms"] for name, row in point.contenders.items() if "ms" in row}
    shares = {name: bound_share(ms, point.work, point.ceilings) for name, ms in figures.items()}
    return [Alarm(name, share) for name, share in shares.items() if share and share > 1 + TOLERANCE]
