"""Runs cases in turn in one process: limits, failures, and the results of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from tritoncp.distributed.failures import GroupClosed
from tritoncp.self_check.cases import CheckCase, CheckRequest, Result
from tritoncp.self_check.comparison import Errors, Ranks, judge_case, run_case


class Stopped(GroupClosed):
    """Raised where the check cannot go on. absent: the lost ranks that could be identified."""


class Failure(NamedTuple):
    """In place of the errors of a case: why it failed in one process, and whether that was a wait in vain for
    another rank or for the device."""

    why: str
    waited: bool


def run_cases(cases: Iterable[CheckCase], ranks: Ranks, request: CheckRequest) -> Iterator[Result]:
    """Run cases in turn on all ranks, and yield their results. Raises Stopped where the rest cannot run."""
    for case in cases:
        try:
            attempts, over = zip(*ranks.gather((attempt_case(case, ranks, request), request.over)))
        except GroupClosed as error:
            absent = error.absent or (0,)  # none is known where the store is lost, which rank 0 keeps
            yield Result(case, rank=absent[0], ranks=absent, why=str(error))
            lost = ", ".join(map(str, absent))
            raise Stopped(f"lost while {case.name} ran: rank {lost}", absent) from error
        failures = {rank: one for rank, one in enumerate(attempts) if isinstance(one, Failure)}
        if failures:  # the group is closed, or the device may be unusable
            # The rank that failed on its own, before ranks that only timed out waiting for it.
            rank = min(failures, key=lambda rank: (failures[rank].waited, rank))
            why = failures[rank].why if len(attempts) == 1 else f"rank {rank}: {failures[rank].why}"
            yield Result(case, rank=rank, ranks=tuple(failures), why=why)
            raise Stopped(f"{case.name} failed, and its process or its group with it")
        yield judge_case(case, ranks.problem(case).allowed, attempts)
        if any(over):
            raise Stopped(request.late)


def attempt_case(case: CheckCase, ranks: Ranks, request: CheckRequest) -> Errors | Failure:
    """Run a case in this process; an exception becomes a failure."""
    try:
        return run_case(ranks, case, lambda: wait_for_device(ranks.device, request.timeout))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0][:500]
        waited = isinstance(error, GroupClosed | TimeoutError | dist.DistError)
        return Failure(f"{type(error).__name__}: {line}", waited)


def wait_for_device(device: torch.device, timeout: float) -> None:
    """Wait until a GPU has finished its queued work. Raises TimeoutError after the timeout: a kernel that
    hangs never ends, and neither does a message from a lost rank."""
    if device.type != "cuda":
        return
    event, end = torch.cuda.Event(), time.monotonic() + timeout
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if time.monotonic() > end:
            raise TimeoutError(f"the GPU did not finish its work within {timeout:g} s")
        time.sleep(0)
