"""Compilation of kernels in threads, those of a pass at once.

Triton compiles a kernel when it is launched first. Here that launch also starts to compile the kernels of
launches that follow, which wait for them and raise the compiler's errors. Python waits for a compiler in C++
most of the time, so that threads use several cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, Protocol

from triton import AsyncCompileMode, FutureKernel

from tritoncp.core.log_lines import area_logger
from tritoncp.kernels.toolchain import keeps_pending_kernels

NAME = "tritoncp-compiles"  # of threads
THREADS = 4  # kernels of a training step: forward, delta, dQ, dK/dV
engine_log = area_logger("engine")


class Compilable(Protocol):
    """A launch whose kernel can be compiled ahead."""

    def compile(self) -> object: ...


Prepare = Callable[[], Iterable[Compilable]]
_following: ContextVar[Prepare | None] = ContextVar("launches that follow", default=None)


@contextmanager
def followed_by(prepare: Prepare) -> Iterator[None]:
    """Compile the launches of ``prepare()`` beside the first launch of the ``with`` block whose kernel Triton
    has to compile. If no kernel has to be compiled, ``prepare`` is not called."""
    token = _following.set(prepare)
    try:
        yield
    finally:
        _following.reset(token)


def launch_first(run: Callable[[], Any]) -> Any:
    """Launch a kernel that may have to be compiled, by ``run``; return the compiled kernel (None: it is
    interpreted)."""
    prepare = _following.get()
    if prepare is None or not uses_threads():
        kernel = run()
    else:
        threads = _Compilers(prepare)

        def in_threads() -> Any:
            threads.__enter__()  # for this context; leaving it would wait for all kernels
            return run()

        try:
            kernel = Context().run(in_threads)
        finally:
            threads.stop()
    return kernel.result() if isinstance(kernel, FutureKernel) else kernel


def uses_threads() -> bool:
    """Return whether kernels compile in threads: on several cores, from Triton 3.7 and Python 3.12 on.

    Python 3.11 may collect garbage, and run other threads, while it makes the syntax tree of a kernel; its
    parser then fails ("AST constructor recursion depth mismatch").
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1 and sys.version_info >= (3, 12) and keeps_pending_kernels()


class _Compilers(AsyncCompileMode):
    """Triton's mode in which kernels compile in threads. The first kernel is followed by those of
    ``prepare()``."""

    def __init__(self, prepare: Prepare) -> None:
        super().__init__(None)
        self.executor: ThreadPoolExecutor | None = None
        self.prepare: Prepare | None = prepare

    def submit(self, *args: Any) -> Any:
        """Start a compilation; Triton calls this for each kernel that is in none of its caches in memory."""
        if self.executor is None:
            self.executor = ThreadPoolExecutor(THREADS, NAME)
        kernel = super().submit(*args)
        prepare, self.prepare = self.prepare, None
        if prepare is not None:
            try:
                for launch in prepare():
                    launch.compile()
            except Exception as error:  # the launch itself raises it, if it comes
                engine_log.debug("kernels are not compiled ahead: %s: %s", type(error).__name__, error)
        return kernel

    def stop(self) -> None:
        """Start no more; threads end with their kernels."""
        if self.executor is not None:
            self.executor.shutdown(wait=False)
