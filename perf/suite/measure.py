"""The benchmark: for each problem, checks the results of all contenders, then times them."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import click
import torch

from tritoncp.graph.flop_formulas import count_flops, count_pairs
from tritoncp.kernels.engine import RequestedRouteWarning
from tritoncp.perf.problem import Problem
from tritoncp.perf.records.history import OURS, Journal
from tritoncp.perf.suite import baselines, check, machine
from tritoncp.perf.suite.baselines import FLEX, Contender
from tritoncp.perf.suite.cases import GOALS, SEARCHED, Case, position
from tritoncp.perf.suite.timing import (
    Clock,
    DeviceClock,
    GroupClock,
    Run,
    WallClock,
    time_interleaved,
)
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan

THOROUGH = ["flex prescale tma", "flex max-autotune"]  # flex variants that take a minute to compile
QUICK = [name for name in FLEX if name not in THOROUGH]
LOST = torch.AcceleratorError.__name__  # error of a launch that failed on the device


class DeviceLost(click.ClickException):
    """Raised if a launch failed on the device, which this process cannot use any more: exit code 1."""


@dataclass
class Bench:
    """A run of the benchmark.

    journal:  receives each case when it is measured; cases of its points are not measured again
    deadline: time.monotonic() by which the run should end; later problems are left out
    seconds:  time for the rounds of one case
    options:  kernel options to time tritoncp with, besides its own choice
    group:    the ranks that measure cases of several ranks together; None for one device
    patterns: patterns of contenders' names to run, besides tritoncp
    """

    device: torch.device
    journal: Journal
    deadline: float
    seconds: float = 1.5
    options: Sequence[dict[str, Any]] = ()
    group: Any = None
    patterns: Sequence[str] = ("*",)
    failures: int = 0

    @cached_property
    def clock(self) -> Clock:
        clock = DeviceClock(self.device) if self.device.type == "cuda" else WallClock()
        return clock if self.group is None else GroupClock(clock, self.device)

    def run(self, cases: Sequence[Case]) -> int:
        """Measure all cases with contenders that compile fast; then the first size of each mask in SEARCHED
        with the flex variants that compile slowly. Return the number of failures."""
        measured = {point.case for point in self.journal.points}
        quick_groups = self._group_problems([case for case in cases if case.name not in measured])
        groups = [(group, QUICK[:1] if group[0].tier == "smoke" else QUICK) for group in quick_groups]
        groups += [(group, [*QUICK, *THOROUGH]) for group in self._select_thorough(cases)]
        self.journal.progress.add(sum(len(group) for group, _ in groups))
        slowest = 0.0
        for group, variants in groups:
            slowest = max(slowest, self._measure_in_budget(group, variants, slowest))
        return self.failures

    def warm(self, cases: Sequence[Case]) -> None:
        """Run the selected contenders once, so that their kernels are in the compilers' caches."""
        for group in self._group_problems(cases):
            case, passes = group[0], [case.which for case in group]
            tensors = baselines.inputs(case.problem, self.device)
            for name, make in self._contenders(case, tensors, QUICK).items():
                if position(name, self.patterns) is not None and time.monotonic() < self.deadline:
                    self._report_check(case, name, self._check_contender(case, make, None, passes)[1])

    def _group_problems(self, cases: Sequence[Case]) -> list[list[Case]]:
        """Group the cases by problem; on a CPU they are shrunk."""
        sized_cases = [case.shrunk() for case in cases] if self.device.type == "cpu" else cases
        return [list(group) for _, group in itertools.groupby(sized_cases, key=lambda case: case.problem)]

    def _takes_part(self, name: str) -> bool:
        return name == OURS or position(name, self.patterns) is not None

    def _contenders(
        self, case: Case, tensors: baselines.Inputs, variants: Sequence[str]
    ) -> dict[str, Callable[[], Contender]]:
        makers = baselines.contenders(case.problem, tensors, variants, self.options, self.group)
        return {name: make for name, make in makers.items() if self._takes_part(name)}

    def _select_thorough(self, cases: Sequence[Case]) -> list[list[Case]]:
        """Select the problems for the variants that compile slowly: the first size of each mask in SEARCHED,
        unless the journal has them."""
        if self.device.type != "cuda" or not any(self._takes_part(name) for name in THOROUGH):
            return []
        first: dict[str, list[Case]] = {}
        for group in self._group_problems(cases):
            if group[0].tier == "core" and group[0].problem.mask in SEARCHED:
                first.setdefault(group[0].problem.mask, group)
        complete = {
            point.case for point in self.journal.points if any(name in point.contenders for name in THOROUGH)
        }
        return [group for group in first.values() if any(case.name not in complete for case in group)]

    def _measure_in_budget(self, cases: list[Case], variants: Sequence[str], slowest: float) -> float:
        """Measure one problem if there is time; return the seconds that it took."""
        begin = time.monotonic()
        if self.clock.agree(begin + slowest - self.deadline) > 0:
            for case in cases:
                self.journal.leave_out(case.name)
            return 0.0
        try:
            self._measure_problem(cases, variants)
        except torch.OutOfMemoryError as error:  # raised by the inputs or the reference
            self.failures += 1
            for case in cases:
                self._write(case, {OURS: {"why": _summarize_error(error)}}, {})
        return time.monotonic() - begin

    def _measure_problem(self, cases: list[Case], variants: Sequence[str]) -> None:
        case = cases[0]
        torch.compiler.reset()
        tensors = baselines.inputs(case.problem, self.device)
        passes = [case.which for case in cases]
        expected = check.reference(case.problem, tensors)
        working, checks = {}, {}
        for name, make in self._contenders(case, tensors, variants).items():
            contender, checks[name] = self._check_contender(case, make, expected, passes)
            self.failures += name == OURS and contender is None
            if contender is not None:
                working[name] = contender
            self._report_check(case, name, checks[name])
            if checks[name].get("why", "").startswith(LOST):
                self._give_up(cases, checks)
        del expected
        for case in cases:
            self._time_pass(case, working, checks)

    def _give_up(self, cases: list[Case], checks: dict[str, dict[str, Any]]) -> None:
        """After an error on the device, write the cases without times, which a resumed run skips, and raise
        DeviceLost."""
        untimed = {"why": "not timed: another contender caused an error on the device"}
        contenders = {name: untimed | row for name, row in checks.items()}
        for case in cases:
            self._write(case, contenders, {})
        raise DeviceLost(
            f"the device runs no more kernels in this process after an error in {cases[0].problem.name}-fwd; "
            "the remaining cases are not measured: continue with --resume"
        )

    def _report_check(self, case: Case, name: str, row: dict[str, Any]) -> None:
        """Print a contender's check. (The line of the case follows after timing.)"""
        verdict = f"{row.get('why', 'right')} ({row['setup_s']} s)"
        self.journal.progress.show(f"{case.problem.name:<32} {name:<20} {verdict}", measured=False)

    def _check_contender(
        self, case: Case, make: Callable[[], Contender], expected: check.Answer | None, passes: list[str]
    ) -> tuple[Contender | None, dict[str, Any]]:
        """Run a contender and compare its results with ``expected`` (None: no comparison). Return (contender,
        or None if it failed or was wrong; its set-up time and peak memory, and the reason)."""
        row: dict[str, Any] = {}
        begin, initial_bytes = time.monotonic(), self._reset_peak()
        contender = None
        try:
            with warnings.catch_warnings():  # a call that falls back to another ROUTE fails here, untimed
                warnings.simplefilter("error", RequestedRouteWarning)
                contender = make()
                timed_passes = {*passes} & {*contender.passes}
                actual = {"out": contender.forward()} if "forward" in timed_passes else {}
                if "backward" in timed_passes:
                    actual |= zip(("dq", "dk", "dv"), contender.backward())
            checked_tensors = actual if expected is not None else {}
            for key, x in checked_tensors.items():
                fault = check.find_fault(key, x, getattr(expected, key), case.problem.torch_dtype)
                if fault is not None:
                    row["why"] = f"wrong: {fault}"
        except Exception as error:  # raised by a compiler or a backend; the run continues
            row["why"] = _summarize_error(error)
        row["setup_s"] = round(time.monotonic() - begin, 2)
        row["peak_bytes"] = self._peak_bytes() - initial_bytes
        if self.clock.agree("why" in row) and "why" not in row:
            row["why"] = "failed on another rank"
        return (None if "why" in row else contender), row

    def _reset_peak(self) -> int:
        """Reset the peak of allocated memory; return the bytes in use."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _time_pass(
        self, case: Case, working: dict[str, Contender], checks: dict[str, dict[str, Any]]
    ) -> None:
        """Time one pass of the contenders and write the line of the case."""
        idle = {name for name, contender in working.items() if case.which not in contender.passes}
        runs = {
            name: partial(prepare_pass, contender, case.which)
            for name, contender in working.items()
            if name not in idle
        }
        least = (
            7 if self.device.type == "cuda" else 3
        )  # interpreted kernels are slow, and their times mean nothing
        figures = time_interleaved(runs, self.clock, self.seconds, least) if runs else {}
        work = work_of(case)
        contenders = {name: dict(row) for name, row in checks.items() if name not in idle}
        for name, row in figures.items():
            contenders[name] |= row | {"tflops": round(work.flops / row["ms"] / 1e9, 1)}
        self._write(case, contenders, {"flops": work.flops, "wire_bytes": work.wire})

    def _write(self, case: Case, contenders: dict[str, Any], work: dict[str, int]) -> None:
        gpu = machine.state(self.device) if self.device.type == "cuda" else {}
        goal = GOALS.get((case.problem.mask, case.which), {}) if case.tier == "core" else {}
        self.journal.point(case.name, contenders, tags=case.tags, work=work, state=gpu, goal=goal)


def _summarize_error(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]}"


def prepare_pass(contender: Contender, which: str) -> Run:
    """Prepare one execution of a pass for timing, or of both passes for "train"."""
    if which in ("forward", "attend"):
        return contender.call
    if which == "train":
        return lambda: torch.autograd.grad(contender.call(), contender.leaves, contender.dout)
    out = contender.call()
    return lambda: torch.autograd.grad(out, contender.leaves, contender.dout)


class UsefulWork(NamedTuple):
    """Useful work of a rank. flops: multiplications and additions of visible pairs; wire: bytes that the rank
    sends."""

    flops: int
    wire: int


def work_of(case: Case) -> UsefulWork:
    """Compute the useful work of a case on its busiest rank; of all ranks, if one device simulates them."""
    problem, mask = case.problem, case.problem.block_mask()
    if problem.world == 1 or problem.together:
        return work_of_plan(build(mask), problem, case.which)
    plan = build(mask, problem.world, schedule=problem.schedule)
    per_rank = [work_of_plan(plan.for_rank(rank), problem, case.which) for rank in range(problem.world)]
    return UsefulWork(*map(max, zip(*per_rank)))


def work_of_plan(plan: Plan, problem: Problem, direction: str) -> UsefulWork:
    """Compute one rank's work in one pass, "forward" or "backward" (counted as five matrix products)."""
    forward = direction == "forward"
    d, e = problem.dim, problem.v_dim
    flops = count_flops(count_pairs(plan, problem.batch, problem.heads), d, e, forward)
    send = {"batch": problem.batch, "heads": problem.heads, "kv_heads": problem.kv_heads, "head_dim": d}
    send |= {"v_head_dim": e, "itemsize": problem.torch_dtype.itemsize}
    forward_bytes, total_bytes = (plan.bytes_sent(**send, backward=backward) for backward in (False, True))
    return UsefulWork(flops, forward_bytes if forward else total_bytes - forward_bytes)
