"""Chooses the default route of the forward pass from lines of a history.

A line with times of ``ROUTE=loops`` and of another route sets the default for calls with its dtype, head dims
and kind of mask, on its device with its version of Triton: the fastest right route, if it beats
loops by more than `tile_tables.MIN_SPEEDUP`, else loops. Where lines for the same calls disagree, the longer
sequence counts, then the newer line. The entry of a route that is no longer chosen is removed.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tritoncp.kernels.options import ROUTES, WRONG_ROUTE
from tritoncp.perf.records.history import variant
from tritoncp.perf.suite.cases import CASES, Case

from tritoncp.ops import tile_lookup, tile_tables
from tritoncp.ops.tile_tables import Device
from tritoncp.planning.problem import MASKS

DAY = 86400.0  # seconds by which the clocks of two machines may differ
_LENGTH = 4096  # of the mask that is built to determine its kind


class RouteChoice(NamedTuple):
    """The default route of calls on a device with a version of Triton. entry: for a file of tile shapes; None
    for loops.

    key: the calls, from `tile_tables.entry_key`; time: of the measurement (ISO 8601, UTC)
    """

    device: Device
    triton: str
    key: tuple[Any, ...]
    time: str
    entry: dict[str, Any] | None


def choices_of(lines: Iterable[Mapping[str, Any]]) -> list[RouteChoice]:
    """Choose the routes from lines of a history: one for each device, Triton and kind of call."""
    cases = {case.name: case for case in CASES if _is_plain(case)}
    settled: dict[tuple[Any, ...], tuple[tuple[int, str], RouteChoice]] = {}
    for line in lines:
        case = cases.get(line["case"]) if line["kind"] == "case" else None
        choice = _choose_route(line, case) if case is not None else None
        if case is None or choice is None:
            continue
        key, rank = (choice.device, choice.triton, choice.key), (case.problem.seq, choice.time)
        if key not in settled or settled[key][0] <= rank:
            settled[key] = rank, choice
    return [choice for _, choice in settled.values()]


def _is_plain(case: Case) -> bool:
    """Whether a case is a forward pass on one device, without sinks, score_mod or few queries."""
    problem = case.problem
    scored = MASKS[problem.mask].sinks or MASKS[problem.mask].score
    return case.which == "forward" and problem.world == problem.batch == 1 and not (problem.queries or scored)


def _choose_route(line: Mapping[str, Any], case: Case) -> RouteChoice | None:
    """Choose the route from one line; None where it does not compare routes, or lacks device, Triton or
    time."""
    env, contenders = line.get("env", {}), line["contenders"]
    names = [env.get(name) for name in ("arch", "triton", "sources")]
    when = _parse_utc(line["time"])
    loops, *others = (contenders.get(variant({"ROUTE": route}), {}) for route in ROUTES)
    loops_ms = _time_of(loops)
    times = {route: _time_of(row) for route, row in zip(ROUTES[1:], others) if _has_result(row)}
    if not all(isinstance(name, str) and name for name in names) or not (when and loops_ms and times):
        return None
    arch, triton, sources = names
    right_times = {route: ms for route, ms in times.items() if ms is not None}
    best = min(right_times, key=right_times.__getitem__, default=None)
    problem = case.problem
    kind = tile_lookup.kind_of(replace(problem, seq=_LENGTH).block_mask())
    base = {"kernel": "route", **problem.tile_key, "mask": kind}
    won = best is not None and loops_ms / right_times[best] > tile_tables.MIN_SPEEDUP
    entry = {
        **base,
        "shape": problem.shape,
        "config": {"ROUTE": best},
        "ms": right_times[best],
        "rule_ms": loops_ms,
        "time": when,
        "code": sources,
    } if won and best is not None else None  # fmt: skip
    device = Device(str(arch), line["series"]["device"])
    return RouteChoice(device, str(triton), tile_tables.entry_key(base), when, entry)


def _has_result(row: Mapping[str, Any]) -> bool:
    """Whether a route was timed or was wrong; False where it could not run."""
    why = str(row.get("why", ""))
    return "ms" in row or why.startswith("wrong") or WRONG_ROUTE in why


def _time_of(row: Mapping[str, Any]) -> float | None:
    """Return the time of a contender, or None if its answer was wrong."""
    return None if "why" in row else row.get("ms")


def _parse_utc(text: str) -> str:
    """Convert a time to UTC in ISO 8601; "" for text that is not a time, has no zone, or is in the future."""
    try:
        when = datetime.datetime.fromisoformat(text)
        if when.tzinfo is None or when.timestamp() > time.time() + DAY:
            return ""
        return when.astimezone(datetime.UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        return ""
