"""Processes: their environment (interpreted kernels, torchrun's ranks, gloo's interface), and a pool of
workers in which a crash or timeout affects only the case that caused it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Self

POLL = 0.2  # seconds between checks of time limits
DYING = 2.0  # seconds to wait for the exit of a process that was killed, or whose pipe was closed


def interpret_without_gpu() -> None:
    """Set TRITON_INTERPRET=1 if there is no GPU. Call it before Triton is imported."""
    import torch  # late: spawned workers import this module and need no torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def torchrun_world_size() -> int | None:
    """Return the number of ranks that torchrun started, None if it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def use_loopback_interface() -> None:
    """Set gloo's interface to the loopback, for ranks on one machine. By default gloo resolves the host name,
    which fails in many containers."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


class Lost(NamedTuple):
    """Placeholder for the missing result of a case, with the reason."""

    why: str


class WorkerPool:
    """A pool of up to ``jobs`` processes, which run one batch of cases after another. A context manager,
    which kills them at the end.

    function: a batch of cases -> an iterator of their results, in order. If it ends before the last case,
              another process runs the rest.
    setup:    called once in each process
    timeout:  seconds for a case, including the start of its process
    method:   "spawn" takes seconds, and pickles function and setup; "fork" is fast, but not possible with
    CUDA
    without:  name of an environment variable that is unset in the processes
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Iterable[Any]],
        jobs: int | None = None,
        *,
        setup: Callable[[], object] = list,
        timeout: float = math.inf,
        method: str = "spawn",
        without: str = "",
    ) -> None:
        self._jobs = jobs or len(os.sched_getaffinity(0))  # the cores that this process may use
        self._timeout, self._without = timeout, without
        self._context: Any = get_context(method)
        self._arguments = function, setup
        self._idle: list[_Worker] = []
        self._busy: dict[Any, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in [*self._idle, *self._busy.values()]:
            worker.kill()
        self._idle, self._busy = [], {}

    def run(
        self, batches: Iterable[Sequence[Any]], poll: Callable[[], object] = list
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (case, its result or :class:`Lost`) in the order of completion. ``poll`` is called several
        times a second, and may raise. Closing the iterator kills busy processes."""
        queue = deque(list(batch) for batch in batches)
        try:
            while queue or self._busy:
                poll()
                while queue and len(self._busy) < self._jobs:
                    worker = self._idle.pop() if self._idle else self._start()
                    worker.give(queue.popleft())
                    self._busy[worker.pipe] = worker
                ready = wait(list(self._busy), POLL)
                for pipe, worker in list(self._busy.items()):
                    if pipe in ready:
                        result = worker.receive()
                    elif time.monotonic() > worker.began + self._timeout:
                        result, worker.ended = Lost(f"took more than {self._timeout:g} s"), True
                    else:
                        continue
                    if worker.ended:
                        poll()  # poll() may raise for the same reason, so that the case is not lost
                        worker.kill()
                    if result is not None:
                        yield worker.cases.pop(0), result
                    if worker.ended or not worker.cases:
                        del self._busy[pipe]
                        self._idle += [] if worker.ended else [worker]
                        queue += [worker.cases] if worker.cases else []
        finally:
            for worker in self._busy.values():
                worker.kill()
            self._busy = {}

    def _start(self) -> _Worker:
        value = os.environ.pop(self._without, None)
        try:
            return _Worker(self._context, self._arguments)
        finally:
            if value is not None:
                os.environ[self._without] = value


class _Worker:
    """A process, and the cases of its batch that have no result yet."""

    def __init__(self, context: Any, arguments: tuple[Any, ...]) -> None:
        self.cases: list[Any] = []
        self.ended, self.began, self._num_results = False, 0.0, 0
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(target=_work, args=(child_pipe, *arguments), daemon=True)
        if context.get_start_method() != "fork":
            # start() would start the tracker if none runs, which unblocks SIGINT.
            resource_tracker.ensure_running()
        # Ctrl-C reaches only the parent, also in the seconds while the process starts, which inherits the
        # mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        child_pipe.close()  # so that the pipe is closed when the process dies

    def give(self, cases: list[Any]) -> None:
        self.cases, self.began, self._num_results = cases, time.monotonic(), 0
        with contextlib.suppress(OSError):  # the process died while idle: receive() reports it
            self.pipe.send(cases)

    def receive(self) -> Any:
        """Receive the next result; Lost if the process has died, None if it exited normally after a
        result."""
        try:
            result = self.pipe.recv()
        except (EOFError, OSError):
            self.ended = True
            self.process.join(DYING)
            code = self.process.exitcode
            if code == 0 and self._num_results:
                return None
            return Lost(f"its process ended with exit code {code} (negative: a signal)")
        self.began, self._num_results = time.monotonic(), self._num_results + 1
        return result

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(DYING)


def _work(
    pipe: Connection, function: Callable[[list[Any]], Iterable[Any]], setup: Callable[[], object]
) -> None:
    """Run batches until the pipe is closed, or a batch ends before its last case."""
    os.setpgrp()  # a separate process group: children are killed with it
    parent = os.getppid()
    setup()
    complete = True
    while complete:
        while not pipe.poll(1.0):
            if os.getppid() != parent:  # the parent died; forked processes may keep the pipe open
                os._exit(0)
        try:
            cases = pipe.recv()
        except EOFError:
            break
        count = 0
        for result in function(cases):
            pipe.send(result)
            count += 1
        complete = count == len(cases)
    os._exit(0)  # a normal exit could wait for a device
