"""Real processes in one gloo group, for tests: forked, so that closures, poison and settings come along."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """A rank died or said nothing in time."""


def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """``fn(group, *args)`` on every rank of a new gloo world, CPU only: the results, by rank.

    group: the world's ProcessGroup; ``group.rank()`` says who one is. Results come back pickled. The first
    rank that raises ends all: its exception is raised here with a note of its rank and traceback. A rank
    that dies, or ``timeout`` seconds, raise RankFailed.

    fn may be a closure. For what each rank of a failing call says, catch it in fn and return it.
    """
    with tempfile.TemporaryDirectory() as folder:
        children, pipes = {}, {}
        try:
            for rank in range(world_size):
                ours, theirs = Pipe(duplex=False)
                children[rank] = os.fork()
                if children[rank] == 0:
                    _child(rank, world_size, Path(folder, "store"), fn, args, theirs, timeout)
                theirs.close()  # a dead child now ends its pipe
                pipes[ours] = rank
            return _collect(pipes, world_size, time.monotonic() + timeout)
        finally:
            for pid in children.values():
                os.kill(pid, signal.SIGKILL)  # a child that has ended is still ours to wait for
                os.waitpid(pid, 0)
            for pipe in pipes:
                pipe.close()


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


def _child(
    rank: int,
    world_size: int,
    store: Path,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    pipe: Connection,
    timeout: float,
) -> None:
    """The life of one rank; never returns."""
    signal.alarm(int(timeout) + 10)  # an orphan ends by itself
    try:
        stay_on_this_machine()
        torch.set_num_threads(1)  # a forked process cannot use the threads of its parent
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        message = _packed(True, fn(dist.group.WORLD, *args), "")
    except BaseException as error:
        message = _packed(False, error, traceback.format_exc())
    pipe.send_bytes(message)
    signal.pause()  # until the parent has heard everyone: who hangs up early can break a slower rank


def _packed(good: bool, said: Any, trace: str) -> bytes:
    try:
        message = pickle.dumps((good, said, trace))
        pickle.loads(message)  # an exception may pickle and not come back
        return message
    except Exception as error:
        return pickle.dumps((False, RankFailed(f"{type(said).__name__} cannot be pickled: {error!r}"), trace))


def stay_on_this_machine() -> None:
    """Gloo looks for this host by name, which containers often cannot resolve; the ranks are all here."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
