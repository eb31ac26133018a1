"""Tests of the engines for selected keys, the CPU engine and interpreted kernels: every schedule, against
float64 attention with the pairs that are both selected and shown by the mask."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tritoncp import causal, create_block_mask, make_plan
from tritoncp.call import call_mods
from tritoncp.call.engine_factory import kernel_mods
from tritoncp.cpu.engine import CpuEngine
from tritoncp.distributed import collectives
from tritoncp.distributed.schedules import schedule_of
from tritoncp.kernels.engine import TritonEngine
from tritoncp.planning.placement import take
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.reference.dense import dense_attention
from tritoncp.selection.cpu_engine import SelectedCpuEngine
from tritoncp.selection.selection import Selection
from tritoncp.selection.triton_engine import SelectedTritonEngine
from tritoncp.selection.visible import VisiblePairs

F64 = torch.float64
LENGTHS = {1: 20, 16: 34}  # by block_size: three blocks of the mask, the last one ragged
ENDS = torch.tensor([34, 13])


def padded(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv < ENDS[b]) & (kv <= q + h)


MASKS: dict[str, Any] = {
    "causal": lambda n, block: create_block_mask(causal(), 1, 1, n, n, BLOCK_SIZE=block),
    "a mask_mod of b and h": lambda n, block: create_block_mask(
        padded, 2, 4, n, n, BLOCK_SIZE=(block, 2 * block)
    ),
}


def draw(shape: tuple[int, ...], count: int, blocks: int, g: torch.Generator) -> Tensor:
    """Draw indices with repeated ones, -1 in any place, and rows without any."""
    indices = torch.randint(-1, blocks, (*shape, count), generator=g)
    indices[..., 1::5, :] = -1
    indices[..., 2::7, :] = indices[..., 2::7, :1]
    return indices.int()


ON_CPU = [  # (block_size, query_block, heads of the selection, ranks, schedule)
    *itertools.product([1, 16], [1, 8], [1, 2, 4], [1], ["allgather"]),
    *itertools.product([1], [1, 8], [2], [3], ["allgather", "ring", "fetch"]),
    *itertools.product([1], [1, 8], [1, 2, 4], [3], ["ulysses"]),
    *itertools.product([16], [8], [1, 2], [6], ["ulysses", "ulysses+ring"]),
]
CASES = [  # an engine and a mask before these
    *(("cpu", mask, *case) for mask, case in zip(itertools.cycle(MASKS), ON_CPU)),
    ("triton", "causal", 1, 8, 1, 6, "ulysses+ring"),
    ("triton", "causal", 16, 8, 2, 3, "ulysses"),
    ("triton", "causal", 1, 1, 1, 1, "allgather"),
    ("triton", "a mask_mod of b and h", 16, 8, 1, 2, "fetch"),
    ("triton", "causal", 16, 8, 2, 3, "allgather"),
    *(
        pytest.param("triton", *case, marks=pytest.mark.long)
        for case in (
            ("a mask_mod of b and h", 1, 1, 1, 3, "ulysses"),
            ("a mask_mod of b and h", 1, 1, 2, 1, "allgather"),
            ("a mask_mod of b and h", 16, 8, 1, 3, "ring"),
            ("causal", 16, 8, 4, 3, "fetch"),
        )
    ),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "mask_name", "block_size", "query_block", "shares", "world_size", "schedule"), CASES
)
def test_attention_to_selected_keys_equals_dense_attention(
    kind: str, mask_name: str, block_size: int, query_block: int, shares: int, world_size: int, schedule: str
) -> None:
    g = torch.Generator().manual_seed(5)
    length = LENGTHS[block_size]
    mask = MASKS[mask_name](length, max(block_size, 8))
    q, k, v, dout = (
        torch.randn(2, heads, length, d, generator=g, dtype=F64).requires_grad_()
        for heads, d in ((4, 8), (2, 8), (2, 12), (4, 12))
    )
    bias = torch.randn(4, generator=g, dtype=F64) / length

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + bias[h] * (q_idx - kv_idx)

    plans = [
        make_plan(mask, world_size=world_size, rank=rank, schedule=schedule) for rank in range(world_size)
    ]
    shown = torch.zeros(2, shares, length, length, dtype=torch.bool)
    engines = []
    for plan in plans:
        at = plan.positions
        count = -(-at.shape[1] // query_block)
        chosen = Selection(draw((2, shares, count), 6, -(-length // block_size), g), block_size, query_block)
        dense = chosen.to_dense(length, at.shape[1])
        for b, places in enumerate(at.expand(2, -1)):
            shown[b, :, places[places >= 0]] = dense[b, :, places >= 0]
        rows = SelectedRows(chosen.unique().indices, block_size, query_block, at, 4, 2, shares)
        selected = rows, VisiblePairs(mask, mask.mask_mod)
        if kind == "cpu":
            engine = CpuEngine(8**-0.5, mask.mask_mod, lambda leaves: score, (), ())
            engines.append(SelectedCpuEngine(engine, *selected))
        else:
            mod, captured = call_mods.translate_score(score, F64, q.device)
            triton = TritonEngine(kernel_mods(None, mod, mod.caps(captured)), 8**-0.5)
            engines.append(SelectedTritonEngine(triton, *selected))
    visible = mask.to_dense(2, 4) & shown.repeat_interleave(4 // shares, 1)
    want = dense_attention(q, k, v, visible, score)
    grads = torch.autograd.grad(want.out, (q, k, v), dout)

    shards = [[_shard(x.detach(), plan) for x in (q, k, v, dout)] for plan in plans]
    passes = [
        schedule_of(plan, False).forward(plan, engine, *shard[:3], True)
        for plan, engine, shard in zip(plans, engines, shards)
    ]
    results = collectives.lockstep(passes)
    backward = []
    for plan, engine, shard, (out, lse, top) in zip(plans, engines, shards, results):
        for x, whole, empty in (
            (out, want.out, 0),
            (lse, want.lse, -torch.inf),
            (top, want.max_scores, -torch.inf),
        ):
            torch.testing.assert_close(x, take(whole, plan.positions, 2, 0, empty), rtol=0, atol=1e-12)
        delta = torch.empty_like(lse)
        engine.delta(out, shard[3], None, delta)()
        backward.append(schedule_of(plan, False).backward(plan, engine, *shard, lse, delta))
    for plan, found in zip(plans, collectives.lockstep(backward)):
        for x, whole in zip(found, grads, strict=True):
            torch.testing.assert_close(x, take(whole, plan.positions, 2, 0, 0), rtol=0, atol=1e-11)


def _shard(x: Tensor, plan: Any) -> Tensor:
    """Return the rank's rows of a tensor, with NaN in the rows of padding."""
    return take(x, plan.positions, 2, 0, torch.nan)
