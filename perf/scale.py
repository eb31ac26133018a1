"""`python -m tritoncp.perf.scale`: plans of up to 8M tokens on up to 1024 ranks, and what gives first.

Nothing here runs attention: a plan is made, on one CPU core, and its own numbers are read. Every plan is a
line of JSON as soon as it is known; what is in the file already is not made again.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from tritoncp import cost
from tritoncp.balance import balancers
from tritoncp.closed_forms import MaskMod, and_masks, causal, document, prefix_lm, sliding_window
from tritoncp.masks import Mask, create_block_mask
from tritoncp.perf.balance import Numbers, corpus_lengths
from tritoncp.plan import Plan, build
from tritoncp.steps import Hop

SIZES = (128, 512, 1024, 2048, 8192)
WORLDS = (8, 64, 256, 1024)
SCHEDULES = ("allgather", "ring", "fetch", "ulysses")
LAYER = cost.Shape()

MASKS: dict[str, Callable[[int], MaskMod]] = {
    "causal": lambda seq: causal(),
    "documents": lambda seq: and_masks(causal(), document(lengths=corpus_lengths(seq))),
    "window": lambda seq: sliding_window(4095),
    "prefix-LM": lambda seq: prefix_lm(seq // 4),
    "documents, window": lambda seq: and_masks(
        causal(), document(lengths=corpus_lengths(seq)), sliding_window(4095)
    ),
}


class Point(NamedTuple):
    """One plan, by what it is made from."""

    mask: str
    tokens: int  # in thousands (1024)
    world: int
    balancer: str


class Held:
    """The most memory that this process holds over what it held at the start, in MiB.

    Python's tracemalloc does not see what torch allocates; the kernel's high-water mark of resident memory
    sees all, once the allocator has given back what it kept.
    """

    def __init__(self) -> None:
        _give_back()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        self.before = _status("VmRSS")

    def most(self) -> float:
        return max(0.0, _status("VmHWM") - self.before)


def _give_back() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"this kernel does not say {name}: memory is measured on Linux only")


def measure(mask: Mask, point: Point) -> dict[str, Any]:
    """Make the plan of a point, choose a schedule as "auto" does, and make each schedule's tables."""
    held, begin = Held(), time.process_time()
    plan = build(mask, point.world, balancer=point.balancer, schedule="allgather")
    found: dict[str, Any] = {**point._asdict(), "place": _spent(begin, held), "imbalance": plan.imbalance}
    found["schedules"] = {name: of_schedule(plan, name) for name in SCHEDULES}
    held, begin = Held(), time.process_time()
    costs = cost.costs(plan, LAYER, cost.hardware_of(point.world))
    found["choose"], found["auto"] = _spent(begin, held), costs[0].schedule
    remote = int(plan.traffic.sum() - plan.traffic.diagonal().sum())
    found["travels"] = 100 * remote / ((plan.world_size - 1) * plan.kv.length)
    for each in costs:
        sent = max(cost.sent(plan, each.schedule, LAYER))
        found["schedules"][each.schedule] |= {"sent": sent, "ms": 1e3 * each.total, "extra": each.memory}
    return found


def of_schedule(plan: Plan, schedule: str) -> dict[str, float]:
    """What one rank makes beyond the placement before its first step: seconds of one core, most MiB."""
    view = replace(plan, schedule=schedule, rank=plan.world_size // 2, _shared={})
    held, begin = Held(), time.process_time()
    if schedule == "ring":  # the tables of later turns are made when those come
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
    return _spent(begin, held)


def _spent(begin: float, held: Held) -> dict[str, float]:
    return {"s": time.process_time() - begin, "mib": held.most()}


# -- the study ---------------------------------------------------------------------------------------


def points(sizes: Iterable[int], worlds: Iterable[int]) -> list[Point]:
    """Every plan of the study, those of one mask together. Ranks hold at least eight blocks of 128 tokens."""
    return [
        Point(mask, size, world, balancer)
        for mask in MASKS
        for size in sizes
        for world in worlds
        if size >= world
        for balancer in balancers
    ]


def run(sizes: Sequence[int], worlds: Sequence[int], results: Path) -> list[dict[str, Any]]:
    """Measure what is not in the file yet."""
    known = {key(line): line for line in read(results)}
    asked = points(sizes, worlds)
    missing = [point for point in asked if tuple(point) not in known]
    results.parent.mkdir(parents=True, exist_ok=True)
    made: tuple[tuple[str, int], Mask, float] | None = None
    for number, point in enumerate(missing, 1):
        if made is None or made[0] != (point.mask, point.tokens):
            begin, seq = time.process_time(), point.tokens * 1024
            mask = create_block_mask(MASKS[point.mask](seq), None, None, seq, seq)
            made = (point.mask, point.tokens), mask, time.process_time() - begin
        line = measure(made[1], point) | {"mask_s": made[2], "runs": len(made[1].runs.runs)}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        known[tuple(point)] = line
        click.echo(f"{number}/{len(missing)} {' '.join(map(str, point))}: {whole(line)['s']:.2f} s", err=True)
    return [known[tuple(point)] for point in asked]


def read(results: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of results; a line that was cut short is made again."""
    found = []
    for text in results.read_text().splitlines() if results.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in Point._fields)


def whole(line: dict[str, Any]) -> dict[str, float]:
    """Seconds and most MiB of one rank's whole plan: to place, to choose, to make the chosen tables."""
    parts = (line["place"], line["choose"], line["schedules"][line["auto"]])
    return {"s": sum(part["s"] for part in parts), "mib": max(part["mib"] for part in parts)}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sizes", default=SIZES, type=Numbers(), show_default=True, help="Thousands (1024) of tokens.")
@click.option("--worlds", default=WORLDS, type=Numbers(), show_default=True, help="Numbers of ranks.")
@click.option("--results", default=Path("scale.jsonl"), type=click.Path(dir_okay=False, path_type=Path))
def main(sizes: Sequence[int], worlds: Sequence[int], results: Path) -> None:
    """Make plans of every mask, length, world and balancer."""
    torch.set_num_threads(1)
    run(sizes, worlds, results)


if __name__ == "__main__":
    main()
