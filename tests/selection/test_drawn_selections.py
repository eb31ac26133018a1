"""Drawn selections of every kind on every schedule, dtype and grouping of heads, against dense attention, and
bits from run to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tritoncp
from tritoncp import Mask, Selection, causal, create_block_mask, document
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine")
LENGTH = 40
MASKS: dict[str, Any] = {
    "causal": causal(),
    "packed documents": causal() & document(lengths=[17, 1, 22]),
    "everything": lambda b, h, q, kv: q >= 0,
    "pairs": lambda b, h, q, kv: (q * 7 + kv * 5 + b + h) % 11 < 4,
}
KINDS = (
    "random", "none", "all", "one key for all rows", "the same keys in all rows", "adjacent", "past",
    "repeated", "some rows empty",
)  # fmt: skip
# (query heads, KV heads, heads of the selection)
HEADS = [(4, 4, 1), (4, 2, 1), (4, 2, 2), (4, 1, 4), (6, 3, 3), (3, 3, 3)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def draw(kind: str, shape: tuple[int, int, int], blocks: int, g: torch.Generator) -> Tensor:
    """Draw the indices of a selection, with -1 in any place. shape: batch, heads, rows"""
    count = blocks if kind == "all" else 5
    if kind == "one key for all rows":
        index = torch.randint(blocks, (1,), generator=g).expand(*shape, count)
    elif kind == "the same keys in all rows":
        index = torch.randint(blocks, (count,), generator=g).expand(*shape, count)
    elif kind == "all":
        index = torch.rand(*shape, count, generator=g).argsort(-1)
    elif kind == "adjacent":
        index = (torch.randint(blocks, (*shape, 1), generator=g) + torch.arange(count)) % blocks
    elif kind == "past":
        index = torch.arange(shape[2])[:, None] * blocks // shape[2] - torch.arange(count)
        index = index.clamp(min=-1).expand(*shape, count)
    else:
        index = torch.randint(blocks, (*shape, count), generator=g)
    index = index.clone()
    if kind == "repeated":
        index[..., 1::2] = index[..., :-1:2]
    if kind == "some rows empty":
        index[:, :, ::3] = -1
    if kind not in ("all", "one key for all rows"):
        index[torch.rand(index.shape, generator=g) < 0.2] = -1
    return torch.full_like(index, -1) if kind == "none" else index


class Drawn:
    """A call of a simulated world with a drawn selection."""

    def __init__(self, kind: str, mask: str, heads: Any, dtype: torch.dtype, block: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.shares = heads
        of_pairs = mask == "pairs"
        self.mask: Mask = create_block_mask(
            MASKS[mask], 2 if of_pairs else 1, self.heads if of_pairs else 1, LENGTH, LENGTH, BLOCK_SIZE=8
        )
        blocks = -(-LENGTH // block)
        self.chosen = Selection(draw(kind, (2, self.shares, LENGTH), blocks, g), block)
        sizes = (self.heads, 8), (self.kv_heads, 8), (self.kv_heads, 12), (self.heads, 12)
        *tensors, self.grad = (torch.randn(2, n, LENGTH, d, generator=g).to(dtype) for n, d in sizes)
        self.leaves = [x.requires_grad_() for x in tensors]

    def in_world(self, world_size: int, schedule: str, balancer: Any) -> list[Tensor]:
        """Return out and gradients of a world whose shards have different lengths and padding."""
        world = tritoncp.simulate(world_size)
        plan = world.make_plan(self.mask, schedule=schedule, balancer=balancer)
        shards = [world.shard(x, plan, dim=2) for x in self.leaves]
        parts = world.shard(self.chosen.indices, plan, dim=2, pad=-1)
        chosen = [Selection(x, self.chosen.block_size) for x in parts]
        outs = world.flex_attention(*shards, plan, enable_gqa=True, selected=chosen)
        out = world.unshard(outs, plan, dim=2)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]

    def dense(self) -> list[Tensor]:
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        shown = self.chosen.to_dense(LENGTH).repeat_interleave(self.heads // self.shares, 1)
        out = dense_attention(*leaves, self.mask.to_dense(2, self.heads) & shown).out
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad.double())]


DRAWN = st.builds(
    Drawn, st.sampled_from(KINDS), st.sampled_from(sorted(MASKS)), st.sampled_from(HEADS),
    st.sampled_from(sorted(TOLERANCE, key=str)), st.sampled_from([1, 16]), st.integers(0, 2**31),
)  # fmt: skip
SCHEDULES = "allgather", "ring", "fetch", "ulysses", "ulysses+ring"


@pytest.mark.long
@settings(max_examples=20)
@given(
    DRAWN, st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from(SCHEDULES),
    st.sampled_from(["ptrr", "head_tail", None]),
)  # fmt: skip
def test_a_drawn_selection_equals_dense_attention(
    drawn: Drawn, world_size: int, schedule: str, balancer: Any
) -> None:
    got = drawn.in_world(world_size, schedule, balancer)
    limit = TOLERANCE[got[0].dtype]
    for a, b in zip(got, drawn.dense(), strict=True):
        atol = limit * max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a.double(), b, rtol=0, atol=atol)


@settings(max_examples=5)
@given(DRAWN, st.sampled_from(SCHEDULES))
def test_a_drawn_selection_has_equal_bits_in_every_run(drawn: Drawn, schedule: str) -> None:
    first, second = (drawn.in_world(3, schedule, "ptrr") for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("block", [1, 16])
def test_selecting_all_keys_is_the_attention_without_a_selection(block: int) -> None:
    drawn = Drawn("all", "packed documents", (4, 2, 1), torch.float64, block, 0)
    out = tritoncp.flex_attention(*drawn.leaves, drawn.mask, enable_gqa=True)
    want = [out.detach(), *torch.autograd.grad(out, drawn.leaves, drawn.grad)]
    for a, b in zip(drawn.in_world(1, "fetch", None), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
