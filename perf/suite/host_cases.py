"""Host cases, without a GPU: time and memory of masks and plans, Python time of a call, and the CPU engine.

They are written, compared and displayed as attention cases. The device of their series is the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention as torch_flex

from tritoncp.perf.records.history import OURS, Journal, Point
from tritoncp.perf.suite import baselines, cpu_attention
from tritoncp.perf.suite.cases import PASS_SUFFIXES, TIERS, position
from tritoncp.perf.suite.measure import prepare_pass
from tritoncp.perf.suite.timing import Run, WallClock, time_interleaved
from tritoncp.planning import SCHEDULES
from tritoncp.planning.build import build
from tritoncp.planning.problem import Problem

CPU = torch.device("cpu")
# Operation of the CPU engine -> suffix of the case's name
CPU_PASSES = {"attend": "fwd", "train": "fwd-bwd"}
Makers = dict[str, Callable[[], Run]]


@dataclass(frozen=True)
class HostCase:
    """A case on the CPU.

    operation: "mask" (build it), "plan" (balance it and list a rank's steps), "forward" or "backward" (a call
               whose launches do nothing, of all ranks in lockstep in this process), "attend" (a forward pass
               of the CPU engine), "train" (both passes)
    """

    operation: str
    problem: Problem
    tier: str = "core"

    @property
    def name(self) -> str:
        """
        >>> plan = Problem("document", 1 << 20, world=64, schedule="fetch")
        >>> HostCase("plan", plan).name, HostCase("forward", Problem("causal", 1024)).name
        ('plan-document-w64-fetch-1m', 'call-causal-1k-fwd')
        """
        problem = self.problem
        whole = f"{problem.seq >> 20}m" if problem.seq % (1 << 20) == 0 else f"{problem.seq >> 10}k"
        kinds = dict.fromkeys(PASS_SUFFIXES, "call") | dict.fromkeys(CPU_PASSES, "cpu")
        parts = [kinds.get(self.operation, self.operation), problem.mask]
        parts += [f"w{problem.world}", problem.schedule] * (problem.world > 1)
        parts += [whole, PASS_SUFFIXES.get(self.operation, ""), CPU_PASSES.get(self.operation, "")]
        return "-".join(filter(None, parts))

    @property
    def tags(self) -> dict[str, str]:
        problem = self.problem
        ranks = {"ranks": f"{problem.world} ranks, {problem.schedule}"} if problem.world > 1 else {}
        kinds = {name: f"call {name}" for name in PASS_SUFFIXES}
        kinds |= {"attend": "cpu forward", "train": "cpu both"}
        kind = kinds.get(self.operation, self.operation)
        return {"mask": problem.mask, "pass": kind, "dtype": "", "shape": f"{problem.seq} tokens"} | ranks

    @property
    def goal(self) -> dict[str, float]:
        """Least speedups over baselines; {} except for cases of the CPU engine."""
        return cpu_attention.goal_of(self.operation, self.problem) if self.operation in CPU_PASSES else {}

    @property
    def rounds(self) -> int:
        """The least number of rounds, besides the first."""
        return 2 if self.operation in CPU_PASSES and self.problem.seq >= cpu_attention.LONG else 5


def _calls(tier: str, *masks: str, **ranks: Any) -> list[HostCase]:
    problems = [Problem(mask, 1024, 4, 2, 64, 64, dtype="float32", **ranks) for mask in masks]
    return [HostCase(operation, problem, tier) for problem in problems for operation in PASS_SUFFIXES]


def _plan(mask: str, seq: int, world: int, schedule: str, tier: str = "core") -> HostCase:
    return HostCase("plan", Problem(mask, seq, world=world, schedule=schedule), tier)


def _cpu_passes(mask: str, seq: int, tier: str = "core", **ranks: Any) -> list[HostCase]:
    problem = Problem(mask, seq, 8, 2, 64, 64, dtype="float32", **ranks)
    return [HostCase(operation, problem, tier) for operation in CPU_PASSES]


CASES: tuple[HostCase, ...] = (
    HostCase("mask", Problem("document", 4096), "smoke"),
    _plan("document", 65536, 8, "fetch", "smoke"),
    *_calls("smoke", "causal"),
    *(HostCase("mask", Problem(mask, 1 << 20)) for mask in ("causal", "document", "window", "prefix")),
    *(HostCase("mask", Problem(mask, 4096)) for mask in ("causal", "window")),
    *(
        _plan(mask, size, world, schedule)
        for size, world in ((131072, 8), (1 << 20, 64))
        for mask, schedule in (
            ("causal", "ring"), ("causal", "allgather"), ("causal", "ulysses"),
            ("document", "fetch"), ("document", "ring"), ("window", "fetch"),
        )
    ),
    *_calls("core", "full", "document", "alibi"),
    *(
        case
        for schedule in SCHEDULES
        if schedule != "ulysses+ring"
        for case in _calls("core", "causal", world=2, schedule=schedule, together=True)
    ),
    *(
        case
        for seq in (2048, 4096)
        for mask in ("causal", "document", "window", "prefix", "alibi", "softcap")
        for case in _cpu_passes(mask, seq)
    ),
    *_cpu_passes("causal", 1024),
    *_cpu_passes("causal", 16384, "full"),
    *(
        case
        for schedule in ("ring", "fetch", "allgather")
        for case in _cpu_passes("causal", 16384, "full", world=8, schedule=schedule, together=True)
    ),
    *(case for mask in ("window", "document", "prefix") for case in _cpu_passes(mask, 16384, "full")),
    HostCase("mask", Problem("document", 8 << 20), "full"),
    _plan("document", 8 << 20, 1024, "fetch", "full"),
)  # fmt: skip


def select(tier: str = "core", only: str | Sequence[str] = "*") -> list[HostCase]:
    """Select the cases of a tier and the tiers before it whose names match a pattern."""
    tiers = TIERS[: TIERS.index(tier) + 1]
    return [case for case in CASES if case.tier in tiers and position(case.name, only) is not None]


def run(
    cases: Sequence[HostCase],
    journal: Journal,
    deadline: float,
    seconds: float,
    resumed_points: Sequence[Point] = (),
) -> int:
    """Measure cases on one core and write a line for each; return the number of failures."""
    torch.set_num_threads(1)
    measured_names, failures = {point.case for point in resumed_points}, 0
    remaining_cases = [case for case in cases if case.name not in measured_names]
    journal.announce(len(remaining_cases))
    for case in remaining_cases:
        if time.monotonic() > deadline:
            journal.leave_out(case.name)
            continue
        try:
            contenders, work = measure(case, seconds)
        except Exception as error:  # the other cases go on
            contenders, work = {OURS: {"why": f"{type(error).__name__}: {error}"[:300]}}, {}
            failures += 1
        journal.point(case.name, contenders, tags=case.tags, work=work, goal=case.goal)
    return failures


def measure(case: HostCase, seconds: float) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Measure all contenders of a case; return (their figures, facts about the work)."""
    contender_makers, work = make_contenders(case)
    with cpu_attention.cpu_engine() if case.operation in CPU_PASSES else no_launches():
        figures = time_interleaved(contender_makers, WallClock(), seconds, case.rounds)
        peak = measure_growth(contender_makers[OURS]())
    contenders = {name: figure.rounded(samples=name == OURS) for name, figure in figures.items()}
    if peak is not None:
        contenders[OURS]["peak_bytes"] = peak
    return contenders, work


