"""The kernel option ``invariant`` of calls with selected keys: a row has the same bits on any number of
ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tritoncp import Selection, causal, create_block_mask, document
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.bits
S, BLOCK, DIM = 32, 8, 16
MASK = create_block_mask(causal() & document(lengths=[21, S - 21]), 1, 1, S, S, BLOCK_SIZE=BLOCK)
AUX = AuxRequest(lse=True, max_scores=True)
# (heads of queries, of keys, of the selection, queries of its rows, ranks, schedule, balancer)
CASES = [
    (2, 1, 1, 1, 3, "fetch", "ptrr"),
    (4, 1, 1, 1, 4, "ulysses", None),  # ranks share a KV head: tiles of one query head instead of four
    pytest.param(2, 1, 2, 4, 2, "allgather", None, marks=pytest.mark.long),
    pytest.param(4, 2, 1, 1, 2, "ulysses", "head_tail", marks=pytest.mark.long),
]


def attend(x: list[Tensor], chosen: Selection, world_size: int, schedule: str, balancer: Any) -> list[Tensor]:
    """Return out, lse, max_scores and gradients of a call with the option in a simulated world."""
    world = tritoncp.simulate(world_size)
    plan = world.make_plan(MASK, schedule=schedule, balancer=balancer)
    leaves = [one.clone().requires_grad_() for one in x[:3]]
    shards = [world.shard(one, plan, dim=2) for one in leaves]
    each = chosen.indices.repeat_interleave(chosen.query_block, 2)
    parts = [Selection(one) for one in world.shard(each, plan, dim=2, pad=-1)]
    if world_size == 1:
        parts = [chosen]
    outs, aux = world.flex_attention(
        *shards, plan, enable_gqa=True, selected=parts, return_aux=AUX, kernel_options={"invariant": True}
    )
    out, lse, top = (world.unshard(one, plan, dim=2) for one in (outs, aux.lse, aux.max_scores))
    finite = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out, finite), leaves, (x[3], x[4]))
    return [one.detach() for one in (out, lse, top)] + list(grads)


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "kv_heads", "shares", "height", "world_size", "schedule", "balancer"), CASES
)
def test_bits_do_not_depend_on_ranks_schedule_and_placement(
    heads: int, kv_heads: int, shares: int, height: int, world_size: int, schedule: str, balancer: Any
) -> None:
    g = torch.Generator().manual_seed(heads)
    shapes = [(1, n, S, DIM) for n in (heads, kv_heads, kv_heads, heads)]
    x = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
    x.append(torch.randn(shapes[0][:3], generator=g))
    chosen = Selection(torch.randint(-1, S, (1, shares, S // height, 20), generator=g).int(), 1, height)
    alone, got = attend(x, chosen, 1, "fetch", None), attend(x, chosen, world_size, schedule, balancer)
    whole = 6 if schedule == "ulysses" and heads // world_size % (heads // kv_heads) == 0 else 4
    for name, a, b in list(zip(("out", "lse", "max_scores", "dq", "dk", "dv"), got, alone))[:whole]:
        assert torch.equal(a, b), f"{name} differs by {float((a - b).abs().max())}"
    leaves = [one.double().requires_grad_() for one in x[:3]]
    visible = MASK.to_dense(1, heads) & chosen.to_dense(S).repeat_interleave(heads // shares, 1)
    exact = dense_attention(*leaves, visible)
    finite = exact.lse.masked_fill(exact.lse == -torch.inf, 0)
    grads = torch.autograd.grad((exact.out, finite), leaves, (x[3].double(), x[4].double()))
    for a, b in zip((got[0], *got[3:]), (exact.out, *grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.03 * float(b.detach().abs().max()))
