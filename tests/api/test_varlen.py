"""Tests of packed attention: real ranks, Megatron's order, and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tritoncp
from tests.masks.packed_documents import AUX, LAYOUTS, Answer, agree, buffers, cumulative, one_by_one
from tests.multiprocess import ranks
from tritoncp import contiguous_to_dual_chunk, dual_chunk_to_contiguous, varlen_attention, varlen_mask
from tritoncp.api import varlen
from tritoncp.distributed import collectives
from tritoncp.planning.placement import pieces

pytestmark = pytest.mark.usefixtures("cpu_engine")

# -- Megatron's order -----------------------------------------------------------------------------------


@st.composite
def chunked(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Draw a number of ranks, and document lengths that 2 W divides."""
    world = draw(st.integers(1, 5))
    return world, [2 * world * n for n in draw(st.lists(st.integers(0, 4), max_size=5))]


def rows_of_rank(rank: int, world: int, lengths: list[int]) -> list[int]:
    """Return the rows of each rank in dual-chunk order: of each document chunk r, then chunk 2 W - 1 - r."""
    rows, start = [], 0
    for length in lengths:
        chunk = length // (2 * world)
        for number in (rank, 2 * world - 1 - rank):
            rows += range(start + number * chunk, start + (number + 1) * chunk)
        start += length
    return rows


@given(chunked())
def test_dual_chunk_order_is_the_loop_over_documents(case) -> None:
    world, lengths = case
    want = [rows_of_rank(rank, world, lengths) for rank in range(world)]
    placement = varlen.dual_chunk_placement(cumulative(lengths), world)
    assert [placement.positions(rank)[0].tolist() for rank in range(world)] == want


@given(chunked(), st.integers(0, 2))
def test_dual_chunks_converted_back_are_the_same_rows(case, dim: int) -> None:
    world, lengths = case
    total, edges = sum(lengths), cumulative(lengths)
    x = torch.arange(total * 6).view(total, 2, 3).movedim(0, dim)
    dual = contiguous_to_dual_chunk(x, edges, world_size=world, dim=dim)
    order = [row for rank in range(world) for row in rows_of_rank(rank, world, lengths)]
    assert torch.equal(dual, x.index_select(dim, torch.tensor(order, dtype=torch.int64)))
    assert torch.equal(dual_chunk_to_contiguous(dual, edges, world_size=world, dim=dim), x)


def test_the_order_is_copied_from_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    monkeypatch.setattr(varlen, "to_host", lambda tensors: copies.append(1) or [t.clone() for t in tensors])
    edges, x = cumulative([4, 8]), torch.arange(12)
    for _ in range(3):
        first = contiguous_to_dual_chunk(x, edges, world_size=2)
    assert copies == [1]
    edges[1] = 8  # an edit is seen, and so is another tensor
    assert not torch.equal(contiguous_to_dual_chunk(x, edges, world_size=2), first)
    assert torch.equal(contiguous_to_dual_chunk(x, cumulative([4, 8]), world_size=2), first)
    assert copies == [1] * 3
    with torch.inference_mode():  # inference tensors do not count edits
        edges = cumulative([4, 8])
        assert torch.equal(contiguous_to_dual_chunk(x, edges, world_size=2), first)
        edges[1] = 8
        assert not torch.equal(contiguous_to_dual_chunk(x, edges, world_size=2), first)


# -- real ranks -----------------------------------------------------------------------------------------


