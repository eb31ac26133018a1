"""Training in local processes, as the ranks of a process group: NCCL with a GPU for each, otherwise gloo."""

import contextlib
from collections.abc import Iterator
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
    """Raised if a rank raised or died, with its error; all other ranks were stopped."""


def device_of(rank: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")


def backend(world_size: int) -> str:
    """Return the backend: "nccl" if there is a GPU for every rank, else "gloo"."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


def train_on_ranks(config: TrainingConfig, world_size: int) -> Iterator[TrainingStep]:
    """Train in ``world_size`` processes, and yield the steps of rank 0. Raises RankFailed for the first
    failure. At the end, or when the iterator is closed, all processes have ended."""
    use_loopback_interface()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = mp.get_context("spawn").SimpleQueue()  # CUDA cannot follow a fork
    arguments = world_size, store.port, config, queue
    context = mp.start_processes(train_rank, arguments, world_size, join=False, daemon=True)
    ended = False
    try:
        while not ended:
            ended = context.join(0.1)
            while not queue.empty():
                yield queue.get()
    except ProcessException as error:
        raise RankFailed(f"rank {error.error_index} of {world_size} failed: {error}") from error
    finally:
        for process in context.processes:
            process.kill()
            process.join()


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
    """Context of the process group, which all ranks leave together."""
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
    """Wait for all ranks, by the store: a rank that disconnects early can break the last collective of a
    slower one, even if that is a barrier."""
    if store.add("tritoncp/leaving", 1) == world_size:
        store.set("tritoncp/left", "all")
    store.wait(["tritoncp/left"], TIMEOUT)
