"""Real processes in one gloo group, for tests: forked, so that closures, poison and settings come along."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncp.core.processes import use_loopback_interface

if not torch.cuda.is_available():
    # The first backward pass of a process starts a thread for each device, and its forks may then run none. A
    # torch with CUDA counts devices on a machine without them once there was a fake tensor, which tests make;
    # before that, here, it counts none.
    torch.ones((), requires_grad=True).backward()


# The timeout of groups for which no test waits, and of whole runs: a busy machine may stop a rank for long.
PATIENCE = timedelta(seconds=240)


class RankFailed(AssertionError):
    """Raised where a rank died or did not answer in time."""


def run(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = PATIENCE.total_seconds()
) -> list[Any]:
    """Run ``fn(group, *args)`` on every rank of a new gloo world, CPU only; return the results, by rank.

    group: the world's ProcessGroup; ``group.rank()`` is the rank of the process. Results come back pickled.
        The first rank that raises ends all: its exception is raised here with a note of its rank and
        traceback. A rank that dies, or ``timeout`` seconds, raise RankFailed.

    fn may be a closure; :func:`attempt` in it returns the errors of all ranks of a failing call.
    """
    load_compiler()
    with tempfile.TemporaryDirectory() as folder:
        children, pipes = {}, {}
        try:
            for rank in range(world_size):
                receiver, sender = Pipe(duplex=False)
                children[rank] = os.fork()
                if children[rank] == 0:
                    _child(rank, world_size, Path(folder, "store"), fn, args, sender, timeout)
                sender.close()  # a dead child now ends its pipe
                pipes[receiver] = rank
            return _collect(pipes, world_size, time.monotonic() + timeout)
        finally:
            for pid in children.values():
                os.kill(pid, signal.SIGKILL)  # a child that has ended still has to be waited for
                os.waitpid(pid, 0)
            for pipe in pipes:
                pipe.close()


@cache
def load_compiler() -> None:
    """Compile a function in this process, before its first fork: each rank that compiles would spend a second
    on what Dynamo and AOTAutograd import and keep at their first graph."""
    torch.compile(lambda x: (x.sin() @ x).sum(), backend="aot_eager")(torch.eye(2, requires_grad=True))


def run_program(world_size: int, path: Path, result: Callable[[dict[str, Any], str], Any]) -> list[Any]:
    """Run a program as torchrun starts its ranks, but forked, which takes a tenth of the time. Return
    ``result(variables, output)`` of each rank: the variables that the program leaves, and its output."""

    def run_rank(group: Any) -> Any:
        leave_for_torchrun(group)
        torch._dynamo.utils.counters.clear()  # a program may count the graphs that it compiles
        with contextlib.redirect_stdout(io.StringIO()) as output:
            variables = runpy.run_path(str(path), run_name="__main__")
        return result(variables, output.getvalue())

    return run(world_size, run_rank)


def run_torchrun(world_size: int, path: Path, folder: Path) -> str:
    """Run a program by torchrun in a folder, as a user does; return its output."""
    use_loopback_interface()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", str(path)]
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its error as text, for a comparison of the errors of all ranks."""
    try:
        return call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


_STORES: list[dist.Store] = []  # served by this rank


def leave_for_torchrun(group: Any) -> None:
    """Destroy a rank's group, and set the variables by which torchrun has ranks meet: at a store that rank 0
    serves from now on, since a free port may be taken by another process until the ranks meet there."""
    rank, world_size, port = group.rank(), group.size(), [0]
    if rank == 0:
        _STORES.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        port = [_STORES[-1].port]
    dist.broadcast_object_list(port, 0, group)
    dist.destroy_process_group()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": port[0], "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in (ranks | address).items()})


