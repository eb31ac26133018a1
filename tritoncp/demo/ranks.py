"""Processes and process groups: a world started here, or one that torchrun started.

One GPU a process and NCCL where there are enough of them; gloo otherwise.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tritoncp.core.process_environment import (
    interpret_without_gpu,
    torchrun_world_size,
    use_loopback_interface,
)
from tritoncp.demo.train import Config, Step, train

TIMEOUT = timedelta(minutes=5)  # far more than one step takes


class RankFailed(RuntimeError):
    """Raised where a rank raised or died. The message holds that rank's error; all other ranks were
    stopped."""


def device_of(rank: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")


def backend(world_size: int) -> str:
    """Choose the backend: NCCL needs a GPU for every rank of this machine; gloo runs on any."""
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"]) if torchrun_world_size() else world_size
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


@contextlib.contextmanager
def member(rank: int, world_size: int, device: torch.device, store: dist.Store) -> Iterator[Any]:
    """The process group, from when this rank joins until all leave."""
    kind = backend(world_size)
    torch.set_num_threads(1)  # ranks share the cores
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bound = device if kind == "nccl" else None
    dist.init_process_group(
        kind, timeout=TIMEOUT, device_id=bound, store=store, rank=rank, world_size=world_size
    )
    try:
        yield dist.group.WORLD
        leave_together(store, world_size)
    finally:
        dist.destroy_process_group()


def leave_together(store: dist.Store, world_size: int) -> None:
    """Wait for all ranks, through the store: a rank that disconnects early can break the last collective of a
    slower one, and so could a barrier."""
    if store.add("tritoncp/leaving", 1) == world_size:
        store.set("tritoncp/left", "all")
    store.wait(["tritoncp/left"], TIMEOUT)


def train_in_torchrun(config: Config, on_step: Callable[[Step], None]) -> list[Step]:
    """Train as one of torchrun's ranks."""
    device = device_of(int(os.environ["LOCAL_RANK"]))
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
    steps = []
    with member(rank, world_size, device, store) as group:
        for step in train(config, group, device):
            steps.append(step)
            on_step(step)
    return steps


class LocalRanks:
    """`world_size` processes on this machine that train together, beside this one.

    A thread listens to them and calls `on_step` with the reports of rank 0. `result()` waits, and raises
    RankFailed with the first failure; leaving the `with` block stops all ranks that still run.
    """

    def __init__(self, config: Config, world_size: int, on_step: Callable[[Step], None]):
        self.config, self.world_size, self.on_step = config, world_size, on_step
        self.steps: list[Step] = []
        self.failure: RankFailed | None = None

    def __enter__(self) -> "LocalRanks":
        use_loopback_interface()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")  # CUDA cannot follow a fork
        self.workers: dict[int, Any] = {}
        self.pipes: dict[Connection, int] = {}
        for rank in range(self.world_size):
            receiver, sender = context.Pipe(duplex=False)
            job = (rank, self.world_size, self.store.port, self.config, sender)
            self.workers[rank] = context.Process(target=work, args=job, daemon=True, name=f"rank {rank}")
            self.pipes[receiver] = rank
            self.workers[rank].start()
            sender.close()  # so that a dead worker ends its pipe
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def result(self) -> list[Step]:
        self.listener.join()
        self.check()
        return self.steps

    def _listen(self) -> None:
        talking = dict(self.pipes)
        while talking:
            for pipe in cast(list[Connection], wait(list(talking))):
                kind, message = receive(pipe)
                if kind == "step":
                    self.steps.append(message)
                    self.on_step(message)
                elif kind == "done":
                    del talking[pipe]
                else:
                    self._fail(talking[pipe], message)
                    return

    def _fail(self, rank: int, message: str | None) -> None:
        if message is None:
            self.workers[rank].join(10)
            code = self.workers[rank].exitcode
            message = f"it ended without a message, exit code {code} (negative: killed by that signal)"
        self.failure = RankFailed(f"rank {rank} of {self.world_size} failed:\n{message}")
        self._stop()

    def _stop(self) -> None:
        for process in self.workers.values():
            if process.is_alive():
                process.terminate()
        for process in self.workers.values():
            process.join(10)


def receive(pipe: Connection) -> tuple[str, Any]:
    """Receive from a rank: ("step", Step), ("done", None), ("error", its traceback) or ("gone", None)."""
    try:
        return pipe.recv()
    except EOFError:
        return "gone", None


def work(rank: int, world_size: int, port: int, config: Config, report: Connection) -> None:
    """Run one local rank and send its steps, its end or its error through the pipe."""
    try:
        interpret_without_gpu()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        device = device_of(rank)
        with member(rank, world_size, device, store) as group:
            for step in train(config, group, device):
                if rank == 0:
                    report.send(("step", step))
        report.send(("done", None))
    except Exception:
        report.send(("error", traceback.format_exc()))
        sys.exit(1)
