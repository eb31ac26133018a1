"""The training loop: context parallel with a process group, ordinary training with None; and local processes
as ranks: NCCL with a GPU for each, otherwise gloo."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException
from torch.nn import functional as F

from tritoncp.api.attention import flex_attention
from tritoncp.api.masks import create_block_mask
from tritoncp.api.plans import make_plan
from tritoncp.api.shards import positions, shard
from tritoncp.core.processes import interpret_without_gpu, use_loopback_interface
from tritoncp.demo.corpus import IGNORE, Window, windows
from tritoncp.demo.model import ModelShape, Transformer
from tritoncp.masks.closed_forms import causal, document
from tritoncp.masks.mask_mod import and_masks
from tritoncp.masks.named import alibi

TIMEOUT = timedelta(minutes=5)  # much longer than one step
BLOCKS = 4  # min blocks per rank: with fewer, documents cannot be divided evenly


@dataclass(frozen=True)
class TrainingConfig:
    """Settings that both runs share."""

    seq_len: int = 1024
    steps: int = 12
    learning_rate: float = 3e-3
    shape: ModelShape = field(default_factory=ModelShape)


class TrainingStep(NamedTuple):
    number: int
    loss: float  # mean over the tokens of all ranks
    seconds: float


def plan_documents(
    lengths: list[int], mesh: Any = None, world_size: int | None = None, rank: int | None = None
) -> Any:
    """Make the plan of document-causal attention over one window, balanced over the ranks: the window is
    short, so its blocks are small, at least BLOCKS for each rank where it has so many tokens."""
    size, ranks = sum(lengths), world_size or (1 if mesh is None else mesh.size())
    tokens = min(max(size // (BLOCKS * ranks), 16), 64)
    visible = and_masks(causal(), document(lengths=lengths))
    mask = create_block_mask(visible, 1, 1, size, size, BLOCK_SIZE=1 << tokens.bit_length() - 1)
    return make_plan(mask, mesh, balancer="locality", world_size=world_size, rank=rank)


def bias_of(heads: int, device: torch.device | None = None) -> Any:
    """Return the score_mod of the demo: ALiBi, with a slope for each head."""
    return alibi(2.0 ** -torch.arange(1, heads + 1, device=device))


def train(
    config: TrainingConfig, group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[TrainingStep]:
    """Train and yield each step's number, loss and time. Data, initial weights and order are fixed."""
    torch.manual_seed(0)
    model = Transformer(config.shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    bias = bias_of(config.shape.heads, device)
    for number, text in enumerate(windows(config.seq_len, config.steps), 1):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, text, bias, group)
        loss.backward()
        add_up([p.grad for p in model.parameters() if p.grad is not None], group)
        optimizer.step()
        total = loss.detach()
        add_up([total], group)
        yield TrainingStep(number, total.item(), time.perf_counter() - began)


def loss_of(model: Transformer, text: Window, bias: Any, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part of the mean loss: the sum over its tokens, divided by the number of tokens of
    all ranks."""
    tokens, labels = (x.to(model.embed.weight.device) for x in (text.tokens, text.labels))
    plan = plan_documents(text.lengths, group)
    count = (labels != IGNORE).sum()  # count before sharding, without communication

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, bias, plan, mesh=group, enable_gqa=True)

    x = shard(tokens, plan, dim=1)
    y = shard(labels, plan, dim=1, pad=IGNORE)
    logits = model(x, positions(plan).to(x.device), attend)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum") / count


def add_up(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """All-reduce partial gradients of replicated parameters, in place and in one message."""
    if group is None:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view_as(tensor))


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
    at_end = False
    try:
        while not at_end:
            at_end = context.join(0.1)
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
    """Join the process group in a ``with`` block, which all ranks leave together."""
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
    slower rank, even a barrier."""
    if store.add("tritoncp/leaving", 1) == world_size:
        store.set("tritoncp/left", "all")
    store.wait(["tritoncp/left"], TIMEOUT)