def unused_port() -> int:
    """Return a port that is free, and that the system gives to no process that asks for any port."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
    raise OSError("none of 100 ports is free")


class Outcome(NamedTuple):
    """The end of a rank: its exit status (-9: killed, None: terminated by this module), its exception, and
    the seconds since all ranks were ready."""

    status: int | None
    said: str
    seconds: float


def outcomes(
    world_size: int, fn: Callable[[Any], Any], timeout: float, wait: float, faulty: int
) -> list[Outcome]:
    """How every rank of a new gloo world ends that runs ``fn(group)``: for ranks that die, stop or raise.

    timeout: the group's, in seconds. A rank that has not ended after ``wait`` seconds is ended here; the
        faulty rank, if it does not end by itself, a moment after all others.
    """
    with tempfile.TemporaryDirectory() as folder:
        children, ended = {}, {}
        try:
            for rank in range(world_size):
                children[rank] = os.fork()
                if children[rank] == 0:
                    _end(rank, world_size, Path(folder), fn, timeout)
            deadline = time.monotonic() + wait
            while len(ended) < world_size and time.monotonic() < deadline:
                for rank in children.keys() - ended.keys():
                    pid, status = os.waitpid(children[rank], os.WNOHANG)
                    if pid:
                        ended[rank] = os.waitstatus_to_exitcode(status)
                if children.keys() - ended.keys() == {faulty}:
                    deadline = min(deadline, time.monotonic() + 0.5)
                    faulty = -1
                time.sleep(0.02)
        finally:
            for rank in children.keys() - ended.keys():
                os.kill(children[rank], signal.SIGKILL)
                os.waitpid(children[rank], 0)
        return [_outcome(Path(folder, str(rank)), ended.get(rank)) for rank in range(world_size)]


def _outcome(path: Path, status: int | None) -> Outcome:
    seconds, _, said = path.read_text().partition(" ") if path.exists() else ("nan", "", "")
    return Outcome(status, said, float(seconds))


def _end(rank: int, world_size: int, folder: Path, fn: Callable[[Any], Any], timeout: float) -> None:
    """Run one rank; never returns."""
    signal.alarm(120)  # an orphan ends by itself
    status, start = 0, time.monotonic()
    try:
        _join(rank, world_size, folder / "store", 60)
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=timeout))
        dist.barrier()
        start = time.monotonic()
        fn(group)
        said = ""
    except BaseException as error:
        status, said = 1, f"{type(error).__name__}: {error}"
    (folder / str(rank)).write_text(f"{time.monotonic() - start} {said}")
    os._exit(status)


def _collect(pipes: dict[Connection, int], world_size: int, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < world_size:
        talking = [pipe for pipe, rank in pipes.items() if rank not in results]
        ready = wait(talking, max(0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"no word in time from ranks {sorted(pipes[pipe] for pipe in talking)}")
        for pipe in ready:
            rank = pipes[pipe]  # type: ignore[index]
            try:
                good, said, trace = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailed(f"rank {rank} of {world_size} ended without a word") from None
            if not good:
                said.add_note(f"on rank {rank} of {world_size}:\n{trace}")
                raise said
            results[rank] = said
    return [results[rank] for rank in range(world_size)]


def _join(rank: int, world_size: int, path: Path, timeout: float) -> None:
    """Make the gloo world of forked ranks, whose store is a file."""
    gc.freeze()  # a collection would write to all memory that a rank shares with its parent
    if inductor := sys.modules.get("torch._inductor.async_compile"):
        inductor.AsyncCompile.pool.cache_clear()  # a fork lacks the threads of its parent
    use_loopback_interface()
    torch.set_num_threads(1)  # a forked process cannot use the threads of its parent
    store, limit = dist.FileStore(str(path), world_size), timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def _child(
    rank: int, world_size: int, store: Path, fn: Callable[..., Any], args: tuple[Any, ...], pipe: Connection,
    timeout: float,
) -> None:  # fmt: skip
    """Run one rank; never returns."""
    signal.alarm(int(timeout) + 10)  # an orphan ends by itself
    faulthandler.dump_traceback_later(0.9 * timeout, file=sys.__stderr__)  # the stack of a rank that hangs
    try:
        _join(rank, world_size, store, timeout)
        message = _packed(True, fn(dist.group.WORLD, *args), "")
    except BaseException as error:
        message = _packed(False, error, traceback.format_exc())
    pipe.send_bytes(message)
    signal.pause()  # until the parent has all answers: an early disconnect can break a slower rank


def _packed(good: bool, said: Any, trace: str) -> bytes:
    try:
        message = pickle.dumps((good, said, trace))
        pickle.loads(message)  # an exception may pickle and not come back
        return message
    except Exception as error:
        return pickle.dumps((False, RankFailed(f"{type(said).__name__} cannot be pickled: {error!r}"), trace))
