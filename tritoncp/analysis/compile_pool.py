"""A pool of compiler processes: compiles many jobs at a time, each in a process that interprets no kernel.

Each process runs ``python -m tritoncp.analysis.compile_worker``.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any

from tritoncp.analysis.jobs import Job
from tritoncp.core.environment import OFFLINE_LOG
from tritoncp.ops import tile_tables


def compile_all(
    jobs: Iterable[Job], processes: int | None = None, timeout: float = 300.0, question: str = "report"
) -> Generator[tuple[Job, dict[str, Any]]]:
    """Compile jobs in processes. Yields each job and its report, in the order of completion.

    processes: how many compile at a time; default: one for each core
    timeout:   seconds for one job
    question:  "report"; "digest" for the digest alone, which compiles no kernel

    A report is the result of :func:`tritoncp.analysis.kernel_report.report_kernel`, or ``{"failed": why}``: a
    compiler that raises, dies or takes too long does not affect other jobs.  The processes end with the
    iteration.
    """
    compilers = Compilers(processes, timeout)
    try:
        yield from compilers.compile_jobs(jobs, question)
    finally:
        compilers.end()


class Compilers:
    """Compiler processes, reused from one list of jobs to the next, since they take seconds to start."""

    def __init__(self, processes: int | None = None, timeout: float = 300.0) -> None:
        self._max_workers, self._timeout = processes or os.cpu_count() or 1, timeout
        self._workers: list[Worker] = []

    def compile_jobs(
        self, jobs: Iterable[Job], question: str = "report"
    ) -> Generator[tuple[Job, dict[str, Any]]]:
        """Compile jobs as :func:`compile_all` does. Closing the generator ends the jobs in work."""
        todo = list(jobs)
        if not todo:
            return
        self._workers += [Worker() for _ in range(len(self._workers), min(self._max_workers, len(todo)))]
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def compile_job(job: Job) -> dict[str, Any]:
            worker = idle.get()
            try:
                return worker.ask(question, job, self._timeout)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(len(self._workers))
        try:
            waiting: dict[Future[dict[str, Any]], Job] = {pool.submit(compile_job, job): job for job in todo}
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            busy, self._workers = self._workers, []
            while not idle.empty():
                self._workers.append(idle.get())
            for worker in set(busy) - set(self._workers):
                worker.end()
            pool.shutdown()

    def end(self) -> None:
        """Kill all processes."""
        for worker in self._workers:
            worker.end()


class Worker:
    """A compiler process; the next job after one that died or was killed starts another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._ended = False

    def ask(self, question: str, job: Job, timeout: float) -> dict[str, Any]:
        """Send one job and return its answer, ``{"failed": why}`` after ``timeout`` seconds."""
        process = self._process = self._process or self._start_process()
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._kill(process)

        timer = threading.Timer(timeout, kill)
        timer.start()
        try:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([question, asdict(job)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        self._process = None
        self._kill(process)
        died = f"the compiler's process ended with status {process.wait()}"
        return {"failed": f"not compiled in {timeout:g} s" if late.is_set() else died}

    def end(self) -> None:
        """Kill the process, and start no other."""
        self._ended = True
        if self._process is not None:
            self._kill(self._process)

    def _start_process(self) -> subprocess.Popen[str]:
        if self._ended:
            raise RuntimeError("this pool of compilers was ended; make another one")
        env = tile_tables.environment(without="TRITON_INTERPRET")
        command = [sys.executable, "-m", "tritoncp.analysis.compile_worker"]
        pipe = subprocess.PIPE
        # A group of its own: the assembler that it starts ends with it.
        return subprocess.Popen(
            command, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True, stderr=_stderr()
        )

    @staticmethod
    def _kill(process: subprocess.Popen[str]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        process.wait()


def _stderr() -> Any:
    """The stderr of compiler processes: discarded unless TRITONCP_OFFLINE_LOG=1, since a report has the error
    message."""
    return None if OFFLINE_LOG.read() else subprocess.DEVNULL
