"""Runs cases in turn in one process: limits, failures, and the results of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from tritoncp.distributed.failures import GroupClosed
from tritoncp.self_check.cases import CheckCase, CheckProblem, Result, make_problem
from tritoncp.self_check.comparison import Errors, Ranks, judge_case, run_case


@dataclass
class CheckRequest:
    """The command's options, and the time when the check began.

    jobs:   worker processes, None for one per core
    strict: whether cases that did not run within the budget are failures
    """

    only: str = "*"
    jobs: int | None = None
    world_size: int = 4
    budget: float = 60.0
    timeout: float = 20.0
    strict: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> str:
        """The reason to stop when the budget is over."""
        return f"the budget of {self.budget:g} s is over"

    @property
    def over(self) -> bool:
        """Whether the budget is over."""
        return time.monotonic() - self.began > self.budget

    def check_budget(self) -> None:
        """Raise Stopped where the budget is over."""
        if self.over:
            raise Stopped(self.late)


class Stopped(GroupClosed):
    """Raised where the check cannot go on. absent: the lost ranks that could be identified."""


class Attempt(NamedTuple):
    """A run of a case in one process.

    errors: of the tensors of this process, by rank
    why:    the reason why the run failed, "" if it did not
    waited: whether that was a wait in vain for another rank or for the device
    """

    errors: Errors
    why: str = ""
    waited: bool = False


def run_cases(cases: Iterable[CheckCase], ranks: Ranks, request: CheckRequest) -> Iterator[Result]:
    """Run cases in turn on all ranks, and yield their results. Raises Stopped where the rest cannot run."""
    for case in cases:
        try:
            attempts, over = zip(*ranks.gather((attempt_case(case, ranks, request), request.over)))
        except GroupClosed as error:
            absent = error.absent or (
                0,
            )  # none is known where the store is lost, which rank 0 or torchrun keeps
            yield Result(case, rank=absent[0], ranks=absent, why=str(error))
            lost = ", ".join(map(str, absent))
            raise Stopped(f"lost while {case.name} ran: rank {lost}", absent) from error
        failures = {rank: attempt for rank, attempt in enumerate(attempts) if attempt.why}
        if failures:  # the group is closed, or the device may be unusable
            yield describe_failure(case, failures, len(attempts))
            raise Stopped(f"{case.name} failed, and its process or its group with it")
        yield judge_case(case, problem_of(case, ranks).allowed, [attempt.errors for attempt in attempts])
        if any(over):
            raise Stopped(request.late)


def attempt_case(case: CheckCase, ranks: Ranks, request: CheckRequest) -> Attempt:
    """Run a case in this process; an exception becomes a reason."""
    try:
        problem = problem_of(case, ranks)
        return Attempt(
            run_case(ranks, problem, case.schedule, lambda: wait_for_device(ranks.device, request))
        )
    except Exception as error:
        waited = isinstance(error, GroupClosed | TimeoutError | dist.DistError)
        line = (str(error).strip().splitlines() or [""])[0][:500]
        return Attempt({}, f"{type(error).__name__}: {line}", waited)


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
        if time.monotonic() > end:
            raise TimeoutError(f"the GPU did not finish its work within {request.timeout:g} s")
        time.sleep(0)
