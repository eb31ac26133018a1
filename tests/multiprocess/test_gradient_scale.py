"""The table of docs/loss_and_gradients.md: each way to reduce gradients, with its factor of the loss, gives
the gradients of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tritoncp
from tests.multiprocess import ranks

SIZE, HEADS, DIM, VOCABULARY = 64, 2, 8, 32
LABELS = (64, 9)  # labels of each text that count: a mean of means would differ
COUNT = sum(LABELS)

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")


class Model(nn.Module):
    """One attention layer, with a learned slope of the score for each head, if wanted."""

    def __init__(self, slopes: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.qkv, self.out = nn.Linear(16, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, 16)
        self.slopes = nn.Parameter(torch.tensor([0.1, 0.2])) if slopes else None

    def forward(self, tokens: Tensor, plan: tritoncp.Plan, mesh: Any) -> Tensor:
        heads = rearrange(self.qkv(self.embed(tokens)), "b s (h qkv d) -> qkv b h s d", qkv=3, d=DIM)
        slopes = self.slopes

        def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score - slopes[h] * (q - kv)

        out = tritoncp.flex_attention(*heads, None if slopes is None else bias, plan, mesh=mesh)
        return self.head(self.out(rearrange(out, "b h s d -> b s (h d)")))


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and labels of all texts, [2, SIZE]."""
    text = torch.randint(VOCABULARY, (2, SIZE + 1), generator=torch.Generator().manual_seed(1))
    labels = text[:, 1:].clone()
    for row, count in enumerate(LABELS):
        labels[row, count:] = -100
    return text[:, :-1], labels


def loss_of(model: Any, rows: slice, mesh: Any, count: float | Tensor = COUNT) -> Tensor:
    """Return this rank's share of the mean loss: its labels' losses over the count of all ranks' labels."""
    tokens, labels = (x[rows] for x in batch())
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE, BLOCK_SIZE=16)
    plan = tritoncp.make_plan(mask, mesh)
    logits = model(tritoncp.shard(tokens, plan, dim=1), plan, mesh)
    labels = tritoncp.shard(labels, plan, dim=1, pad=-100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count


def gradients_of(model: nn.Module) -> list[Tensor]:
    grads = [weight.grad for weight in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def new_model(slopes: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(slopes)


def on_one_rank(slopes: bool = True) -> list[Tensor]:
    model = new_model(slopes)
    loss_of(model, slice(None), None).backward()
    return gradients_of(model)


# -- ways to reduce gradients over 4 ranks, 2 texts (dp) x 2 shards (cp) -----------------------------------


def all_reduced(model: Model, mesh: DeviceMesh, rows: slice) -> None:
    loss_of(model, rows, mesh["cp"]).backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)


def ddp(model: Model, mesh: DeviceMesh, rows: slice) -> None:
    averaged = DistributedDataParallel(model)
    (loss_of(averaged, rows, mesh["cp"]) * 4).backward()


def ddp_accumulates(model: Model, mesh: DeviceMesh, rows: slice) -> None:
    """Each text twice, as two micro-batches: twice the labels."""
    averaged = DistributedDataParallel(model)
    for last in (False, True):
        with contextlib.nullcontext() if last else averaged.no_sync():
            (loss_of(averaged, rows, mesh["cp"], 2 * COUNT) * 4).backward()


def ddp_over_dp_alone(model: Model, mesh: DeviceMesh, rows: slice) -> None:
    averaged = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    (loss_of(averaged, rows, mesh["cp"]) * 2).backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad, group=mesh["cp"].get_group())


def fsdp2(model: Model, mesh: DeviceMesh, rows: slice) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    (loss_of(model, rows, mesh["cp"]) * 4).backward()


def fsdp2_with_replicas(model: Model, mesh: DeviceMesh, rows: slice) -> None:
    fully_shard(model, mesh=mesh["dp", "cp"])
    (loss_of(model, rows, mesh["cp"]) * 4).backward()


def fsdp2_without_mean(model: Model, mesh: DeviceMesh, rows: slice) -> None:
    fully_shard(model, mesh=mesh["dp", "cp"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    loss_of(model, rows, mesh["cp"]).backward()


def trainer(model: Model, mesh: DeviceMesh, rows: slice) -> None:
    """The arithmetic of transformers' Trainer around compute_loss; its get_cp_size() is that of the mesh."""
    averaged = DistributedDataParallel(model)
    count = (batch()[1][rows] != -100).sum()
    dist.all_reduce(count)  # accelerator.gather(...).sum()
    num_items_in_batch = count / mesh["cp"].size()
    loss = loss_of(averaged, rows, mesh["cp"], num_items_in_batch)
    (loss * dist.get_world_size()).backward()


WAYS = [
    all_reduced,
    ddp,
    ddp_accumulates,
    ddp_over_dp_alone,
    fsdp2,
    fsdp2_with_replicas,
    fsdp2_without_mean,
    trainer,
]


def on_four_ranks(group: Any, ways: list[Callable[..., None]]) -> list[list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row = mesh["dp"].get_local_rank()
    results = []
    for reduce in ways:
        model = new_model()
        reduce(model, mesh, slice(row, row + 1))
        results.append(gradients_of(model))
    return results


def check(actual: list[Tensor], expected: list[Tensor], name: str) -> None:
    for a, b in zip(actual, expected, strict=True):
        limit = 3e-6 * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=limit, msg=lambda text: f"{name}: {text}")


@pytest.mark.long
def test_each_reduction_with_its_factor_has_the_gradients_of_one_rank() -> None:
    expected = on_one_rank()
    for results in ranks.run(4, on_four_ranks, WAYS):
        for reduce, gradients in zip(WAYS, results, strict=True):
            check(gradients, expected, reduce.__name__)


# -- tensor parallelism --------------------------------------------------------------------------------------


def with_tensor_parallelism(group: Any) -> list[Tensor]:
    """Compute the gradients on 2 shards (cp) x 2 halves of the heads (tp)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = new_model(slopes=False)
    parallelize_module(model, mesh["tp"], {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
    fully_shard(model, mesh=mesh["cp"])
    (loss_of(model, slice(None), mesh["cp"]) * 2).backward()
    return gradients_of(model)


@pytest.mark.long
def test_tensor_parallel_ranks_do_not_count_in_the_factor() -> None:
    expected = on_one_rank(slopes=False)
    for gradients in ranks.run(4, with_tensor_parallelism):
        check(gradients, expected, "tp")
