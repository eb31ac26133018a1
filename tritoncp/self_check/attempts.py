"""Runs cases in turn in one process: limits, failures, and the results of all ranks."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncp.distributed.failures import GroupClosed
from tritoncp.self_check.cases import ONE_DEVICE, PASSES, Answers, CheckCase, Result, make_problem
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

    @contextlib.contextmanager
    def record_signals(self) -> Iterator[None]:
        """Record SIGTERM, which torchrun sends when another rank has died, and SIGINT: the check then ends in
        order. A second SIGINT interrupts at once."""

        def record(number: int, frame: Any) -> None:
            if self.signal_name == "SIGINT" == signal.Signals(number).name:
                raise KeyboardInterrupt
            self.signal_name = signal.Signals(number).name

        previous = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def seconds(self) -> float:
        """Seconds since the check began."""
        return time.monotonic() - self.began

    @property
    def late(self) -> str:
        """The reason to stop when the budget is over."""
        return f"the budget of {self.budget:g} s is over"

    def stop_reason(self) -> str | None:
        """Return the reason to stop now, or None."""
        if self.signal_name:
            return f"{self.signal_name} came: this process was asked to end, or another rank died"
        return self.late if self.seconds > self.budget else None

    def check_limits(self) -> None:
        """Raise Stopped where a limit is reached."""
        if reason := self.stop_reason():
            raise Stopped(reason)


class Stopped(Exception):
    """Raised where the check cannot go on. absent: the lost ranks that could be identified."""

    def __init__(self, why: str, absent: Sequence[int] = ()):
        super().__init__(why)
        self.absent = tuple(absent)


class Stalled(RuntimeError):
    """Raised where the device does not finish its work in time."""


class Failure(NamedTuple):
    """The failure of a run. ``fatal``: the process group or the device can no longer be used."""

    why: str
    fatal: bool


def run_cases(cases: Sequence[CheckCase], ranks: Ranks, request: CheckRequest) -> Iterator[Result]:
    """Run cases in turn; the passes of a schedule are one run. Raises Stopped where the rest cannot run."""
    for _, group in groupby(cases, lambda case: (case.mask, case.dtype)):
        problem: list[Answers] = []  # filled by the first run, so that an exception there fails its case
        for _, passes in groupby(group, lambda case: case.schedule):
            yield from run_schedule(list(passes), problem, ranks, request)


def run_schedule(
    cases: Sequence[CheckCase], problem: list[Answers], ranks: Ranks, request: CheckRequest
) -> Iterator[Result]:
    """Run the passes of one schedule on all ranks, and yield a result for each case."""
    own = attempt_passes(cases, problem, ranks, request)
    try:
        outcomes, reasons = zip(*ranks.gather((own, request.stop_reason())))
    except GroupClosed as error:
        rank = error.absent[0] if error.absent else None
        yield from (Result(case, rank=rank, ranks=error.absent, why=str(error)) for case in cases)
        lost = ", ".join(map(str, error.absent)) or "unknown"
        raise Stopped(f"lost while {cases[0].name} ran: rank {lost}", error.absent) from error
    failures: dict[int, Failure] = {}
    for case in cases:
        parts = [passes[PASSES.index(case.direction)] for passes in outcomes]
        failures = {rank: part for rank, part in enumerate(parts) if isinstance(part, Failure)}
        if failures:
            yield describe_failure(case, failures, len(parts))
        else:
            yield judge_case(case, problem[0], parts)
    own_failures = sum(not failure.fatal for failure in failures.values())  # others wait in vain for these
    if cases[0].schedule != ONE_DEVICE and 0 < own_failures < len(outcomes):
        raise Stopped(f"a rank failed alone in {cases[0].name}, which closes the group of all ranks")
    if any(failure.fatal for failure in failures.values()):
        raise Stopped(f"a rank or a device was lost in {cases[0].name}")
    if reason := next(filter(None, reasons), None):
        raise Stopped(reason)


def attempt_passes(
    cases: Sequence[CheckCase], problem: list[Answers], ranks: Ranks, request: CheckRequest
) -> list[PassErrors | Failure]:
    """Run the passes of a schedule up to the last one among the cases. Returns the errors of each, from a
    failure on that failure. ``problem`` is filled by the first run."""
    outcomes: list[PassErrors | Failure] = []
    try:
        if not problem:
            problem.append(make_problem(cases[0], ranks.device, ranks.world_size))
        passes = run_passes(
            ranks, problem[0], cases[0].schedule, lambda: wait_for_device(ranks.device, request)
        )
        for _ in PASSES[: PASSES.index(cases[-1].direction) + 1]:
            outcomes.append(next(passes))
    except Exception as error:
        lost = isinstance(error, GroupClosed | Stalled | dist.DistError) or not is_usable(ranks.device)
        line = (str(error).strip().splitlines() or [""])[0][:500]
        outcomes += [Failure(f"{type(error).__name__}: {line}", lost)] * (len(PASSES) - len(outcomes))
    return outcomes


def is_usable(device: torch.device) -> bool:
    """Return whether a device still works: after an illegal memory access every CUDA call fails."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def describe_failure(case: CheckCase, failures: dict[int, Failure], world_size: int) -> Result:
    """Make the result of a case whose run failed. It names the rank that failed on its own, before ranks that
    only timed out waiting for it."""
    rank = min(failures, key=lambda rank: (failures[rank].fatal, rank))
    why = failures[rank].why if world_size == 1 else f"rank {rank}: {failures[rank].why}"
    return Result(case, rank=rank, ranks=tuple(sorted(failures)), why=why)


def wait_for_device(device: torch.device, request: CheckRequest) -> None:
    """Wait until a GPU has finished its queued work. Raises Stalled after the timeout: a kernel that hangs
    never ends, and neither does a message from a lost rank."""
    if device.type != "cuda":
        return
    event, end = torch.cuda.Event(), time.monotonic() + request.timeout
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if request.signal_name or time.monotonic() > end:
            raise Stalled(f"the GPU did not finish its work within {request.timeout:g} s")
        time.sleep(0)
