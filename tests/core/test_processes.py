"""The pool of worker processes: each case has its result, or the reason why it has no result."""

import os
import signal
import subprocess
import time
from multiprocessing import resource_tracker

import pytest

from tritoncp.core.processes import Lost, WorkerPool


def work(cases):
    """Cases are (kind, number); the process ends in order before the case after "ends"."""
    for kind, number in cases:
        if kind == "dies":
            os._exit(7)
        if kind == "raises":
            raise ArithmeticError
        if kind == "hangs":
            subprocess.Popen(["sleep", "60"])
            time.sleep(60)
        yield number, os.getpid()
        if kind == "ends":
            return


BATCHES = [
    [("right", 0), ("dies", 1), ("right", 2)],
    [("ends", 3), ("right", 4), ("hangs", 5), ("right", 6)],
    [("raises", 7)],
    [("right", 8)],
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "jobs"),
    [
        ("fork", 3),
        ("spawn", 1),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("fork", 1), ("spawn", 3))),
    ],
)
def test_a_lost_case_does_not_affect_other_cases(method, jobs):
    timeout = 4.0 if method == "fork" else 20.0
    batches = BATCHES if method == "fork" else [BATCHES[0], BATCHES[2]]
    with WorkerPool(work, jobs, timeout=timeout, method=method) as pool:
        results = dict(pool.run(batches))
    assert set(results) == {case for batch in batches for case in batch}
    for (kind, number), result in results.items():
        said = {"dies": "exit code 7", "raises": "exit code 1", "hangs": f"took more than {timeout:g} s"}
        assert (said[kind] in result.why) if isinstance(result, Lost) else result[0] == number
        assert isinstance(result, Lost) == (kind in said)


def test_processes_are_reused_from_one_run_to_the_next_and_end_with_the_pool():
    with WorkerPool(work, 2, method="fork") as pool:
        pids = {pid for _ in range(3) for _, (_, pid) in pool.run([[("right", i)] for i in range(6)])}
    assert len(pids) <= 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ctrl_c_while_a_process_starts_reaches_only_the_parent(method, monkeypatch):
    """A terminal sends SIGINT to all processes of a command, also to those that are still importing, and to
    the first of a program, with which Python's tracker of resources starts."""
    monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", None)
    start = WorkerPool._start

    def interrupted_start(pool):
        worker = start(pool)
        os.kill(worker.process.pid, signal.SIGINT)
        return worker

    monkeypatch.setattr(WorkerPool, "_start", interrupted_start)
    with WorkerPool(work, 1, method=method) as pool:
        assert [result[0] for _, result in pool.run([[("right", 0), ("right", 1)]])] == [0, 1]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_poll_ends_a_run_and_the_processes_at_work():
    ends = time.monotonic() + 0.5

    def poll():
        if time.monotonic() > ends:
            raise TimeoutError

    with WorkerPool(work, 2, method="fork") as pool:
        with pytest.raises(TimeoutError):
            list(pool.run([[("hangs", 0)], [("hangs", 1)]], poll))
        assert [number for _, (number, _) in pool.run([[("right", 2)]])] == [2]


def test_a_variable_is_unset_only_in_the_processes(monkeypatch):
    monkeypatch.setenv("TRITONCP_DEBUG", "1")
    with WorkerPool(read_variable, 1, without="TRITONCP_DEBUG") as pool:
        assert [result for _, result in pool.run([["TRITONCP_DEBUG"]])] == ["not set"]
    assert os.environ["TRITONCP_DEBUG"] == "1"


def read_variable(cases):
    return [os.environ.get(name, "not set") for name in cases]
