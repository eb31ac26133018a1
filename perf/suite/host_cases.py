"""Host cases, without a GPU: times and memory of masks and plans, Python time of a call, and the CPU engine.

They are written, compared and displayed like attention cases. The device of their series is the CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.nn.attention import flex_attention as torch_flex

from tritoncp.perf.problem import Problem
from tritoncp.perf.records.history import OURS, Journal
from tritoncp.perf.suite import cases
from tritoncp.perf.suite.baselines import Contender, Inputs, flex, inputs, one_device, split
from tritoncp.perf.suite.cases import PASS_SUFFIXES, Case
from tritoncp.perf.suite.host_memory import peak_since, start_peak
from tritoncp.perf.suite.measure import prepare_pass
from tritoncp.perf.suite.timing import Run, WallClock, time_interleaved
from tritoncp.planning import SCHEDULES
from tritoncp.planning.build import build

CPU = torch.device("cpu")
# Operation of the CPU engine -> suffix of the case's name
CPU_PASSES = {"attend": "fwd", "train": "fwd-bwd"}
THREADS = 2  # of the CPU engine
LARGEST_EAGER = 2048  # tokens: scores of torch's eager flex attention take 16 bytes for each pair and head
LARGEST_DENSE = 16384  # tokens: a dense mask in float32, 1 GiB
SIZES_COMPILED = 2048, 4096  # tokens: torch.compile takes seconds for each mask, and at two sizes
LONG = 8192  # tokens: from here on an execution takes seconds, and a case is timed in few rounds
# Goals of the CPU engine: min speedups over baselines, by mask, from SHORTEST tokens on; and of a forward
# pass with a score_mod
SHORTEST = 2048
GOALS = {"causal": {"sdpa-dense": 1.0}, "prefix": {"sdpa-dense": 1.0}}
GOALS |= {mask: {"sdpa-dense": 2.0} for mask in ("document", "window")}
GOALS |= {mask: {"flex-eager": 3.0} for mask in ("alibi", "softcap")}
Makers = dict[str, Callable[[], Run]]


@dataclass(frozen=True)
class HostCase(Case):
    """A case on the CPU.

    which: "mask" (build it), "plan" (balance it and list a rank's steps), "forward" or "backward" (a call
           whose launches do nothing, of all ranks in lockstep in this process), "attend" (a forward pass of
           the CPU engine), "train" (both passes)
    """

    @property
    def name(self) -> str:
        """
        >>> plan = Problem("document", 1 << 20, world=64, schedule="fetch")
        >>> HostCase(plan, "plan").name, HostCase(Problem("causal", 1024), "forward").name
        ('plan-document-w64-fetch-1m', 'call-causal-1k-fwd')
        """
        problem = self.problem
        whole = f"{problem.seq >> 20}m" if problem.seq % (1 << 20) == 0 else f"{problem.seq >> 10}k"
        kinds = dict.fromkeys(PASS_SUFFIXES, "call") | dict.fromkeys(CPU_PASSES, "cpu")
        parts = [kinds.get(self.which, self.which), problem.mask]
        parts += [f"w{problem.world}", problem.schedule] * (problem.world > 1)
        parts += [whole, PASS_SUFFIXES.get(self.which, ""), CPU_PASSES.get(self.which, "")]
        return "-".join(filter(None, parts))

    @property
    def tags(self) -> dict[str, str]:
        problem = self.problem
        ranks = {"ranks": f"{problem.world} ranks, {problem.schedule}"} if problem.world > 1 else {}
        kinds = {name: f"call {name}" for name in PASS_SUFFIXES}
        kinds |= {"attend": "cpu forward", "train": "cpu both"}
        kind = kinds.get(self.which, self.which)
        return {"mask": problem.mask, "pass": kind, "dtype": "", "shape": f"{problem.seq} tokens"} | ranks

    @property
    def goal(self) -> dict[str, float]:
        """Min speedups over baselines; {} except for cases of the CPU engine. (A baseline without a time is
        ignored.)"""
        problem = self.problem
        if self.which not in CPU_PASSES or problem.seq < SHORTEST:
            return {}
        if problem.world > 1:
            return {"one-device": round(1 / 1.3, 3)}
        is_compared = self.which == "attend" and not problem.score_mod(CPU)
        return GOALS.get(problem.mask, {}) | ({"flex-compiled": 0.5} if is_compared else {})

    @property
    def rounds(self) -> int:
        """The min number of rounds, besides the first."""
        return 2 if self.which in CPU_PASSES and self.problem.seq >= LONG else 5


def _calls(tier: str, *masks: str, **ranks: Any) -> list[HostCase]:
    problems = [Problem(mask, 1024, 4, 2, 64, 64, dtype="float32", **ranks) for mask in masks]
    return [HostCase(problem, which, tier) for problem in problems for which in PASS_SUFFIXES]


def _plan(mask: str, seq: int, world: int, schedule: str, tier: str = "core") -> HostCase:
    return HostCase(Problem(mask, seq, world=world, schedule=schedule), "plan", tier)


def _cpu_passes(mask: str, seq: int, tier: str = "core", **ranks: Any) -> list[HostCase]:
    problem = Problem(mask, seq, 8, 2, 64, 64, dtype="float32", **ranks)
    return [HostCase(problem, which, tier) for which in CPU_PASSES]


CASES: tuple[HostCase, ...] = (
    HostCase(Problem("document", 4096), "mask", "smoke"),
    _plan("document", 65536, 8, "fetch", "smoke"),
    *_calls("smoke", "causal"),
    *(HostCase(Problem(mask, 1 << 20), "mask") for mask in ("causal", "document", "window", "prefix")),
    *(HostCase(Problem(mask, 4096), "mask") for mask in ("causal", "window")),
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
    HostCase(Problem("document", 8 << 20), "mask", "full"),
    _plan("document", 8 << 20, 1024, "fetch", "full"),
)  # fmt: skip
select = partial(cases.select, world=None, table=CASES)


def run(
    selection: Sequence[HostCase],
    journal: Journal,
    deadline: float,
    seconds: float,
) -> int:
    """Measure the cases that are not in the journal, on one core, and write a line for each. Return the
    number of failures."""
    torch.set_num_threads(1)
    measured_names, failures = {point.case for point in journal.points}, 0
    remaining_cases = [case for case in selection if case.name not in measured_names]
    journal.progress.add(len(remaining_cases))
    for case in remaining_cases:
        if time.monotonic() > deadline:
            journal.leave_out(case.name)
            continue
        try:
            contenders = measure(case, seconds)
        except Exception as error:  # the other cases go on
            contenders = {OURS: {"why": f"{type(error).__name__}: {error}"[:300]}}
            failures += 1
        journal.point(case.name, contenders, tags=case.tags, goal=case.goal)
    return failures


def measure(case: HostCase, seconds: float) -> dict[str, dict[str, Any]]:
    """Measure all contenders of a case. Returns their figures; for masks and plans also the peak memory, if
    the system tells it."""
    makers = list_contenders(case)
    with surroundings(case):
        figures = time_interleaved(makers, WallClock(), seconds, case.rounds)
        for name, make in makers.items() if case.which in ("mask", "plan") else ():
            run, start = make(), start_peak()
            run()
            peak = peak_since(start)
            figures[name] |= {} if peak is None else {"peak_bytes": peak}
    return figures


def list_contenders(case: HostCase) -> Makers:
    """Return functions, by contender, that prepare one execution. The preparation is not timed."""
    return {"mask": _mask_contenders, "plan": _plan_contenders}.get(case.which, _call_contenders)(case)


def surroundings(case: HostCase) -> AbstractContextManager[None]:
    """Return the context in which a case's contenders run."""
    return cpu_engine() if case.which in CPU_PASSES else no_launches()


