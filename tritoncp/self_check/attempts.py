"""Runs cases in turn in one process: limits, failures, and the results of all ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncp.distributed.failures import GroupClosed
from tritoncp.self_check.cases import PASSES, CheckCase, CheckProblem, Result, make_problem
from tritoncp.self_check.comparison import PassErrors, Ranks, judge_case, run_passes


@dataclass
class CheckRequest:
    """The command's options, and the limits after which the check stops: the time budget, or a signal.

    jobs:        worker processes, None for one per core
    strict:      whether cases that did not run within the budget are failures
    signal_name: of the signal that this process received
    """

    only: str = "*"
    jobs: int | None = None
    world_size: int = 4
    budget: float = 60.0
    timeout: float = 20.0
    strict: bool = False
    began: float = field(default_factory=time.monotonic)
    signal_name: str = ""

    def record_signal(self, number: int, frame: Any) -> None:
        """Handle SIGTERM, which torchrun sends when another rank has died: the check then ends in order."""
        self.signal_name = signal.Signals(number).name

    @property
    def late(self) -> str:
        """The reason to stop when the budget is over."""
        return f"the budget of {self.budget:g} s is over"

    def stop_reason(self) -> str | None:
        """Return the reason to stop now, or None."""
        if self.signal_name:
            return f"{self.signal_name} came: this process was asked to end, or another rank died"
        return self.late if time.monotonic() - self.began > self.budget else None

    def check_limits(self) -> None:
        """Raise Stopped where a limit is reached."""
        if reason := self.stop_reason():
            raise Stopped(reason)


class Stopped(GroupClosed):
    """Raised where the check cannot go on. absent: the lost ranks that could be identified."""


class Attempt(NamedTuple):
    """A run of a schedule in one process.

    errors: of the passes that ended
    why:    the reason why the next pass failed, "" if none did
    waited: whether that was a wait in vain for another rank or for the device
    """

    errors: list[PassErrors]
    why: str = ""
    waited: bool = False


def run_cases(cases: Sequence[CheckCase], ranks: Ranks, request: CheckRequest) -> Iterator[Result]:
    """Run cases in turn; the passes of a schedule are one run. Raises Stopped where the rest cannot run."""
    for _, passes in groupby(cases, lambda case: case[:3]):
        yield from run_schedule(list(passes), ranks, request)


def run_schedule(cases: Sequence[CheckCase], ranks: Ranks, request: CheckRequest) -> Iterator[Result]:
    """Run the passes of one schedule on all ranks, and yield a result for each case."""
    own = attempt_passes(cases, ranks, request)
    try:
        attempts, reasons = zip(*ranks.gather((own, request.stop_reason())))
    except GroupClosed as error:
        absent = error.absent or (0,)  # none is known where the store is lost, which rank 0 or torchrun keeps
        yield from (Result(case, rank=absent[0], ranks=absent, why=str(error)) for case in cases)
        lost = ", ".join(map(str, absent))
        raise Stopped(f"lost while {cases[0].name} ran: rank {lost}", absent) from error
    for case in cases:
        index = PASSES.index(case.direction)
        failures = {rank: x for rank, x in enumerate(attempts) if x.why and len(x.errors) <= index}
        if failures:
            yield describe_failure(case, failures, len(attempts))
        else:
            yield judge_case(case, problem_of(case, ranks).allowed, [x.errors[index] for x in attempts])
    if any(x.why for x in attempts):  # the group is closed, or the device may be unusable
        raise Stopped(f"{cases[0].name} failed, and its process or its group with it")
    if reason := next(filter(None, reasons), None):
        raise Stopped(reason)


def attempt_passes(cases: Sequence[CheckCase], ranks: Ranks, request: CheckRequest) -> Attempt:
    """Run the passes of a schedule up to the last one among the cases."""
    errors: list[PassErrors] = []
    try:
        problem = problem_of(cases[0], ranks)
        passes = run_passes(ranks, problem, cases[0].schedule, lambda: wait_for_device(ranks.device, request))
        for _ in PASSES[: PASSES.index(cases[-1].direction) + 1]:
            errors.append(next(passes))
    except Exception as error:
        waited = isinstance(error, GroupClosed | TimeoutError | dist.DistError)
        line = (str(error).strip().splitlines() or [""])[0][:500]
        return Attempt(errors, f"{type(error).__name__}: {line}", waited)
    return Attempt(errors)


def problem_of(case: CheckCase, ranks: Ranks) -> CheckProblem:
    return make_problem(case.mask, case.dtype, ranks.device, ranks.world_size)


def describe_failure(case: CheckCase, failures: dict[int, Attempt], world_size: int) -> Result:
    """Make the result of a case whose run failed. It names the rank that failed on its own, before ranks that
    only timed out waiting for it."""
    rank = min(failures, key=lambda rank: (failures[rank].waited, rank))
    why = failures[rank].why if world_size == 1 else f"rank {rank}: {failures[rank].why}"
    return Result(case, rank=rank, ranks=tuple(sorted(failures)), why=why)


def wait_for_device(device: torch.device, request: CheckRequest) -> None:
    """Wait until a GPU has finished its queued work. Raises TimeoutError after the timeout: a kernel that
    hangs never ends, and neither does a message from a lost rank."""
    if device.type != "cuda":
        return
    event, end = torch.cuda.Event(), time.monotonic() + request.timeout
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if request.signal_name or time.monotonic() > end:
            raise TimeoutError(f"the GPU did not finish its work within {request.timeout:g} s")
        time.sleep(0)
