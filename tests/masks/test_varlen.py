"""Packed documents: intervals against loops, attention against one document at a time, orders and their
inverses."""

from __future__ import annotations

import math

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tritoncp
from tests.cases import pairs
from tests.masks.packed_documents import (
    AUX,
    F64,
    LAYOUTS,
    NAN,
    Answer,
    Docs,
    Packed,
    agree,
    buffers,
    cumulative,
    one_by_one,
    whole,
    whole_call,
)
from tritoncp import simulate, varlen_attention, varlen_mask
from tritoncp.masks.varlen import Varlen
from tritoncp.reference.dense import dense_attention

# -- cu_seqlens and what they say -----------------------------------------------------------------------


@st.composite
def documents(draw: st.DrawFn) -> Docs:
    n = draw(st.integers(0, 5))
    lengths, pads = (
        st.lists(st.integers(0, 7), min_size=n, max_size=n),
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
    )
    q = draw(lengths)
    return Docs(q, draw(st.one_of(st.just(q), lengths)), draw(pads), draw(pads))


SIDE = st.integers(-1, 6)


@given(documents(), st.booleans(), st.tuples(SIDE, SIDE))
def test_intervals_the_mask_mod_and_blocks_are_the_loop_over_documents(docs, causal, window) -> None:
    want, (q_len, kv_len) = whole(docs, causal, window), docs.lengths
    mask = varlen_mask(**docs.arguments, causal=causal, window=window, BLOCK_SIZE=4)
    assert (mask.q_len, mask.kv_len) == docs.lengths
    assert torch.equal(mask.to_dense()[0, 0], want)
    mod = mask.mask_mod
    assert isinstance(mod, Varlen)
    lo, hi = mod.intervals(q_len, kv_len)
    cols = torch.arange(kv_len)
    assert torch.equal((cols >= lo[0, 0, :, None]) & (cols < hi[0, 0, :, None]), want)
    assert not lo[lo == hi].any()  # empty rows are (0, 0)
    zero = torch.tensor(0)
    if want.numel():
        assert torch.equal(mod(zero, zero, torch.arange(q_len)[:, None], cols), want)
    held = docs.is_token() if mask.tokens is None else mask.tokens
    assert all(map(torch.equal, held, docs.is_token()))
    assert (mask.tokens is None) == all(bool(side.all()) for side in docs.is_token())
    if mask.tokens is not None and q_len > 4:
        assert all(map(torch.equal, mask.rows(4, q_len).tokens, (held[0][4:], held[1])))


def test_torch_builds_the_same_mask_from_the_mask_mod() -> None:
    from torch.nn.attention import flex_attention as flex

    docs = Docs([5, 0, 13], [9, 4, 2], [3, 0, 3], [0, 1, 0])
    mask = varlen_mask(**docs.arguments, causal=True, window=(6, -1), BLOCK_SIZE=8)
    theirs = flex.create_block_mask(mask.mask_mod, None, None, *docs.lengths, device="cpu", BLOCK_SIZE=8)
    assert torch.equal(tritoncp.from_block_mask(theirs).to_dense(), mask.to_dense())
    assert all(map(torch.equal, tritoncp.from_block_mask(mask.to_block_mask()).tokens, mask.tokens))