# -- contenders: functions that prepare one execution, by name


def _mask_contenders(case: HostCase) -> Makers:
    problem = case.problem
    mod: Any = problem.closed_form(CPU)
    length = (problem.seq, problem.seq)
    makers: Makers = {OURS: lambda: problem.block_mask}
    if problem.seq <= 4096:  # torch's builder takes memory quadratic in the length
        makers["torch"] = lambda: lambda: torch_flex.create_block_mask(mod, None, None, *length, device="cpu")
    return makers


def _plan_contenders(case: HostCase) -> Makers:
    problem, mask = case.problem, case.problem.block_mask()

    def plan() -> None:
        result = build(mask, problem.world, schedule=problem.schedule)
        first: Any = {"ring": 0, "fetch": "fetched"}.get(problem.schedule, "gathered")
        assert problem.schedule != "ring" or result.ring
        result.tables("cpu", 1, 1, first)

    return {OURS: lambda: plan}


def _call_contenders(case: HostCase) -> Makers:
    """Return tritoncp's call; for the CPU engine also torch's attention, and for ranks also one device."""
    problem = case.problem
    x = inputs(problem, CPU)
    if case.which == "attend":  # calls without gradients
        x = Inputs(*(tensor.detach() for tensor in (x.q, x.k, x.v, x.dout)))
    contenders = {OURS: (split if problem.world > 1 else one_device)(problem, x)}
    if case.which in CPU_PASSES:
        rivals = {"one-device": one_device(problem, x)} if problem.world > 1 else _torch_contenders(case, x)
        contenders |= rivals
    return {name: partial(prepare_pass, contender, case.which) for name, contender in contenders.items()}


def _torch_contenders(case: HostCase, x: Inputs) -> dict[str, Contender]:
    """Return torch's attention on the CPU. Its flex attention has no backward pass there, and its eager form
    materialises all scores."""
    problem, leaves, is_score = case.problem, (x.q, x.k, x.v), case.problem.score_mod(CPU) is not None
    sdpa: Any = partial(F.scaled_dot_product_attention, *leaves, enable_gqa=True)
    calls: dict[str, Callable[[], Any]] = {}
    if not is_score and problem.seq <= LARGEST_DENSE:
        hidden = ~problem.block_mask().to_dense(1, 1)[0, 0]
        calls["sdpa-dense"] = partial(
            sdpa, attn_mask=torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        )
    if problem.mask == "causal":
        calls["sdpa-causal"] = partial(sdpa, is_causal=True)
    contenders = {name: Contender(call, leaves, x.dout) for name, call in calls.items()}
    if case.which == "attend" and problem.seq in SIZES_COMPILED and not is_score:
        contenders["flex-compiled"] = flex(problem, x, compiled=True)
    if case.which == "attend" and problem.seq <= LARGEST_EAGER:
        contenders["flex-eager"] = flex(problem, x)
    return contenders


@contextmanager
def cpu_engine() -> Iterator[None]:
    """Run calls on the CPU engine with THREADS threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    try:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def no_launches() -> Iterator[None]:
    """Prepare kernel launches but do not run them, in a ``with`` block, to time the rest of a call."""
    from tritoncp.kernels.launch import Launch

    with mock.patch.object(Launch, "__call__", return_value=None):
        yield
