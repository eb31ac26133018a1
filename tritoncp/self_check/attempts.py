"""Attempts at cases, one after the other in one process: limits, failures, and what ranks say of each."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncp import comm
from tritoncp.self_check.cases import PASSES, Case, Problem, Result, make_problem, sizes
from tritoncp.self_check.comparison import Errors, Ranks, judge, run


class Request(NamedTuple):
    """The command's options; jobs: None for one a core."""

    only: str = "*"
    jobs: int | None = None
    world_size: int = 4
    budget: float = 60.0
    timeout: float = 20.0


@dataclass
class Limits:
    """Why not to go on: the budget is over, or a signal asked this process to end.

    signal_name: of that signal
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

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def reason(self) -> str | None:
        if self.signal_name:
            return f"{self.signal_name} came: this process was asked to end, or another rank died"
        if self.seconds > self.request.budget:
            return f"the budget of {self.request.budget:g} s is over (--budget)"
        return None


class Stopped(Exception):
    """The check cannot go on. absent: the ranks that are lost, as far as they are known."""

    def __init__(self, why: str, absent: Sequence[int] = ()):
        super().__init__(why)
        self.absent = tuple(absent)


class Stalled(RuntimeError):
    """The device has not done its work in time."""


@dataclass(frozen=True)
class Failure:
    """A run without an answer. ``fatal``: the process group, or the device, is of no use any more."""

    why: str
    fatal: bool

    @classmethod
    def of(cls, error: Exception, device: torch.device) -> Failure:
        lost = isinstance(error, comm.PeerLost | Stalled | dist.DistError)
        lines = str(error).strip().splitlines() or [""]
        return cls(f"{type(error).__name__}: {lines[0][:500]}", lost or not usable(device))


def usable(device: torch.device) -> bool:
    """Whether a device still works: after an illegal access it fails at everything."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


Gather = Callable[[Any], list[Any]]  # this process's value -> that of every rank, in rank order


def outcomes(cases: Sequence[Case], ranks: Ranks, gather: Gather, limits: Limits) -> Iterator[Result]:
    """Run cases one after the other. Raises Stopped where the rest cannot run."""
    for _, alike in groupby(cases, lambda case: (case.mask, case.dtype)):
        problem: list[Problem] = []  # made by the first run, where an exception is the case's failure
        for _, some in groupby(alike, lambda case: case.schedule):
            yield from attempt(list(some), problem, ranks, gather, limits)


def passes(case: Case, problem: list[Problem], ranks: Ranks, limits: Limits) -> Iterator[Errors]:
    """Run both passes of a case's schedule; ``problem`` is filled by the first run that needs it."""
    if not problem:
        dtype, size = getattr(torch, case.dtype), sizes(ranks.device, ranks.world_size)
        problem.append(make_problem(case.mask, dtype, size, ranks.device))
    yield from run(ranks, problem[0], case.schedule, lambda: wait(ranks.device, limits))


def attempt(
    cases: Sequence[Case], problem: list[Problem], ranks: Ranks, gather: Gather, limits: Limits
) -> Iterator[Result]:
    """Run the passes of one schedule, on a GPU twice, as the first time compiles; the last time is timed."""
    runs: dict[str, list[list[Errors]]] = {direction: [] for direction in PASSES}
    wanted = PASSES if cases[-1].direction == "backward" else PASSES[:1]
    repetitions = 2 if ranks.device.type == "cuda" else 1
    for repetition in range(repetitions):
        steps = passes(cases[0], problem, ranks, limits)
        for direction in wanted:
            unknown = [case for case in cases if case.direction in wanted[wanted.index(direction) :]]
            own = outcome_of(steps, ranks.device)
            try:
                records = gather((own, limits.reason()))
            except comm.PeerLost as error:
                rank = error.absent[0] if error.absent else None
                yield from (Result(case, rank=rank, ranks=error.absent, why=str(error)) for case in unknown)
                lost = ", ".join(map(str, error.absent)) or "unknown"
                raise Stopped(f"lost while {unknown[0].name} ran: rank {lost}", error.absent) from error
            failures = {rank: one for rank, (one, _) in enumerate(records) if isinstance(one, Failure)}
            if failures:
                yield from failed(unknown, failures, len(records))
            else:
                runs[direction].append([one for one, _ in records])
                if repetition == repetitions - 1:
                    yield from (
                        judge(case, problem[0], runs[direction])
                        for case in cases
                        if case.direction == direction
                    )
            if any(one.fatal for one in failures.values()):
                raise Stopped(f"a rank or a device was lost in {cases[0].name}")
            if reason := next((said for _, said in records if said), None):
                raise Stopped(reason)
            if failures:
                return


def outcome_of(steps: Iterator[Errors], device: torch.device) -> Errors | Failure:
    """The next pass, or why there is none."""
    try:
        return next(steps)
    except Exception as error:
        return Failure.of(error, device)


def failed(cases: Sequence[Case], failures: dict[int, Failure], world_size: int) -> Iterator[Result]:
    """Results of cases whose run raised, by the rank that did so first: others then wait for it in vain."""
    rank = min(failures, key=lambda rank: (failures[rank].fatal, rank))
    why = failures[rank].why if world_size == 1 else f"rank {rank}: {failures[rank].why}"
    for case in cases:
        yield Result(case, rank=rank, ranks=tuple(sorted(failures)), why=why)


def wait(device: torch.device, limits: Limits) -> None:
    """Wait until a GPU has done its work. Raises Stalled after the timeout: the message of a rank that is
    lost never ends, and neither does a kernel that hangs."""
    if device.type != "cuda":
        return
    event, end = torch.cuda.Event(), time.monotonic() + limits.request.timeout
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if limits.signal_name or time.monotonic() > end:
            raise Stalled(f"the GPU has not ended its work within {limits.request.timeout:g} s")
        time.sleep(0)
