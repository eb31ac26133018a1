"""Compilation of kernels in threads, those of a pass at once.

Triton compiles a kernel when it is launched first. Here that launch also starts to compile the kernels of
launches that follow, which wait for them and raise the compiler's errors. Python waits for a compiler in C++
most of the time, so that threads use several cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

from triton import AsyncCompileMode, FutureKernel

from tritoncp.core.log_lines import area_logger
from tritoncp.kernels.toolchain import keeps_pending_kernels

NAME = "tritoncp-compiles"  # of threads
THREADS = 8  # kernels of a training step: forward, dQ and dK/dV, each with and without a state, and delta
engine_log = area_logger("engine")


CompileOthers = Callable[[], object]  # compiles the kernels of launches that follow
_others: ContextVar[CompileOthers | None] = ContextVar("kernels of launches that follow", default=None)


@contextmanager
def followed_by(compile_others: CompileOthers) -> Iterator[None]:
    """Compile the kernels of ``compile_others()`` beside that of the first launch of the ``with`` block which
    Triton has to compile. If it compiles none, ``compile_others`` is not called."""
    token = _others.set(compile_others)
    try:
        yield
    finally:
        _others.reset(token)


def launch_first(compile_own: Callable[[], object], launch: Callable[[], Any]) -> Any:
    """Launch a kernel that may have to be compiled, by ``compile_own``; return the compiled kernel (None: it
    is interpreted)."""
    compile_others = _others.get()
    if compile_others is None or not uses_threads():
        kernel = launch()
    else:
        threads = _Compilers()

        def in_threads() -> Any:
            threads.__enter__()  # for this context; leaving it would wait for all kernels
            compile_own()
            if threads.raw_futures:
                threads.compile_ahead(compile_others)
            return launch()

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
    """Triton's mode in which kernels compile in threads."""

    def __init__(self) -> None:
        super().__init__(None)
        self.executor: ThreadPoolExecutor | None = None

    def submit(self, *args: Any) -> Any:
        """Start a compilation; Triton calls this for each kernel that is in none of its caches in memory."""
        if self.executor is None:
            self.executor = ThreadPoolExecutor(THREADS, NAME)
        return super().submit(*args)

    def compile_ahead(self, compile_others: CompileOthers) -> None:
        """Start the compilation of kernels that may be needed."""
        try:
            compile_others()
        except Exception as error:  # the launch itself raises it, if it comes
            engine_log.debug("kernels are not compiled ahead: %s: %s", type(error).__name__, error)

    def stop(self) -> None:
        """Start no more; threads end with their kernels."""
        if self.executor is not None:
            self.executor.shutdown(wait=False)
