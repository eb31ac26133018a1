"""Local processes that train together as the ranks of a process group.

One GPU a process and NCCL where there are enough of them; gloo otherwise.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from tritoncp.core.process_environment import interpret_without_gpu, use_loopback_interface
from tritoncp.demo.train import TrainingConfig, TrainingStep, train

TIMEOUT = timedelta(minutes=5)  # far more than one step takes


class RankFailed(RuntimeError):
    """Raised where a rank raised or died. The message holds that rank's error; all other ranks were
    stopped."""


def device_of(rank: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")


def backend(world_size: int) -> str:
    """Choose the backend: NCCL needs a GPU for every rank; gloo runs on any."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


class LocalRanks:
    """`world_size` processes that train together, beside this one. `poll` calls `on_step` with the new steps
    of rank 0; leaving the `with` block stops all ranks that still run."""

    def __init__(self, config: TrainingConfig, world_size: int, on_step: Callable[[TrainingStep], None]):
        self.config, self.world_size, self.on_step = config, world_size, on_step
        self.steps: list[TrainingStep] = []

    def __enter__(self) -> "LocalRanks":
        use_loopback_interface()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.queue = mp.get_context("spawn").SimpleQueue()  # CUDA cannot follow a fork
        arguments = (self.world_size, self.store.port, self.config, self.queue)
        self.context = mp.start_processes(train_rank, arguments, self.world_size, join=False, daemon=True)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.context.processes:
            process.kill()
            process.join()

    def poll(self, timeout: float = 0) -> bool:
        """Wait up to ``timeout`` seconds for the ranks to end. Returns whether they have; raises RankFailed
        with the first failure."""
        try:
            ended = self.context.join(timeout)
        except ProcessException as error:
            raise RankFailed(f"rank {error.error_index} of {self.world_size} failed: {error}") from error
        while not self.queue.empty():
            self.steps.append(self.queue.get())
            self.on_step(self.steps[-1])
        return ended

    def result(self) -> list[TrainingStep]:
        """Wait for the ranks, and return the steps of rank 0."""
        while not self.poll(0.1):
            pass
        return self.steps


def train_rank(rank: int, world_size: int, port: int, config: TrainingConfig, queue: Any) -> None:
    """Train as one rank; rank 0 puts its steps into the queue."""
    interpret_without_gpu()
    device = device_of(rank)
    with join_group(rank, world_size, device, port) as group:
        for step in train(config, group, device):
            if rank == 0:
                queue.put(step)


@contextlib.contextmanager
def join_group(rank: int, world_size: int, device: torch.device, port: int) -> Iterator[Any]:
    """The process group, from when this rank joins until all leave."""
    store, kind = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT), backend(world_size)
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
