"""Simulated start order of the programs of a launch: the time until the last program ends, relative to
multiprocessors that are busy until the end.

A multiprocessor holds as many programs as the compiled kernel's resources allow
(``kernels/configs/resources.json``), and takes the next one when one ends. A program takes one unit of time
for each block that its slot lists in the plan's run tables; memory, caches and launches are not in the model.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tritoncp.analysis.resource_table import Row, read_table
from tritoncp.kernels.options import choose
from tritoncp.kernels.program_order import section_heads
from tritoncp.masks.block_runs import Runs
from tritoncp.perf.suite.cases import CASES
from tritoncp.planning.build import build
from tritoncp.planning.problem import Problem
from tritoncp.planning.step_tables import Tables

MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
KERNELS = ("forward", "dq", "dkdv")


class Step(NamedTuple):
    """One step of attention on one GPU."""

    name: str
    problem: Problem
    tables: Tables


@dataclass(frozen=True)
class Estimate:
    """Simulated times of one launch, over the least time of any order.

    by_head: with all tiles of a head before those of the next head, by position
    by_section: in the order of :mod:`tritoncp.kernels.program_order`
    """

    step: str
    kernel: str
    programs: int
    by_head: float
    by_section: float


def makespan(durations: Iterable[float], places: int) -> float:
    """Return the time at which the last program ends, if the programs start in this order, each as soon as
    one of ``places`` is free.

    >>> makespan([1, 1, 1, 3], 2), makespan([3, 1, 1, 1], 2)
    (4.0, 3.0)
    """
    ends = [0.0] * places
    for duration in durations:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def least_makespan(durations: Sequence[float], places: int) -> float:
    """Return a time in whole units that no order of the programs can undercut: all places busy until the end,
    or k + 1 of the k * places + 1 longest programs on one place.

    >>> least_makespan([3, 3, 3, 1], 2), least_makespan([1, 1, 1, 3], 2)
    (6, 3)
    """
    longest = sorted(durations, reverse=True)
    shared = ((k + 1) * duration for k, duration in enumerate(longest[::places]))
    return max(-(-sum(longest) // places), *shared)


def steps() -> Iterator[Step]:
    """Yield the steps of the benchmark's problems on one GPU, from 4K tokens on, and hops of a ring of 8."""
    lengths = [Problem(mask, seq) for mask in ("causal", "document") for seq in (4096, 8192, 16384, 32768)]
    cases = [case.problem for case in CASES if case.problem.world == 1 and not case.problem.queries]
    for problem in dict.fromkeys([*lengths, *(problem for problem in cases if problem.seq >= 8192)]):
        yield Step(problem.name, problem, build(problem.block_mask()).tables(heads=problem.heads))
    for mask in ("causal", "document"):
        problem = Problem(mask, 65536, world=8, schedule="ring")
        plan = build(problem.block_mask(), problem.world, schedule=problem.schedule).seen_by(3)
        yield Step(f"{problem.name}, a hop", problem, plan.tables(heads=problem.heads, buffer=5))


def estimate(step: Step, kernel: str, arch: str, resources: dict[Any, Row]) -> Estimate:
    """Simulate one launch with the tiles of the rule."""
    places = MULTIPROCESSORS[arch] * _programs(step, kernel, arch, resources)
    by_head, by_section = _orders(step, kernel, arch)
    least = least_makespan(by_head, places)
    times = (makespan(order, places) / least for order in (by_head, by_section))
    return Estimate(step.name, kernel, len(by_head), *times)


def _orders(step: Step, kernel: str, arch: str) -> tuple[list[int], list[int]]:
    """Return the durations of a launch's programs in two orders: head by head, and as they start."""
    (_, problem, tables), by_keys = step, kernel == "dkdv"
    dtype, dims = problem.torch_dtype, (problem.dim, problem.v_dim)
    config = choose(kernel, arch, max(dims), dtype, tables.q_block, tables.kv_block, {})
    tile, block = (config.BLOCK_N, tables.kv_block) if by_keys else (config.BLOCK_M, tables.q_block)
    work = _slot_work(tables, by_keys).repeat_interleave(-(-block // tile))
    by_position = work if by_keys else work.flip(0)
    falling = by_position if tables.window else work.sort(descending=True, stable=True).values
    group = problem.heads // problem.kv_heads
    rows = tables.q_rows * group if by_keys else tables.kv_rows  # that are streamed for a KV head
    section = section_heads(problem.kv_heads, rows * sum(dims) * dtype.itemsize, arch)
    repeat = 1 if by_keys else group  # programs of a KV head
    by_section = falling.repeat_interleave(section * repeat).repeat(problem.kv_heads // section)
    by_head = by_position.repeat(problem.kv_heads * repeat)
    return by_head.repeat(problem.batch).tolist(), by_section.repeat(problem.batch).tolist()


def _programs(step: Step, kernel: str, arch: str, resources: dict[Any, Row]) -> int:
    """Return the programs that a multiprocessor holds at a time, compiled for this kind of mask."""
    dim = next(dim for dim in (64, 96, 128, 192, 256) if dim >= max(step.problem.dim, step.problem.v_dim))
    variants = ("causal" if step.tables.window else "documents"), "state"
    keys = [(kernel, arch, dim, step.problem.dtype, variant) for variant in variants]
    return next(resources[key]["programs"] for key in keys if key in resources)


def _slot_work(tables: Tables, by_keys: bool) -> Tensor:
    """Count the blocks that each slot of the programs' side lists, for one head."""
    ptr, runs = (tables.col_ptr, tables.col_runs) if by_keys else (tables.row_ptr, tables.row_runs)
    columns = (tables.q_slots if by_keys else tables.kv_slots).shape[1]
    masked, full = Runs(ptr, runs, columns).counts()
    return (masked + full)[0, 0]


def estimates(arch: str) -> Iterator[Estimate]:
    """Simulate every launch of :func:`steps` on an architecture."""
    resources = read_table()
    for step in steps():
        for kernel in KERNELS:
            yield estimate(step, kernel, arch, resources)


def format_table(rows: Iterable[Estimate], arch: str) -> Any:
    """Make a rich table of the estimates of an architecture."""
    from rich.table import Table

    title = f"{arch}: time of a launch, over the least time of any order of its programs"
    table = Table("step", "kernel", "programs", "head by head", "as shipped", title=title, box=None)
    for row in rows:
        table.add_row(row.step, row.kernel, str(row.programs), f"{row.by_head:.2f}", f"{row.by_section:.2f}")
    return table