def one_rank(group: Any, docs: Any, how: str) -> Answer:
    """Run this rank's part of a layer; return all results in the order of the buffer."""
    torch.manual_seed(3)
    x = buffers(docs)
    rank, n = group.rank(), group.size()
    sides = ("q", "kv", "kv", "q", "q")
    args = {"causal": True, "window": (9, -1)}
    if how == "plan":
        plan = tritoncp.make_plan(varlen_mask(**docs.arguments, **args, BLOCK_SIZE=16), group)
        shards = [
            tritoncp.shard(t, plan, dim=0, side=s, batch_dim=None, pad=math.nan) for t, s in zip(x, sides)
        ]
        call = {"cu_seqlens_q": plan}
    else:
        shards = [t.split(pieces(len(t), n))[rank] for t in x]
        call = {**docs.arguments, **args}
    leaves = [t.detach().requires_grad_() for t in shards[:3]]
    out, aux = varlen_attention(*leaves, mesh=group, return_aux=AUX, **call)
    grads = torch.autograd.grad([out, aux.lse], leaves, shards[3:])
    result = [out.detach(), aux.lse.detach(), aux.max_scores, *grads]
    back = []
    for t, side in zip(result, ("q", "q", "q", "q", "kv", "kv")):
        if how == "plan":
            back.append(tritoncp.unshard(t, plan, group, dim=0, side=side, batch_dim=None))
        else:
            back.append(torch.cat(gathered(t.contiguous(), group)))
    if how == "plan":
        for t in back[1:3]:
            t[~plan.mask.tokens[0]] = -math.inf  # unshard leaves zeros where no rank holds anything
    return Answer(*back)


def gathered(x: Tensor, group: Any) -> list[Tensor]:
    lengths = [row[0] for row in collectives.exchange([len(x)], group)]
    parts = [x.new_empty(length, *x.shape[1:]) for length in lengths]
    for source, part in enumerate(parts):
        if source == group.rank():
            part.copy_(x)
        torch.distributed.broadcast(part, source, group=group)
    return parts


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["pieces", "plan"])
@pytest.mark.parametrize("layout", ["padded", "cross"])
def test_two_processes_have_the_results_of_one(layout: str, how: str) -> None:
    docs = LAYOUTS[layout]
    torch.manual_seed(3)
    want = one_by_one(buffers(docs), docs, True, (9, -1))
    for got in ranks.run(2, one_rank, docs, how):
        agree(got, want, docs, 1e-8)


def dual_rank(group: Any, edges: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a rank of Megatron: convert its shard, attend, convert back; return the result and the gradient."""
    rank, n = group.rank(), group.size()
    own = contiguous_to_dual_chunk(x, edges, world_size=n).chunk(n)[rank].requires_grad_()
    piece = dual_chunk_to_contiguous(own, edges, group)
    assert torch.equal(piece, x.chunk(n)[rank])
    out = varlen_attention(piece, piece, piece, edges, mesh=group, causal=True)
    home = contiguous_to_dual_chunk(out, edges, group)
    (home**2).sum().backward()
    return torch.stack(gathered(home.detach(), group)), torch.stack(gathered(own.grad, group)), edges


def test_dual_chunk_shards_of_two_processes() -> None:
    edges = cumulative([8, 0, 24, 4])
    x = torch.randn(36, 2, 8, dtype=torch.float64, requires_grad=True)
    out = varlen_attention(x, x, x, edges, causal=True)
    (grad,) = torch.autograd.grad((out**2).sum(), x)
    for outs, grads, _ in ranks.run(2, dual_rank, edges, x.detach()):
        back = [dual_chunk_to_contiguous(t.flatten(0, 1), edges, world_size=2) for t in (outs, grads)]
        for got, want in zip(back, (out, grad)):
            torch.testing.assert_close(got, want.detach(), atol=1e-8, rtol=0)


def mistaken(group: Any) -> str:
    edges = cumulative([5, 8] if group.rank() else [5, 7])
    x = torch.randn(6, 2, 16)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        varlen_attention(x, x, x, edges, mesh=group, causal=True)
    return str(caught.value)


def test_one_ranks_mistake_is_raised_on_every_rank() -> None:
    other, guilty = ranks.run(2, mistaken)
    assert "cu_seqlens_q accounts for 13 rows, the buffer has 12 on all ranks together" in guilty
    assert "rank 1" in other and "cu_seqlens_q accounts for 13 rows" in other
