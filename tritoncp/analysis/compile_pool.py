"""Parallel compilation of jobs, in processes without TRITON_INTERPRET."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from tritoncp.analysis.jobs import Job
from tritoncp.core.environment import OFFLINE_LOG
from tritoncp.core.worker_pool import Lost, WorkerPool


class Compilers(WorkerPool):
    """Pool of compiler processes, which are reused, since they take seconds to start.

    processes: their number; default: one for each core
    timeout:   seconds for one job
    """

    def __init__(self, processes: int | None = None, timeout: float = 300.0) -> None:
        super().__init__(report_jobs, processes, setup=set_up, timeout=timeout, without="TRITON_INTERPRET")

    def compile_jobs(self, jobs: Iterable[Job]) -> Generator[tuple[Job, dict[str, Any]]]:
        """Yield (job, report) in the order of completion. Closing the generator kills running jobs. A report
        is the result of :func:`tritoncp.analysis.kernel_report.report_kernel`, or ``{"failed": why}`` if the
        compiler raises, dies or exceeds the timeout, which does not affect other jobs."""
        for job, answer in self.run([job] for job in jobs):
            yield job, {"failed": answer.why} if isinstance(answer, Lost) else answer


def set_up() -> None:
    """Set up a compiler process: discard the compilers' output unless TRITONCP_OFFLINE_LOG=1. (Reports have
    the error messages.)"""
    from tritoncp.ops.engine_factory import name_functions

    if not OFFLINE_LOG.read():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    name_functions()


def report_jobs(jobs: Iterable[Job]) -> Iterator[dict[str, Any]]:
    """Compile jobs in a compiler process. Triton is imported here, without TRITON_INTERPRET."""
    from tritoncp.analysis.kernel_report import report_kernel

    for job in jobs:
        try:
            yield report_kernel(job)
        except Exception as error:  # any compiler error is a result: other jobs continue
            yield {"failed": f"{type(error).__name__}: {str(error).strip()[:500]}"}
