"""Tests of masks of block diffusion and of draft models, and of the places of their keys."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tritoncp
from tests.draws import few
from tritoncp import block_diffusion, create_block_mask, draft_blocks
from tritoncp.planning.plan import Plan
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine")
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(sum)


def documents_of(lengths: list[int]) -> list[tuple[int, int]]:
    """List (first token of its document, place in it) of each token."""
    starts = [0, *accumulate(lengths)]
    return [(first, i) for first, length in zip(starts, lengths) for i in range(length)]


@given(LENGTHS, st.integers(1, 6), st.integers(1, 5))
def test_block_diffusion_shows_the_text_before_a_block_and_the_block(lengths, block: int, size: int) -> None:
    tokens = documents_of(lengths)
    n = len(tokens)
    expected = torch.zeros(2 * n, 2 * n, dtype=torch.bool)
    for q, (document, place) in enumerate(tokens):
        for kv, (other, other_place) in enumerate(tokens):
            if document == other:
                mine, its = place // block, other_place // block
                expected[q, kv] = its <= mine
                expected[n + q, kv] = its < mine
                expected[n + q, n + kv] = its == mine
    mask = create_block_mask(block_diffusion(lengths, block), 1, 1, 2 * n, 2 * n, BLOCK_SIZE=size)
    assert torch.equal(mask.to_dense()[0, 0], expected)
    if len(lengths) == 1:
        index = torch.arange(2 * n)
        assert torch.equal(block_diffusion(n, block)(None, None, index[:, None], index), expected)


@st.composite
def drafts(draw) -> tuple[list[int], list[int], int]:
    """Draw lengths of documents, anchors in any order, and tokens of a block."""
    lengths = draw(LENGTHS)
    anchors = draw(st.lists(st.integers(0, sum(lengths)), min_size=1, max_size=6))
    return lengths, anchors, draw(st.integers(1, 5))


@given(drafts(), st.integers(1, 5))
def test_a_draft_sees_the_document_before_its_anchor_and_itself(case, size: int) -> None:
    lengths, anchors, block = case
    tokens = documents_of(lengths)
    n, rows = len(tokens), len(anchors) * block
    expected = torch.zeros(rows, n + rows, dtype=torch.bool)
    for q in range(rows):
        anchor = anchors[q // block]
        for kv in range(anchor):
            expected[q, kv] = tokens[kv][0] == tokens[anchor - 1][0]
        for kv in range(rows):
            expected[q, n + kv] = kv // block == q // block
    mod = draft_blocks(anchors, block, context=lengths)
    mask = create_block_mask(mod, 1, 1, rows, n + rows, BLOCK_SIZE=size)
    assert torch.equal(mask.to_dense()[0, 0], expected)
    if len(lengths) == 1:
        alone = draft_blocks(torch.tensor(anchors), block, context=n)
        assert torch.equal(alone(None, None, torch.arange(rows)[:, None], torch.arange(n + rows)), expected)


@few(2)
@given(drafts(), st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_anchors_of_batch_rows_are_those_of_each_row_alone(case, size: int, world: int, random) -> None:
    """Keys of drafts are with their queries in every row."""
    lengths, anchors, block = case
    n, count = sum(lengths), len(anchors) * block
    table = [anchors, [random.randint(0, n) for _ in anchors]]
    mods = [draft_blocks(x, block, context=lengths) for x in (table, *table)]
    mask, *rows = (create_block_mask(mod, mod.batch, 1, count, n + count, BLOCK_SIZE=size) for mod in mods)
    assert mods[0].reads == (True, False)
    assert torch.equal(mask.to_dense(), torch.cat([row.to_dense() for row in rows]))
    plan = tritoncp.make_plan(mask, world_size=world)
    for rank in range(world):
        queries, keys = plan.for_rank(rank).positions, plan.kv.positions(rank)
        for row in range(2):
            own, held = (x[min(row, len(x) - 1)] for x in (queries, keys))
            assert sorted(held[held >= n].tolist()) == sorted((own[own >= 0] + n).tolist())


def remote_keys(plan: Plan, first: int) -> Tensor:
    """Count, for each rank, the keys from ``first`` on that its queries see and that another rank has."""
    visible = plan.mask.to_dense()[0, 0]
    counts = []
    for rank in range(plan.world_size):
        queries, keys = plan.for_rank(rank).positions[0], plan.kv.positions(rank)[0]
        seen = visible[queries[queries >= 0]].any(0)
        seen[keys[keys >= 0]] = False
        counts.append(int(seen[first:].sum()))
    return torch.tensor(counts)


@given(drafts(), st.integers(1, 5), st.integers(1, 5), st.sampled_from([*tritoncp.balancers]))
def test_keys_of_drafts_are_where_their_queries_are(case, size: int, world: int, balancer: str) -> None:
    """This holds also if a draft is in two blocks of queries: then both parts are with their queries."""
    lengths, anchors, block = case
    n, rows = sum(lengths), len(anchors) * block
    mask = create_block_mask(
        draft_blocks(anchors, block, context=lengths), 1, 1, rows, n + rows, BLOCK_SIZE=size
    )
    plan = tritoncp.make_plan(mask, world_size=world, balancer=balancer)
    found = []
    for rank in range(world):
        queries, keys = plan.for_rank(rank).positions[0], plan.kv.positions(rank)[0]
        assert sorted(keys[keys >= n].tolist()) == sorted((queries[queries >= 0] + n).tolist())
        assert (keys[: int((keys >= 0).sum())] >= 0).all()  # padding last
        found += keys[keys >= 0].tolist()
    assert sorted(found) == list(range(n + rows))


@pytest.mark.parametrize("balancer", ["ptrr", "lpt", "locality"])
def test_a_draft_model_of_128_anchors_sends_no_key_of_a_draft(balancer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randperm(4096, generator=generator)[:128].sort().values
    mask = create_block_mask(draft_blocks(anchors, 16, context=4096), 1, 1, 2048, 6144)
    plan = tritoncp.make_plan(mask, world_size=4, balancer=balancer, schedule="fetch")
    assert remote_keys(plan, 4096).tolist() == [0] * 4
    assert plan.imbalance <= 1.05 and set(plan.kv.lengths) == {1536}
    assert int(plan.traffic.clone().fill_diagonal_(0).sum()) <= 3 * 4096


def test_block_diffusion_on_eight_ranks_sends_no_corrupted_key() -> None:
    """They send at most half the rows of a full gather."""
    mask = create_block_mask(block_diffusion(4096, 32), 1, 1, 8192, 8192)
    for balancer, share in (("ptrr", 0.48), ("locality", 0.40)):
        plan = tritoncp.make_plan(mask, world_size=8, balancer=balancer, schedule="fetch")
        assert remote_keys(plan, 4096).tolist() == [0] * 8
        assert plan.imbalance <= 1.02
        assert int(plan.traffic.clone().fill_diagonal_(0).sum()) <= share * 7 * 8192


@pytest.mark.long
@given(drafts(), st.integers(2, 4), st.sampled_from(["allgather", "ring", "fetch", "ulysses"]), st.booleans())
@settings(max_examples=15)
def test_drafts_attend_as_dense_attention(case, size: int, schedule: str, of_rows: bool) -> None:
    lengths, anchors, block = case
    n, rows = sum(lengths), len(anchors) * block
    places = [anchors, [n - x for x in anchors]] if of_rows else anchors
    mod = draft_blocks(places, block, context=lengths)
    mask = create_block_mask(mod, mod.batch, 1, rows, n + rows, BLOCK_SIZE=4)
    world = tritoncp.simulate(size)
    plan = world.make_plan(mask, schedule=schedule)
    q = torch.randn(2, 4, rows, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 4, n + rows, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    shards = [world.shard(q, plan, dim=2)]
    shards += [world.shard(x, plan, dim=2, side="kv") for x in (k, v)]
    out = world.unshard(world.flex_attention(*shards, None, plan), plan, dim=2)
    expected = dense_attention(q, k, v, mask).out
    torch.testing.assert_close(out, expected, atol=1e-8, rtol=1e-8)
    cotangent = torch.randn_like(out)
    grads = (torch.autograd.grad(x, (q, k, v), cotangent) for x in (out, expected))
    torch.testing.assert_close(*grads, atol=1e-8, rtol=1e-8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_new_anchors_compile_nothing(shape: tuple[int, ...]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(tritoncp.flex_attention, backend=counter, fullgraph=True)
    q, k = torch.randn(len(shape), 2, 64, 16), torch.randn(len(shape), 2, 192, 16)
    for seed in range(4):
        anchors = torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(seed))
        mask = create_block_mask(draft_blocks(anchors, 16, context=128), len(q), 1, 64, 192)
        expected = dense_attention(q.double(), k.double(), k.double(), mask).out
        torch.testing.assert_close(attend(q, k, k, mask).double(), expected, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


ERRORS = [
    (lambda: block_diffusion(8, 0), "block_diffusion: block=0; a number of tokens is needed"),
    (lambda: block_diffusion([8, -1], 2), r"block_diffusion: length must be integers \[n\] of at least 0"),
    (lambda: draft_blocks([3], 1.5, context=8), "draft_blocks: block=1.5; a number of tokens"),
    (lambda: draft_blocks([9], 2, context=8), "anchor 9 is outside of a text of 8 tokens"),
    (lambda: draft_blocks([0.5], 2, context=8), r"draft_blocks: anchors must be integers \[n\] or \[B, n\]"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_wrong_numbers_raise_with_the_remedy(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
