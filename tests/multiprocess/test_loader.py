"""Plans made in a data loader's worker: they are pickled, and equal plans made in place."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import tritoncp
from tests.multiprocess import ranks
from tritoncp import Plan
from tritoncp.distributed import groups
from tritoncp.reference.dense import dense_attention

F64 = torch.float64
SIZE = 64
PACKED = ([40, 1, 23], [8] * 8, None)  # documents of each step; None: a mask without a closed form


def near_or_first(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A mask_mod without a closed form; at the top of a module, so that it can be pickled."""
    return ((q - kv).abs() < 9) | (kv == 0)


def mask_of(lengths: list[int] | None) -> tritoncp.Mask:
    packed = near_or_first if lengths is None else tritoncp.causal() & tritoncp.document(lengths=lengths)
    return tritoncp.create_block_mask(packed, 1, 1, SIZE, SIZE, BLOCK_SIZE=32)


class Steps(Dataset):
    """A step's plan and the process that made it."""

    def __init__(self, world_size: int, rank: int, schedule: str = "auto") -> None:
        self.world_size, self.rank, self.schedule = world_size, rank, schedule

    def __len__(self) -> int:
        return len(PACKED)

    def __getitem__(self, step: int) -> tuple[Plan, int]:
        mask = mask_of(PACKED[step])
        plan = tritoncp.make_plan(mask, world_size=self.world_size, rank=self.rank, schedule=self.schedule)
        return plan, os.getpid()


def plans_from_a_worker(steps: Steps) -> Iterator[Plan]:
    for (item,) in DataLoader(steps, num_workers=1, collate_fn=lambda batch: batch):
        plan, process = item
        assert process != os.getpid(), "the worker made it"
        yield plan


def qkv(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(1, 1, SIZE, 16, dtype=F64, generator=generator) for _ in range(3)]


def trained(group: Any, schedule: str) -> list[list[Tensor]]:
    """Return output and gradients of every step, with plans from this rank's worker and with plans made
    here."""
    results = []
    for step, plan in enumerate(plans_from_a_worker(Steps(group.size(), group.rank(), schedule))):
        local = tritoncp.make_plan(mask_of(PACKED[step]), group, schedule=schedule)
        assert plan.digest == local.digest and str(plan) == str(local)
        for one in (plan, local):
            shards = [tritoncp.shard(x, one, dim=2).requires_grad_() for x in qkv(step)]
            out = tritoncp.flex_attention(*shards, one, group)
            out.square().sum().backward()
            results.append([tritoncp.unshard(out.detach(), one, group, dim=2), *(x.grad for x in shards)])
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "schedule"), [(1, "auto"), pytest.param(2, "ring", marks=pytest.mark.long), (2, "fetch")]
)
def test_ranks_use_the_plans_of_their_loaders_workers(world_size: int, schedule: str) -> None:
    for answers in ranks.run(world_size, trained, schedule):
        for step, (shipped, local) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
            assert all(map(torch.equal, shipped, local))
            want = dense_attention(*qkv(step), mask_of(PACKED[step])).out
            torch.testing.assert_close(shipped[0], want, atol=1e-8, rtol=1e-8)


def compiled(group: Any) -> tuple[bool, list[Tensor]]:
    """Whether a compiled forward pass connected the communicator of the data; output and gradients."""
    (plan,) = list(plans_from_a_worker(Steps(2, group.rank(), "ring")))[:1]
    attend = torch.compile(tritoncp.flex_attention, backend="aot_eager", fullgraph=True)
    shards = [tritoncp.shard(x, plan, dim=2).requires_grad_() for x in qkv(0)]
    with mock.patch.object(groups, "connect_data") as connect:
        out = attend(*shards, plan, group)
    connected = connect.call_args_list == [mock.call(group, torch.device("cpu"))]
    out.square().sum().backward()
    return connected, [
        tritoncp.unshard(x.detach(), plan, group, dim=2) for x in (out, *(x.grad for x in shards))
    ]


@pytest.mark.long
def test_a_compiled_ring_uses_a_plan_of_a_loaders_worker() -> None:
    x = [t.requires_grad_() for t in qkv(0)]
    out = dense_attention(*x, mask_of(PACKED[0])).out
    want = out.detach(), *torch.autograd.grad(out.square().sum(), x)
    for connected, result in ranks.run(2, compiled):
        assert connected, "no backward pass is the first to make a communicator"
        for a, b in zip(result, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


def test_a_pickled_plan_of_a_long_sequence_is_small() -> None:
    """A pickled plan takes twelve bytes a token and a little for the blocks, cached tables or not."""
    size = 1 << 20
    packed = tritoncp.and_masks(tritoncp.causal(), tritoncp.document(lengths=[size // 64] * 64))
    mask = tritoncp.create_block_mask(packed, 1, 1, size, size)
    plan = tritoncp.make_plan(mask, world_size=64, rank=3, schedule="fetch")
    fresh = pickle.dumps(plan)
    str(plan), plan.tables("cpu", 1, 1), plan.fetch, plan.q.inverse, plan.positions
    text = pickle.dumps(plan)
    loaded = pickle.loads(text)
    assert len(text) == len(fresh) < 12 * size + 2**20
    assert loaded.digest == plan.digest and loaded.q is loaded.kv


def test_a_plan_is_passed_to_a_process_in_few_files() -> None:
    """A worker passes every tensor in a separate file, and a process may have about a thousand open."""
    mask = mask_of(PACKED[0])
    counts = []
    for world_size in (2, 90):
        before = len(os.listdir("/proc/self/fd"))
        plan = tritoncp.make_plan(mask, world_size=world_size, rank=0)
        buffer = ForkingPickler.dumps(plan)
        counts.append(len(os.listdir("/proc/self/fd")) - before)
        del buffer
    assert max(counts) < 20