def make_contenders(case: HostCase) -> tuple[Makers, dict[str, Any]]:
    """Return (contender -> function that prepares one execution of a case, facts about the work)."""
    if case.operation in CPU_PASSES:
        return cpu_attention.make_contenders(case.problem, case.operation), {}
    return {"mask": _mask_contenders, "plan": _plan_contenders}.get(case.operation, _call_contenders)(case)


def _mask_contenders(case: HostCase) -> tuple[Makers, dict[str, Any]]:
    problem = case.problem
    plain: Any = problem.plain_mod(CPU)
    length = (problem.seq, problem.seq)
    functions: Makers = {OURS: lambda: problem.block_mask}
    if problem.seq <= 4096:  # torch's builder takes memory quadratic in the length
        functions["torch"] = lambda: (
            lambda: torch_flex.create_block_mask(plain, None, None, *length, device="cpu")
        )
    return functions, {}


def _plan_contenders(case: HostCase) -> tuple[Makers, dict[str, Any]]:
    problem, mask = case.problem, case.problem.block_mask()

    def plan() -> None:
        result = build(mask, problem.world, schedule=problem.schedule)
        first: Any = {"ring": 0, "fetch": "fetched"}.get(problem.schedule, "gathered")
        assert problem.schedule != "ring" or result.ring
        result.tables("cpu", 1, 1, first)

    result = build(mask, problem.world, schedule=problem.schedule)
    layer = {"batch": 1, "heads": problem.heads, "kv_heads": problem.kv_heads, "head_dim": problem.dim}
    rank_bytes = [result.for_rank(rank).bytes_sent(**layer, backward=False) for rank in range(problem.world)]
    work = {"imbalance": round(result.imbalance, 5), "wire_bytes": max(rank_bytes)}
    return {OURS: lambda: plan}, work


def _call_contenders(case: HostCase) -> tuple[Makers, dict[str, Any]]:
    prepare = baselines.split if case.problem.together else baselines.one_device
    contender = prepare(case.problem, baselines.inputs(case.problem, CPU))
    return {OURS: partial(prepare_pass, contender, case.operation)}, {}


@contextmanager
def no_launches() -> Iterator[None]:
    """Context in which kernel launches are prepared but not run, to time the rest of a call."""
    from tritoncp.kernels.launch import Launch

    with mock.patch.object(Launch, "__call__", return_value=None):
        yield


def measure_growth(run: Run) -> int | None:
    """Measure the peak growth of this process, in bytes, while ``run`` runs; None except on Linux.

    Python's tracemalloc does not count allocations of torch; the high-water mark of resident memory counts
    all, once the allocator has returned its free memory.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None

    def read_bytes(name: str) -> int:
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset.write_text("5")  # resets the high-water mark
    initial = read_bytes("VmRSS")
    result = run()
    growth = max(0, read_bytes("VmHWM") - initial)
    del result
    return growth
