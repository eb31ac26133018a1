"""Checks that lines of JSON from unknown sources have the fields of a measurement.

They raise plain errors; the caller decides how to treat such a line.
"""

from __future__ import annotations

import math
from typing import Any

TIMES = 1e-9, 1e12  # range of times, in milliseconds: beyond, ratios overflow
OBJECTS = "env", "tags", "work", "ceilings", "state", "goal"


def finite(value: Any) -> bool:
    """Whether no number in decoded JSON is NaN or infinite; only Python's JSON has such numbers."""
    if isinstance(value, float):
        return math.isfinite(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(finite, parts))


def check_measurement(line: dict[str, Any]) -> None:
    """Check a line of kind "case", except its series. Raises KeyError, TypeError, ValueError or
    AttributeError if it is no measurement."""
    for name in ("run", "time", "case"):
        if not isinstance(line[name], str):
            raise TypeError(f"{name} is not text")
    if not line["case"].strip():
        raise ValueError("the case has no name")
    for name in OBJECTS:
        if not isinstance(line.get(name, {}), dict):
            raise TypeError(f"{name} is not an object")
    for name in ("ceilings", "goal"):
        if not all(map(_positive, line.get(name, {}).values())):
            raise ValueError(f"{name} has a value that is no positive number")
    _check_work(line.get("work", {}))
    for name, figures in line["contenders"].items():
        _check_figures(name, figures)
    # The errors of a wrong answer may be NaN.
    rest = [{k: v for k, v in figures.items() if k != "errors"} for figures in line["contenders"].values()]
    if not finite(rest + [value for name, value in line.items() if name != "contenders"]):
        raise ValueError("a number is NaN or infinite")


def _check_work(work: dict[str, Any]) -> None:
    """Raise TypeError unless amounts are numbers, and amounts by rank lists with one number for each rank."""
    ranks = [work[name] for name in ("rank_work", "rank_bytes") if name in work]
    if ranks and (
        len(ranks) == 1 or not all(isinstance(x, list) for x in ranks) or len({*map(len, ranks)}) > 1
    ):
        raise TypeError("work holds rank_work and rank_bytes that are not one number for each rank")
    others = [value for name, value in work.items() if name not in ("rank_work", "rank_bytes")]
    if not all(map(_is_number, sum(ranks, others))):
        raise TypeError("work has a value that is no number")


def _check_figures(name: str, figures: dict[str, Any]) -> None:
    """Check the figures of a contender. Raises KeyError, TypeError or ValueError for unusable ones."""
    if not name.split():
        raise ValueError("a contender has no name")
    if not isinstance(figures, dict):
        raise TypeError(f"the figures of {name} are not an object")
    times = [figures[key] for key in ("ms", "low", "high") if key in figures]
    if not times and not isinstance(figures.get("why"), str):
        raise KeyError(f"{name} has neither ms nor why")
    if len(times) not in (0, 1, 3) or (times and "ms" not in figures):
        raise KeyError(f"{name} has a part of median and quartiles")
    samples = figures.get("samples", [])
    if not isinstance(samples, list):
        raise TypeError(f"the samples of {name} are not a list")
    if not all(map(_positive, [*times, *samples])):
        raise ValueError(
            f"the times of {name} are not positive numbers between {TIMES[0]:g} and {TIMES[1]:g}"
        )
    for key in ("n", "host_ms", "peak_bytes", "setup_s"):
        if not _is_number(figures.get(key, 0)):
            raise TypeError(f"{key} of {name} is not a number")


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _positive(x: Any) -> bool:
    return _is_number(x) and TIMES[0] <= x <= TIMES[1]