def test_a_million_tokens_in_ten_thousand_documents() -> None:
    """There is no loop over documents, and no tensor of the size of the dense mask."""
    tokens = torch.randint(0, 200, (10_000,), generator=torch.Generator().manual_seed(1))
    rows = (tokens + 15) // 16 * 16
    mask = varlen_mask(
        cumulative(tokens.tolist()), causal=True, cu_seqlens_q_padded=cumulative(rows.tolist())
    )
    assert mask.tokens is not None and int(mask.tokens[0].sum()) == int(tokens.sum())
    assert mask.interval is not None
    lo, hi = mask.interval
    assert int((hi - lo).long().sum()) == int((tokens * (tokens + 1) // 2).sum())


# -- attention against one document at a time -----------------------------------------------------------


def in_a_world(x: Packed, plan: tritoncp.Plan) -> Answer:
    """Every rank's shard of the plan as a separate leaf, with NaN in its padding."""
    world = simulate(plan.world_size)
    sides = ("q", "kv", "kv", "q", "q")
    shards = [world.shard(t, plan, dim=0, side=side, batch_dim=None, pad=NAN) for t, side in zip(x, sides)]
    leaves = [[t.detach().requires_grad_() for t in tensors] for tensors in shards[:3]]
    heads_first = [[rearrange(t, "t h d -> 1 h t d") for t in tensors] for tensors in leaves]
    outs, aux = world.flex_attention(*heads_first, plan, enable_gqa=True, return_aux=AUX)
    down = [[rearrange(t, "t h ... -> 1 h t ...") for t in tensors] for tensors in shards[3:]]
    flat = [t for tensors in leaves for t in tensors]
    grads = torch.autograd.grad([*outs, *aux.lse], flat, [*down[0], *down[1]])
    n = plan.world_size
    rows = [
        [rearrange(t, "1 h t ... -> t h ...") for t in tensors] for tensors in (outs, aux.lse, aux.max_scores)
    ]
    rows += [grads[:n], grads[n : 2 * n], grads[2 * n :]]
    for tensors, side in zip(rows, ("q", "q", "q", "q", "kv", "kv")):
        for rank, t in enumerate(tensors):
            placed = plan.q if side == "q" else plan.kv
            padding = t[placed.positions(rank)[0] < 0]
            assert bool(((padding == 0) | (padding == -math.inf)).all())
    back = [
        world.unshard([t.detach() for t in tensors], plan, dim=0, side=side, batch_dim=None)
        for tensors, side in zip(rows, ("q", "q", "q", "q", "kv", "kv"))
    ]
    if plan.mask.tokens is not None:
        for t in back[1:3]:
            t[~plan.mask.tokens[0]] = -math.inf  # unshard leaves zeros where no rank holds anything
    return Answer(*back)


WINDOWS = {"all": (-1, -1), "left": (6, 0), "both": (5, 3), "right": (-1, 2)}
FACTORS = {
    "layout": list(LAYOUTS),
    "causal": [True, False],
    "window": list(WINDOWS),
    "world": [1, 2, 3, 5],
    "balancer": [None, "ptrr"],
    "schedule": ["allgather", "ring", "fetch"],
}
ROWS = [tuple(row.values()) for row in pairs(FACTORS)]


@pytest.mark.sample(6)
@pytest.mark.parametrize(tuple(FACTORS), ROWS, ids=lambda value: str(value))
@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.bar(15)
def test_any_world_is_one_document_at_a_time(layout, causal, window, world, balancer, schedule) -> None:
    docs, sides = LAYOUTS[layout], WINDOWS[window]
    mask = varlen_mask(**docs.arguments, causal=causal, window=sides, BLOCK_SIZE=8)
    x = buffers(docs)
    plan = simulate(world).make_plan(mask, balancer=balancer, schedule=schedule)
    agree(in_a_world(x, plan), one_by_one(x, docs, causal, sides), docs, 1e-8)


@pytest.mark.sample(5)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("cpu_engine")
def test_the_public_call(layout: str, causal: bool) -> None:
    """With cu_seqlens, with a mask and with a plan in their place."""
    docs, x = LAYOUTS[layout], buffers(LAYOUTS[layout])
    mask = varlen_mask(**docs.arguments, causal=causal, window=(9, -1), BLOCK_SIZE=16)
    want = one_by_one(x, docs, causal, (9, -1))
    agree(whole_call(x, **docs.arguments, causal=causal, window=(9, -1)), want, docs, 1e-8)
    agree(whole_call(x, mask), want, docs, 1e-8)
    agree(whole_call(x, tritoncp.make_plan(mask)), want, docs, 1e-8)


@pytest.mark.long
def test_cross_attention_on_the_kernels() -> None:
    docs = LAYOUTS["cross"]
    x = buffers(docs, dtype=torch.float32)
    want = one_by_one(x, docs, True, (9, 4))
    agree(whole_call(x, **docs.arguments, causal=True, window=(9, 4)), want, docs, 1e-5, 1e-5)


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=str)
@pytest.mark.bar(3)
def test_no_rows_at_all(lengths: list[int]) -> None:
    x = torch.zeros(0, 2, 16, requires_grad=True)
    out = varlen_attention(x, x, x, cumulative(lengths), causal=True)
    assert out.shape == (0, 2, 16)
    out.sum().backward()


@pytest.mark.bar(6)
def test_nothing_but_padding() -> None:
    x = torch.full((6, 2, 16), NAN, requires_grad=True)
    out = varlen_attention(x, x, x, cumulative([0]), causal=True, cu_seqlens_q_padded=cumulative([6]))
    (grad,) = torch.autograd.grad(out, x, torch.full_like(out, NAN))
    assert not out.any() and not grad.any()


# -- plans ----------------------------------------------------------------------------------------------


def test_a_balanced_plan_holds_no_padding() -> None:
    """Shards close up: rows are the tokens of a rank's blocks, and only the shortest shards have padding."""
    docs = Docs([100, 30], [100, 30], [28, 98], [28, 98])
    plan = tritoncp.make_plan(varlen_mask(**docs.arguments, causal=True, BLOCK_SIZE=16), world_size=4)
    held = [plan.q.positions(rank)[0] for rank in range(4)]
    tokens = torch.cat([at[at >= 0] for at in held])
    assert torch.equal(tokens.sort().values, docs.is_token()[0].nonzero()[:, 0])
    assert {len(at) for at in held} == {max(int((at >= 0).sum()) for at in held)}
    for at in held:
        real = at[at >= 0]
        assert torch.equal(at[: len(real)], real) and bool((real.diff() > 0).all())
    assert -1 in plan.owners and "·" in str(plan)  # blocks of nothing but padding


def test_no_padding_is_fetched() -> None:
    mask = varlen_mask(cumulative([60]), causal=False, cu_seqlens_q_padded=cumulative([128]), BLOCK_SIZE=16)
    plan = tritoncp.make_plan(mask, world_size=4, balancer=None, schedule="fetch")
    assert [sum(plan.for_rank(rank).fetch.takes) for rank in range(4)] == [28, 32, 0, 0]


def test_layers_with_other_windows_share_a_placement() -> None:
    docs = LAYOUTS["padded"]
    masks = {
        name: varlen_mask(**docs.arguments, causal=True, window=window, BLOCK_SIZE=8)
        for name, window in (("full", (-1, -1)), ("near", (4, 0)))
    }
    plans = tritoncp.make_plan(masks, world_size=3)
    assert torch.equal(plans["full"].positions, plans["near"].positions)
    other = varlen_mask(cumulative([66]), causal=True, BLOCK_SIZE=8)
    with pytest.raises(ValueError, match="padding in different places"):
        tritoncp.make_plan(masks | {"other": other}, world_size=3)


@pytest.mark.usefixtures("cpu_engine")
def test_a_call_with_the_same_tensors_copies_nothing(host_copies: list[int]) -> None:
    """As on a GPU: one copy to the host when the plan is made, none once it is there."""
    docs = LAYOUTS["padded"]
    x, tensors = buffers(docs), docs.arguments
    want = one_by_one(x, docs, True, (-1, -1))
    for _ in range(3):
        agree(whole_call(x, **tensors, causal=True), want, docs, 1e-8)
    assert host_copies == [4]
    tensors["cu_seqlens_q"][1] -= 1  # an edit is seen
    tensors["cu_seqlens_kv"][1] -= 1
    other = docs._replace(q=[8, 1, 30, 13], kv=[8, 1, 30, 13], q_pad=[8, 1, 2, 3], kv_pad=[8, 1, 2, 3])
    x = buffers(other)
    agree(whole_call(x, **tensors, causal=True), one_by_one(x, other, True, (-1, -1)), other, 1e-8)
    assert host_copies == [4, 4]


@pytest.mark.usefixtures("cpu_engine")
def test_scores_scale_and_sinks_go_through() -> None:
    """Results equal flex_attention on the same rows; score_mod gets places in the buffer."""
    docs = LAYOUTS["packed"]
    x, sinks = buffers(docs), torch.randn(4, dtype=F64)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + (h + 1) * (q - 2 * kv) / 50

    got, lse = varlen_attention(
        *x[:3], **docs.arguments, causal=True, score_mod=score, scale=0.3, sinks=sinks, return_lse=True
    )
    q, k, v = (rearrange(t, "t h d -> 1 h t d") for t in x[:3])
    seen = whole(docs, True, (-1, -1))
    out, bare, _ = dense_attention(q, k, v, seen[None, None], score, scale=0.3)
    torch.testing.assert_close(lse, torch.logaddexp(bare, sinks[:, None])[0].T, atol=1e-10, rtol=0)
    share = torch.sigmoid(bare - sinks[:, None])[..., None]
    torch.testing.assert_close(got, rearrange(out * share, "1 h t e -> t h e"), atol=1e-10, rtol=0)


@pytest.mark.usefixtures("cpu_engine")
def test_one_graph_serves_other_lengths() -> None:
    x = torch.randn(12, 2, 16)

    def layer(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return varlen_attention(x, x, x, cu_seqlens, causal=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in ([5, 7], [11, 1], [0, 12]):
        assert torch.equal(compiled(x, cumulative(lengths)), layer(x, cumulative(lengths)))
