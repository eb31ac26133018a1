"""Worker processes that share a device, because compiling (on a GPU) or Python (on a CPU) takes most time."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tritoncp.self_check.attempts import Limits, Stopped, run_cases
from tritoncp.self_check.cases import ONE_DEVICE, Case, Result
from tritoncp.self_check.comparison import Ranks

SHORT = (ONE_DEVICE, "allgather", "ulysses")  # schedules that share kernels; the others share about as many
DYING = 2.0  # seconds to wait for a process whose pipe has ended


def split_into_parts(cases: Sequence[Case]) -> list[list[Case]]:
    """Split cases into parts that share kernels, in their order: one dtype and mask each (sinks go with the
    causal mask, whose kernels they use), in two halves by schedule."""
    parts: dict[tuple[str, str, bool], list[Case]] = {}
    for case in cases:
        key = case.dtype, case.mask.replace("sinks", "causal"), case.schedule in SHORT
        parts.setdefault(key, []).append(case)
    return list(parts.values())


def run_in_processes(
    parts: Sequence[Sequence[Case]], ranks: Ranks, jobs: int, limits: Limits
) -> Iterator[Result]:
    """Run parts in up to ``jobs`` processes. A case during which its process dies has failed; another process
    runs the rest of the part. Raises Stopped where a limit is reached."""
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
    """A worker process and the cases of its part without a result. It is forked on a CPU, which is
    fast, and spawned on a GPU, since CUDA cannot be used after a fork."""

    def __init__(self, cases: list[Case], ranks: Ranks, limits: Limits):
        context: Any = get_context("fork" if ranks.device.type == "cpu" else "spawn")
        self.cases, self.ended = cases, False
        self.pipe, child_pipe = context.Pipe(duplex=False)
        arguments = (list(cases), ranks, limits, child_pipe)
        self.process = context.Process(target=run_worker, args=arguments, daemon=True)
        self.process.start()
        child_pipe.close()  # so that receive() sees the end of the pipe when the worker dies

    def receive(self) -> Result | None:
        """Receive the next result; None at the end; if the process died, a failure of its present case."""
        try:
            result: Result = self.pipe.recv()
        except (EOFError, OSError):
            self.ended = True
            self.process.join(DYING)
            code = self.process.exitcode
            if not code or not self.cases:  # in order, or it hangs in a driver: a new worker runs the rest
                self.process.kill()
                return None
            why = f"its process ended with exit code {code} (negative: a signal)"
            return Result(self.cases.pop(0), why=why)
        self.cases.remove(result.case)
        return result


def run_worker(cases: list[Case], ranks: Ranks, limits: Limits, pipe: Connection) -> None:
    """Run cases in a worker process and send the results. Where the device can no longer be used, the process
    ends, and a new one runs the remaining cases."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it
    set_up_process(ranks.device)
    try:
        for result in run_cases(cases, ranks, lambda own: [own], limits):
            pipe.send(result)
    except Stopped:
        pass
    pipe.close()
    os._exit(0)


def set_up_process(device: torch.device) -> None:
    """Set up a process so that other processes find the kernels that it compiles in Triton's cache."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*heads cannot be divided")  # such worlds are cases
    if device.type == "cuda":
        from tritoncp.ops.engine_factory import name_functions

        torch.cuda.set_device(device)
        name_functions()
