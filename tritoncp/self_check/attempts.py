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
from tritoncp.self_check.cases import ONE_DEVICE, PASSES, Answers, Case, Result, make_problem
from tritoncp.self_check.comparison import Errors, Ranks, judge_case, run_passes


class Request(NamedTuple):
    """The command's options.

    jobs:   worker processes, None for one per core
    strict: whether cases that did not run within the budget are failures
    """

    only: str = "*"
    jobs: int | None = None
    world_size: int = 4
    budget: float = 60.0
    timeout: float = 20.0
    strict: bool = False

    @property
    def late(self) -> str:
        """The reason to stop when the budget is over."""
        return f"the budget of {self.budget:g} s is over"


@dataclass
class Limits:
    """Limits after which the check stops: the time budget, or a signal to this process.

    signal_name: of the signal that was received
    """

    request: Request
    began: float = field(default_factory=time.monotonic)
    signal_name: str = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM, which torchrun sends when another rank has died, and SIGINT as requests to end in
        order; a second SIGINT interrupts at once."""

        def note(number: int, frame: Any) -> None:
            if self.signal_name == "SIGINT" == signal.Signals(number).name:
                raise KeyboardInterrupt
            self.signal_name = signal.Signals(number).name

        previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def reason(self) -> str | None:
        """The reason to stop now, or None."""
        if self.signal_name:
            return f"{self.signal_name} came: this process was asked to end, or another rank died"
        return self.request.late if self.seconds > self.request.budget else None

    def check(self) -> None:
        """Raise Stopped where a limit is reached."""
        if reason := self.reason():
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


def run_cases(cases: Sequence[Case], ranks: Ranks, limits: Limits) -> Iterator[Result]:
    """Run cases in turn; the passes of a schedule are one run. Raises Stopped where the rest cannot run."""
    for _, group in groupby(cases, lambda case: (case.mask, case.dtype)):
        problem: list[Answers] = []  # filled by the first run, so that an exception there fails its case
        for _, passes in groupby(group, lambda case: case.schedule):
            yield from run_schedule({case.direction: case for case in passes}, problem, ranks, limits)


def run_schedule(
    wanted: dict[str, Case], problem: list[Answers], ranks: Ranks, limits: Limits
) -> Iterator[Result]:
    """Run the wanted passes of one schedule, and yield a result for each."""
    steps = start_run(next(iter(wanted.values())), problem, ranks, limits)
    for number, direction in enumerate(PASSES):
        pending = [wanted[name] for name in PASSES[number:] if name in wanted]
        if not pending:
            return
        own = take_outcome(steps, ranks.device)
        try:
            outcomes, reasons = zip(*ranks.gather((own, limits.reason())))
        except GroupClosed as error:
            rank = error.absent[0] if error.absent else None
            yield from (Result(case, rank=rank, ranks=error.absent, why=str(error)) for case in pending)
            lost = ", ".join(map(str, error.absent)) or "unknown"
            raise Stopped(f"lost while {pending[0].name} ran: rank {lost}", error.absent) from error
        failures = {rank: end for rank, end in enumerate(outcomes) if isinstance(end, Failure)}
        if failures:
            yield from report_failures(pending, failures, len(outcomes))
        elif direction in wanted:
            yield judge_case(wanted[direction], problem[0], outcomes)
        if pending[0].schedule != ONE_DEVICE and 0 < len(failures) < len(outcomes):
            raise Stopped(f"a rank failed alone in {pending[0].name}, which closes the group of all ranks")
        if any(outcome.fatal for outcome in failures.values()):
            raise Stopped(f"a rank or a device was lost in {pending[0].name}")
        if reason := next(filter(None, reasons), None):
            raise Stopped(reason)
        if failures:
            return


def start_run(case: Case, problem: list[Answers], ranks: Ranks, limits: Limits) -> Iterator[Errors]:
    """Run the passes of a case's schedule one after the other; ``problem`` is filled by the first run."""
    if not problem:
        problem.append(make_problem(case, ranks.device, ranks.world_size))
    yield from run_passes(ranks, problem[0], case.schedule, lambda: wait_for_device(ranks.device, limits))


def take_outcome(steps: Iterator[Errors], device: torch.device) -> Errors | Failure:
    """Run the next pass: its errors, or its failure."""
    try:
        return next(steps)
    except Exception as error:
        lost = isinstance(error, GroupClosed | Stalled | dist.DistError)
        lines = str(error).strip().splitlines() or [""]
        return Failure(f"{type(error).__name__}: {lines[0][:500]}", lost or not is_usable(device))


def is_usable(device: torch.device) -> bool:
    """Return whether a device still works: after an illegal memory access every CUDA call fails."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def report_failures(cases: Sequence[Case], failures: dict[int, Failure], world_size: int) -> Iterator[Result]:
    """Make the results of cases whose run failed. They name the rank that failed on its own, before ranks
    that only timed out waiting for it."""
    rank = min(failures, key=lambda rank: (failures[rank].fatal, rank))
    why = failures[rank].why if world_size == 1 else f"rank {rank}: {failures[rank].why}"
    for case in cases:
        yield Result(case, rank=rank, ranks=tuple(sorted(failures)), why=why)


def wait_for_device(device: torch.device, limits: Limits) -> None:
    """Wait until a GPU has finished its queued work. Raises Stalled after the timeout: a kernel that hangs
    never ends, and neither does a message from a lost rank."""
    if device.type != "cuda":
        return
    event, end = torch.cuda.Event(), time.monotonic() + limits.request.timeout
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if limits.signal_name or time.monotonic() > end:
            raise Stalled(f"the GPU did not finish its work within {limits.request.timeout:g} s")
        time.sleep(0)
