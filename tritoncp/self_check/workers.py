"""Worker processes that share a device: compiling is most of the time on a GPU, and so is Python on a CPU."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tritoncp.self_check.attempts import Limits, Stopped, outcomes
from tritoncp.self_check.cases import ONE_DEVICE, Case, Result
from tritoncp.self_check.comparison import Ranks

SHORT = (
    ONE_DEVICE,
    "allgather",
    "ulysses",
)  # these schedules share kernels, and so do the others: about as many

DYING = 2.0  # seconds that a process whose pipe has ended is waited for


def parts_of(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that share kernels: of one dtype and mask (sinks come after the kernels of the causal mask), in
    two halves, the larger ones first."""

    def key(case: Case) -> tuple[bool, str, str]:
        return case.schedule in SHORT, case.dtype, case.mask.replace("sinks", "causal")

    return [list(part) for _, part in groupby(sorted(cases, key=key), key)]


def work_in_processes(
    parts: Sequence[Sequence[Case]], ranks: Ranks, jobs: int, limits: Limits
) -> Iterator[Result]:
    """Run parts in up to ``jobs`` processes. A process that ends in the middle of a case fails it, and
    another one does the rest of its part. Raises Stopped."""
    queue = [list(part) for part in parts]
    workers: dict[Any, Worker] = {}
    try:
        while queue or workers:
            if reason := limits.reason():
                raise Stopped(reason)
            while queue and len(workers) < jobs:
                worker = Worker(queue.pop(0), ranks, limits)
                workers[worker.pipe] = worker
            for pipe in wait(list(workers), 0.2):
                worker = workers[pipe]
                result = worker.receive()
                if worker.ended and (reason := limits.reason()):
                    raise Stopped(reason)  # it may have ended for the same reason: its case has not failed
                if result is not None:
                    yield result
                if worker.ended:
                    del workers[pipe]
                    if worker.cases:
                        queue.append(worker.cases)
    finally:
        for worker in workers.values():
            worker.process.kill()


class Worker:
    """A process and the cases of its part without a result. After a fork it is ready at once, but CUDA
    cannot follow one."""

    def __init__(self, cases: list[Case], ranks: Ranks, limits: Limits):
        context: Any = get_context("fork" if ranks.device.type == "cpu" else "spawn")
        self.cases, self.ended = cases, False
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(list(cases), ranks, limits, theirs), daemon=True)
        self.process.start()
        theirs.close()  # a dead worker now ends the pipe

    def receive(self) -> Result | None:
        """The next result, or that of the case in which the process died; None at the end."""
        try:
            result: Result = self.pipe.recv()
        except (EOFError, OSError):
            self.ended = True
            self.process.join(DYING)
            code = self.process.exitcode
            if not code or not self.cases:  # in order, or it hangs in a driver: the rest is another one's
                self.process.kill()
                return None
            return Result(
                self.cases.pop(0), why=f"its process ended with exit code {code} (negative: a signal)"
            )
        self.cases.remove(result.case)
        return result


def work(cases: list[Case], ranks: Ranks, limits: Limits, pipe: Connection) -> None:
    """The life of a worker. A device that is of no use any more is another process's to try again. Ctrl-C
    reaches it too, and is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start(ranks.device)
    try:
        for result in outcomes(cases, ranks, lambda own: [own], limits):
            pipe.send(result)
    except Stopped:
        pass
    pipe.close()
    os._exit(0)


def start(device: torch.device) -> None:
    """Set a process up so that kernels that it compiles are found by other processes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*heads do not go round")  # some worlds are to have too few
    if device.type == "cuda":
        from tritoncp.engines import name_functions

        torch.cuda.set_device(device)
        name_functions()
