"""The kernel option ``invariant``: a row has the same bits on any number of ranks, alone and packed."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.kernels.support.harness import Answer
from tests.multiprocess import ranks
from tritoncp import Mask, causal, create_block_mask, document, flex_attention, full_mask, sliding_window
from tritoncp.core.records import replace
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.bits
LENGTH, BLOCK, DIM, BF16 = 40, 32, 16, torch.bfloat16
AUX = AuxRequest(lse=True, max_scores=True)
TILES = {f"BLOCK_{side}{kernel}": 16 for side in "MN" for kernel in ("", "1", "2")}  # several in a block
# Ranks, schedule and balancer. None: contiguous pieces, which cut blocks and tiles.
WORLDS = [
    (2, "allgather", None), (4, "fetch", None), (4, "ulysses", None), (8, "ulysses", None),
    (8, "allgather", None), (8, "fetch", "ptrr"), (4, "allgather", "head_tail"), (2, "ulysses", "ptrr"),
]  # fmt: skip
MODS: dict[str, Any] = {
    "causal": causal(),
    "documents": causal() & document(lengths=[[28, 12], [12, 28]]),
    "window": sliding_window(20, 7),
    "pairs": lambda b, h, q, kv: (q * 7 + kv * 5) % 11 < 4,
    "everything": None,
}
FIRST: Any = ("causal", WORLDS[4]), ("pairs", WORLDS[0])
CASES = [*FIRST]  # of the others, each mask has half of the worlds in make test-all
for (i, name), (j, world) in product(enumerate(MODS), enumerate(WORLDS)):
    if (name, world) not in FIRST:
        marks = pytest.mark.nightly if (i + j) % 2 else pytest.mark.long
        CASES.append(pytest.param(name, world, marks=marks))


def mask_of(name: str) -> Mask:
    mod = MODS[name]
    if mod is None:
        return full_mask(LENGTH, LENGTH, block=BLOCK)
    return create_block_mask(mod, 2 if name == "documents" else 1, None, LENGTH, LENGTH, BLOCK_SIZE=BLOCK)


def inputs(length: int = LENGTH, batch: int = 1, heads: Any = (2, 1), dtype: Any = BF16) -> list[Tensor]:
    """Draw q, k, v, and gradients of out and lse. heads: of queries and of keys"""
    shapes = [(batch, heads[side], length, DIM) for side in (0, 1, 1, 0)]
    return [torch.randn(shape).to(dtype) for shape in shapes] + [torch.randn(shapes[0][:3])]


def attend(x: list[Tensor], mask: Mask, world: int = 1, schedule: str = "fetch", balancer: str | None = None,
           sinks: Tensor | None = None, **options: Any) -> Answer:  # fmt: skip
    """Attend with the option in a simulated world."""
    simulated = tritoncp.simulate(world)
    plan = simulated.make_plan(mask, schedule=schedule, balancer=balancer)
    leaves = [one.clone().requires_grad_() for one in x[:3]]
    shards = [simulated.shard(t, plan, dim=2, side=side) for t, side in zip(leaves, ("q", "kv", "kv"))]
    outs, aux = simulated.flex_attention(
        *shards, plan, enable_gqa=True, return_aux=AUX, sinks=sinks,
        kernel_options={"invariant": True, **options},
    )  # fmt: skip
    for rank, (*values, lse, top) in enumerate(zip(outs, aux.lse, aux.max_scores)):
        padding = ~plan.for_rank(rank).valid[0]
        assert not any(bool(x[:, :, padding].any()) for x in values)
        stats = [top] if sinks is not None else [lse, top]
        assert all(bool((x[:, :, padding] == -math.inf).all()) for x in stats)
    out, lse, top = (simulated.unshard(parts, plan, dim=2) for parts in (outs, aux.lse, aux.max_scores))
    grads = torch.autograd.grad((out, lse), leaves, (x[3], x[4]))
    return Answer(*(one.detach() for one in (out, lse, top)), *grads)


def same(got: Any, want: Any, count: int) -> None:
    """Compare the bits of the first ``count`` results."""
    for name, a, b in list(zip(Answer._fields, got, want))[:count]:
        assert torch.equal(a, b), f"{name} differs by {float((a - b).abs().max())}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "world"), CASES)
def test_bits_do_not_depend_on_ranks_schedule_and_placement(name: str, world: tuple[int, str, Any]) -> None:
    heads = (4, 4) if world[1] == "ulysses" else (2, 1)
    x, mask = inputs(LENGTH, 2 if name == "documents" else 1, heads), mask_of(name)
    sinks = None if name in ("causal", "window") else torch.randn(heads[0])
    alone, got = (attend(x, mask, *place, sinks=sinks, **TILES) for place in ((), world))
    same(got, alone, 6 if world[1] == "ulysses" and world[0] <= 4 else 4)
    leaves = [one.double().requires_grad_() for one in x[:3]]
    exact = dense_attention(*leaves, mask, sinks=sinks)
    grads = torch.autograd.grad((exact.out, exact.lse), leaves, (x[3].double(), x[4].double()))
    for a, b in zip((got.out, *got[3:]), (exact.out, *grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.03 * float(b.detach().abs().max()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(BF16, {}), pytest.param(BF16, TILES, marks=pytest.mark.long), (torch.float32, TILES)],
)
def test_bits_do_not_depend_on_neighbours(dtype: torch.dtype, options: dict[str, int]) -> None:
    """A document alone, and packed after one that ends with a tile of keys, before another; on one rank and
    on several."""
    tile = options.get("BLOCK_N", BLOCK)
    # Where a tile has hidden keys, interpreted float32 products may round other last digits (exact_dot.py).
    own_lengths = (40, 24) if dtype == BF16 else (48, 32)
    for start, length in zip((tile, 3 * tile), own_lengths):
        lengths = [start, length, 19]
        x = inputs(sum(lengths), dtype=dtype)
        own = [one[:, :, start : start + length] for one in x]
        mask = create_block_mask(causal(), 1, None, length, length, BLOCK_SIZE=BLOCK)
        alone = attend([one.contiguous() for one in own], mask, **options)
        mod = causal() & document(lengths=lengths)
        mask = create_block_mask(mod, 1, None, sum(lengths), sum(lengths), BLOCK_SIZE=BLOCK)
        packed = attend(x, mask, *((1,) if start == tile else (4, "fetch", "ptrr")), **options)
        same([one[:, :, start : start + length] for one in packed], alone, 4)


def rank_bits(group: Any, x: list[Tensor], sinks: Tensor) -> list[list[Tensor]]:
    """Return out, lse and the gradients of calls of one rank, joined."""
    results = []
    for schedule in ("allgather", "ulysses"):
        plan = tritoncp.make_plan(mask_of("causal"), group, schedule=schedule, balancer=None)
        leaves = [tritoncp.shard(one, plan, dim=2).requires_grad_() for one in x[:3]]
        options = {"enable_gqa": True, "return_lse": True, "kernel_options": {"invariant": True, **TILES}}
        out, lse = flex_attention(*leaves, plan, group, sinks=sinks, **options)
        cotangents = [tritoncp.shard(one, plan, dim=2) for one in x[3:]]
        parts = out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, cotangents)
        results.append([tritoncp.unshard(one, plan, group, dim=2) for one in parts])
    return results


@pytest.mark.long
@pytest.mark.interpreted
def test_real_ranks_and_graphs() -> None:
    x, mask, sinks = inputs(heads=(2, 2)), mask_of("causal"), torch.randn(2)
    alone = attend(x, mask, sinks=sinks, **TILES)
    for results in ranks.run(2, rank_bits, x, sinks):
        for (out, lse, *grads), count in zip(results, (4, 6), strict=True):
            same((out, lse, alone.max_scores, *grads), alone, count)
    leaves = [one.clone().requires_grad_() for one in x[:3]]
    fast = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    options = {"enable_gqa": True, "kernel_options": {"invariant": True, **TILES}}
    out, aux = fast(*leaves, mask, return_aux=AUX, sinks=sinks, **options)
    grads = torch.autograd.grad((out, aux.lse), leaves, (x[3], x[4]))
    same((out, aux.lse, aux.max_scores, *grads), alone, 6)


@pytest.mark.long
def test_a_raw_mask_and_a_ring_that_auto_chose_fetch_keys() -> None:
    x, mask, world = inputs(), mask_of("causal"), tritoncp.simulate(4)
    plan = replace(world.make_plan(mask, balancer=None), schedule="ring", handle=None)
    options = {"enable_gqa": True, "kernel_options": {"invariant": True, **TILES}}
    shards = [[part.contiguous() for part in one.chunk(4, 2)] for one in x[:3]]
    for block_mask in (plan, mask):
        outs = world.flex_attention(*shards, block_mask, **options)
        assert torch.equal(torch.cat(outs, 2), flex_attention(*x[:3], mask, **options))


@pytest.mark.usefixtures("cpu_engine")
def test_the_cpu_engine_is_refused() -> None:
    """tests/call/mistakes.toml has the options that kernels refuse."""
    with pytest.raises(ValueError, match="invariant=True on the CPU engine"):
        attend(inputs(), mask_of("causal"))
