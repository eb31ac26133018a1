"""Cost of planning: time and memory of plans on one CPU core, and what the cost model predicts for them.

No attention runs. Each plan is a line of JSON, written as soon as the plan is built; plans whose lines the
file already has are not built again.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from tritoncp.perf.suite.machine import PeakMemory

from tritoncp import planning
from tritoncp.masks.mask import Mask
from tritoncp.planning import cost
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import build
from tritoncp.planning.derived import DerivedTables
from tritoncp.planning.plan import Plan
from tritoncp.planning.problem import Problem
from tritoncp.planning.traffic import Hop

SCHEDULES = tuple(name for name in planning.SCHEDULES if name != "ulysses+ring")
LIMITS = {"s": 1.0, "mib": 64.0}  # limits of the whole plan of 1M tokens on 64 ranks
GIB, MIB = 2**30, 2**20
LAYER = cost.Shape()
# The name of each mask in the page -> a key of planning.problem.MASKS.
MASKS = {
    "causal": "causal",
    "documents": "corpus",
    "window": "window4k",
    "prefix-LM": "prefix",
    "documents, window": "corpus-window4k",
}


class Point(NamedTuple):
    """The inputs of one plan of the study."""

    mask: str
    tokens: int  # in thousands (1024)
    world: int
    balancer: str


def measure(mask: Mask, point: Point) -> dict[str, Any]:
    """Build the plan of a point, choose a schedule as "auto" does, and build each schedule's tables."""
    memory, begin = PeakMemory(), time.process_time()
    plan = build(mask, point.world, balancer=point.balancer, schedule="allgather")
    line: dict[str, Any] = {
        **point._asdict(),
        "place": _measure_cost(begin, memory),
        "imbalance": plan.imbalance,
    }
    line["schedules"] = {name: measure_schedule(plan, name) for name in SCHEDULES}
    memory, begin = PeakMemory(), time.process_time()
    costs = cost.costs(plan, LAYER, cost.hardware_of(point.world))
    line["choose"], line["auto"] = _measure_cost(begin, memory), costs[0].schedule
    remote = int(plan.traffic.sum() - plan.traffic.diagonal().sum())
    line["travels"] = 100 * remote / ((plan.world_size - 1) * plan.kv.length)
    for estimate in costs:
        sent = max(cost.bytes_sent(plan, estimate.schedule, LAYER))
        line["schedules"][estimate.schedule] |= {
            "sent": sent,
            "ms": 1e3 * estimate.total,
            "extra": estimate.memory,
        }
    return line


def measure_schedule(plan: Plan, schedule: str) -> dict[str, float]:
    """Measure one rank's planning between placement and first step: seconds of one core, peak MiB."""
    derived = DerivedTables(plan.mask, plan.q, plan.kv)
    view = replace(plan, schedule=schedule, rank=plan.world_size // 2, derived=derived)
    memory, begin = PeakMemory(), time.process_time()
    if schedule == "ring":  # later turns build their tables when they start
        hops: Sequence[Hop] = view.ring
        view.tables(buffer=hops[0].owner)
    elif schedule == "fetch":
        view.tables(buffer=view.rank)
        view.tables(buffer="fetched")
    elif schedule == "ulysses":
        rows = view.rows(view.degree_for(LAYER.heads), LAYER.heads)
        rows.tables(buffer="gathered" if rows.world_size == 1 else "fetched")
    else:
        view.tables()
    return _measure_cost(begin, memory)


def _measure_cost(begin: float, memory: PeakMemory) -> dict[str, float]:
    return {"s": time.process_time() - begin, "mib": memory.growth() / MIB}


def list_points(sizes: Iterable[int], worlds: Iterable[int]) -> list[Point]:
    """List the plans of the study, grouped by mask. Ranks hold at least eight blocks of 128 tokens."""
    return [
        Point(mask, size, world, balancer)
        for mask in MASKS
        for size in sizes
        for world in worlds
        if size >= world
        for balancer in balancers
    ]


def measure_points(sizes: Sequence[int], worlds: Sequence[int], results: Path) -> list[dict[str, Any]]:
    """Measure the points that are not in the file yet; return the lines of all."""
    lines_by_key = {tuple(line[name] for name in Point._fields): line for line in read_lines(results)}
    all_points = list_points(sizes, worlds)
    missing = [point for point in all_points if tuple(point) not in lines_by_key]
    results.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines_by_key.values())
    results.write_text(text)  # drops an incomplete line
    numbers = itertools.count(1)
    for (name, tokens), points in itertools.groupby(missing, key=lambda point: (point.mask, point.tokens)):
        begin = time.process_time()
        mask = Problem(MASKS[name], tokens * 1024).block_mask()
        facts = {"mask_s": time.process_time() - begin, "runs": len(mask.runs.runs)}
        for point in points:
            line = measure(mask, point) | facts
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            lines_by_key[tuple(point)] = line
            words = " ".join(map(str, point))
            click.echo(f"{next(numbers)}/{len(missing)} {words}: {plan_cost(line)['s']:.2f} s", err=True)
    return [lines_by_key[tuple(point)] for point in all_points]


def read_lines(results: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file of results, without a line that was cut short."""
    lines = []
    for text in results.read_text().splitlines() if results.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def plan_cost(line: dict[str, Any]) -> dict[str, float]:
    """Return seconds and peak MiB of one rank's plan: placement, choice, tables of the chosen schedule."""
    parts = (line["place"], line["choose"], line["schedules"][line["auto"]])
    return {"s": sum(part["s"] for part in parts), "mib": max(part["mib"] for part in parts)}
