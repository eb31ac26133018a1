"""The check of a line of JSON from any source: whether it has the fields of a measurement.

It raises plain errors; the caller decides how to treat such a line.
"""

from __future__ import annotations

from typing import Any

TIMES = 1e-9, 1e12  # range of times, in milliseconds: beyond, ratios overflow
OBJECTS = "env", "tags", "work", "state", "goal"


def check_measurement(line: dict[str, Any]) -> None:
    """Check a line of kind "case". Raises KeyError, TypeError, ValueError or AttributeError if it is no
    measurement."""
    for name in ("run", "time", "case"):
        if not isinstance(line[name], str) or not line[name].strip():
            raise TypeError(f"{name} is not text")
    for name in OBJECTS:
        if not isinstance(line.get(name, {}), dict):
            raise TypeError(f"{name} is not an object")
    for name in ("series", "tags"):
        if not all(isinstance(part, str) for part in line.get(name, {}).values()):
            raise TypeError(f"{name} has a value that is no text")
    if not all(map(_is_positive, line.get("goal", {}).values())):
        raise ValueError("goal has a value that is no positive number")
    work = dict(line.get("work", {}))
    ranks = [work.pop(name) for name in ("rank_work", "rank_bytes") if name in work]
    if ranks and not (len(ranks) == 2 and len(ranks[0]) == len(ranks[1])):
        raise ValueError("work holds rank_work and rank_bytes that are not one number for each rank")
    if not all(map(_is_number, sum(ranks, [*work.values()]))):
        raise TypeError("work has a value that is no number")
    for name, figures in line["contenders"].items():
        _check_figures(name, figures)


def _check_figures(name: str, figures: dict[str, Any]) -> None:
    """Check the figures of a contender. Raises KeyError, TypeError or ValueError for unusable ones."""
    if not name.split():
        raise ValueError("a contender has no name")
    if "ms" not in figures and not isinstance(figures.get("why"), str):
        raise KeyError(f"{name} has neither ms nor why")
    times = [figures[key] for key in ("ms", "low", "high") if key in figures]
    if len(times) == 2 or (times and "ms" not in figures):
        raise KeyError(f"{name} has a part of median and quartiles")
    if not all(map(_is_positive, [*times, *figures.get("samples", [])])):
        raise ValueError(
            f"the times of {name} are not positive numbers between {TIMES[0]:g} and {TIMES[1]:g}"
        )
    for key in ("n", "host_ms", "peak_bytes", "setup_s"):
        if not _is_number(figures.get(key, 0)):
            raise TypeError(f"{key} of {name} is not a number")


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _is_positive(x: Any) -> bool:
    return _is_number(x) and TIMES[0] <= x <= TIMES[1]
