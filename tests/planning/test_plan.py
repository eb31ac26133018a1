"""Tests of plans: work, bytes, tables; derived from the mask alone, equal on every rank."""

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tritoncp
from tritoncp import Mask, Plan, and_masks, causal, create_block_mask, document, sliding_window
from tritoncp.core.records import replace
from tritoncp.distributed.schedules import SCHEDULES
from tritoncp.masks import ABSENT, Kind, Runs
from tritoncp.masks.runs.transposed_runs import transpose
from tritoncp.planning.build import build
from tritoncp.planning.placement import by_blocks, row_positions, sort_by_position
from tritoncp.planning.step_tables import slot_runs
from tritoncp.planning.work import MASKED_BLOCK_COST

BALANCERS = ["ptrr", "head_tail", "contiguous", None]


@st.composite
def masks(draw: Callable) -> Mask:
    """Draw masks of all kinds of blocks, with ragged ends, one or more batch rows and heads."""
    q_block, kv_block = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    rows, cols = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    batch, heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    q_len, kv_len = (n * b - draw(st.integers(0, b - 1)) for n, b in ((rows, q_block), (cols, kv_block)))
    if draw(st.booleans()):  # square, so that keys are placed with queries
        kv_len, cols = q_len, -(-q_len // kv_block)
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    kinds = torch.randint(0, 3, (batch, heads, rows, cols), generator=g, dtype=torch.uint8)
    kinds[kinds == 2] = ABSENT
    cut = (torch.arange(1, rows + 1) * q_block > q_len)[:, None]
    cut = cut | (torch.arange(1, cols + 1) * kv_block > kv_len)
    kinds[(kinds == Kind.FULL) & cut] = int(Kind.BOUNDED)
    return Mask(q_len, kv_len, q_block, kv_block, Runs.from_kinds(kinds), hide_all, None, None)


def hide_all(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A mask_mod that hides every pair."""
    return q < 0


@st.composite
def lengths_of(draw: Callable, total: int, world_size: int) -> list[int]:
    """Draw the lengths of the ranks' pieces of a sequence."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=world_size - 1, max_size=world_size - 1)))
    return [end - start for start, end in pairwise([0, *cuts, total])]


@st.composite
def plans(draw: Callable) -> Plan:
    mask, world = draw(masks()), draw(st.integers(1, 5))
    rank, balancer = draw(st.integers(0, world - 1)), draw(st.sampled_from(BALANCERS))
    if balancer is not None:
        return build(mask, world, rank, balancer=balancer)
    lengths = draw(lengths_of(mask.q_len, world))
    kv_lengths = None if mask.q_len == mask.kv_len else draw(lengths_of(mask.kv_len, world))
    return build(mask, world, rank, balancer=None, lengths=lengths, kv_lengths=kv_lengths)


# -- work ---------------------------------------------------------------------------------------------


@given(masks(), st.integers(1, 5))
def test_work_sums_to_the_listed_blocks_of_the_mask(mask: Mask, world_size: int) -> None:
    masked, full = mask.runs.counts()
    tokens = torch.tensor([min(mask.q_block, mask.q_len - i) for i in range(0, mask.q_len, mask.q_block)])
    want = float(((MASKED_BLOCK_COST * masked + full).sum((0, 1)) * tokens).sum()) / mask.q_block
    for balancer in BALANCERS:
        plan = build(mask, world_size, balancer=balancer)
        # A placement that batch rows share does the work of all rows; a placement per row does the row's
        # work.
        assert sum(plan.work) == pytest.approx(want)
        assert len(plan.work) == world_size
        assert plan.imbalance == pytest.approx(max(plan.work) * world_size / want if want else 1)


# -- placement ----------------------------------------------------------------------------------------


@given(plans())
def test_each_query_and_key_is_placed_once(plan: Plan) -> None:
    for placement, length in ((plan.q, plan.mask.q_len), (plan.kv, plan.mask.kv_len)):
        assert placement.length == length and placement.world_size == plan.world_size
        positions = torch.cat([placement.positions(rank) for rank in range(plan.world_size)], 1)
        for row in positions:
            assert row[row >= 0].sort().values.tolist() == list(range(length))


@given(plans())
def test_owners_hold_the_first_token_of_their_blocks(plan: Plan) -> None:
    for rank, batch in product(range(plan.world_size), range(plan.owners.shape[0])):
        own = (plan.owners[batch] == rank).nonzero()[:, 0] * plan.mask.q_block
        assert set(own.tolist()) <= set(plan.q.positions(rank)[batch].tolist())


@given(plans())
def test_keys_lie_where_queries_do_when_both_are_the_same_tokens(plan: Plan) -> None:
    """In self-attention q, k and v come from one shard, even if query and key blocks differ in size."""
    if plan.mask.q_len != plan.mask.kv_len:
        return
    assert plan.q.lengths == plan.kv.lengths
    for rank in range(plan.world_size):
        assert torch.equal(plan.q.positions(rank), plan.kv.positions(rank))
        position, tokens = plan.kv.slots[rank][..., 1:].long().unbind(-1)
        inside = position // plan.mask.kv_block == (position + tokens - 1) // plan.mask.kv_block
        assert bool(inside[tokens > 0].all())


# -- tables -------------------------------------------------------------------------------------------


@given(plans())
def test_tables_list_the_blocks_of_the_mask_wherever_they_lie(plan: Plan) -> None:
    """Spread over positions, the runs of a step give the global kinds of every (query, key) pair."""
    mask, tables = plan.mask, plan.tables("cpu", 1, 1)
    rows = Runs(tables.row_ptr, tables.row_runs, tables.kv_slots.shape[1])
    assert transpose(rows) == Runs(tables.col_ptr, tables.col_runs, tables.q_slots.shape[1])
    kinds = rows.to_kinds()
    whole = mask.runs.to_kinds()
    for b, (i, q_slot) in product(range(kinds.shape[0]), enumerate(tables.q_slots[0])):
        q_slot = tables.q_slots[b % tables.q_slots.shape[0], i]
        for j in range(tables.kv_slots.shape[1]):
            kv_slot = tables.kv_slots[b % tables.kv_slots.shape[0], j]
            got = kinds[b, :, i, j]
            if q_slot[2] == 0 or kv_slot[2] == 0:
                assert bool((got == ABSENT).all())
                continue
            want = whole[b % mask.B, :, q_slot[1] // mask.q_block, kv_slot[1] // mask.kv_block].clone()
            if q_slot[2] < mask.q_block or kv_slot[2] < mask.kv_block:  # full only where slots are whole
                want[want == Kind.FULL] = int(Kind.BOUNDED)
            assert torch.equal(got, want)


@given(plans())
def test_tables_locate_every_row(plan: Plan) -> None:
    tables = plan.tables("cpu", 1, 1)
    assert torch.equal(row_positions(tables.q_slots, plan.s_local), plan.positions)
    everyone = [plan.kv.positions(rank) for rank in range(plan.world_size)]
    padded = [torch.nn.functional.pad(x, (0, plan.kv.s_max - x.shape[1]), value=-1) for x in everyone]
    assert torch.equal(row_positions(tables.kv_slots, plan.world_size * plan.kv.s_max), torch.cat(padded, 1))
    for slots, dense, ends, first, block in (
        (tables.q_slots, tables.dense_q, tables.q_ends, tables.q_first, plan.mask.q_block),
        (tables.kv_slots, tables.dense_kv, tables.kv_ends, tables.kv_first, plan.mask.kv_block),
    ):
        total = slots[..., 2].sum(1, keepdim=True).expand(slots.shape[:2])
        listed = [(*slot, rows) for slot, rows in zip(slots.flatten(0, 1).tolist(), total.flatten().tolist())]
        in_order = [
            (i * block, first + i * block, min(block, rows - i * block))
            for i, (*_, rows) in enumerate(listed)
        ]
        assert dense == (
            slots.shape[0] == 1 and len(listed) > 0 and in_order == [tuple(x[:3]) for x in listed]
        )
        cut = [row + tokens == rows for row, _, tokens, rows in listed if tokens not in (0, block)]
        assert ends == ("block" if not cut else "buffer" if all(cut) else "anywhere")


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 9), st.sampled_from(BALANCERS))
def test_local_intervals_equal_the_visible_keys_of_each_row(
    world: int, length: int, block: int, balancer: str
) -> None:
    mod = and_masks(causal(), document(ids=torch.arange(length) // 5))
    mask = create_block_mask(mod, None, None, length, length, BLOCK_SIZE=block)
    dense = mask.to_dense()[0, 0]
    for rank in range(world):
        plan = build(mask, world, rank, balancer=balancer)
        tables, at = plan.tables("cpu", 1, 1), torch.arange(length)
        for row, position in enumerate(plan.positions[0].tolist()):
            if position >= 0:
                visible = (at >= tables.lo[0, 0, row]) & (at < tables.hi[0, 0, row])
                assert torch.equal(visible, dense[position])


@given(plans())
def test_slots_without_tokens_list_no_blocks(plan: Plan) -> None:
    """Where batch rows have more or fewer slots, empty slots come last."""
    q, kv = (sort_by_position(torch.cat(side.slots, 1)[-1:]) for side in (plan.q, plan.kv))
    half_q, half_kv = q.shape[1] // 2, kv.shape[1] // 2
    fewer = [slots.clone() for slots in (q, kv)]
    fewer[0][:, half_q:], fewer[1][:, half_kv:] = 0, 0
    want = slot_runs(plan.mask, q, kv).to_kinds()[-1]
    want[:, half_q:], want[..., half_kv:] = ABSENT, ABSENT
    got = slot_runs(plan.mask, *map(torch.cat, zip((q, kv), fewer, strict=True))).to_kinds()
    assert torch.equal(got[-1], want)


def test_pairs_with_a_part_of_a_block_need_bounds() -> None:
    """The first of two ranks ends inside the third block of queries and of keys."""
    runs = build(tritoncp.full_mask(20, 20, block=4), 2, balancer=None).derived.runs(0, "gathered")
    whole = torch.tensor([[4, 4, 2]]).T * torch.tensor([4, 4, 2, 2, 4, 4]) == 16
    assert torch.equal(runs.to_kinds()[0, 0], torch.where(whole, int(Kind.FULL), int(Kind.BOUNDED)).byte())


def test_windows_need_no_tables_only_where_positions_are_in_order() -> None:
    mask = create_block_mask(sliding_window(9, 4), None, None, 64, 64, BLOCK_SIZE=8)
    assert build(mask).tables("cpu", 1, 1).window == (9, 4)
    assert build(mask, 4, 2, balancer=None).tables("cpu", 1, 1).window == (9, 4)
    assert build(mask, 4, 2, balancer=None).tables("cpu", 1, 1).q_first == 32
    assert build(mask, 4, balancer="ptrr").tables("cpu", 1, 1).window is None
    lone = [create_block_mask(causal(), None, None, 1, keys) for keys in (1, 2)]  # see step_tables.py
    assert [build(one).tables("cpu", 1, 1).window for one in lone] == [None, (None, 0)]
    padded = build(mask, 2, balancer=None, lengths=[30, 34])  # padding between shards
    assert padded.tables("cpu", 1, 1).window is None
    idle = by_blocks(64, 8, [[[], range(8)], [[0], range(1, 8)]])  # rank 0 has an empty slot in the first row
    assert not replace(build(mask, 2), q=idle, kv=idle).batch_rows(0, 1).tables("cpu", 1, 1).dense_q
    unbounded = create_block_mask(causal(), None, None, 64, 64, BLOCK_SIZE=8)
    assert build(unbounded).tables("cpu", 1, 1).window == (None, 0)


# -- one plan for everyone ----------------------------------------------------------------------------


@pytest.mark.parametrize("digest", [b"", b"of the mask"])
def test_plans_of_other_blocks_owners_or_schedules_have_another_identity(digest: bytes) -> None:
    mods = {b"one": causal(), b"other": sliding_window(9, 4)}
    pairs = set()
    for (name, mod), balancer, schedule in product(mods.items(), BALANCERS, SCHEDULES):
        mask = create_block_mask(mod, None, None, 64, 64, BLOCK_SIZE=8)
        plan = replace(
            build(mask, 4, balancer=balancer, schedule=schedule), mask_digest=digest and digest + name
        )
        pairs.add(((name, *plan.owners[0].tolist(), schedule), plan.identity))
    assert len(pairs) == len({identity for _, identity in pairs})


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("balancer", [None, "ptrr"])
def test_parts_of_a_plan_have_different_identities_equal_on_every_rank(
    balancer: str | None, world_size: int
) -> None:
    mask = create_block_mask(lambda b, h, q, kv: q >= kv + h, 1, 2, 64, 64, BLOCK_SIZE=8)

    def identities(rank: int) -> list[Any]:
        plan = replace(build(mask, world_size, rank, balancer=balancer), mask_digest=b"of the mask")
        parts = [plan.part(1, 2, keys=keys) for keys in (None, 2)] + [plan.part(0, 2)]
        parts += [plan.of_heads(0, 1), plan.of_heads(1, 1), plan.of_sdpa(True), plan.of_sdpa(False)]
        return [part.identity for part in (plan, *parts)]

    of_ranks = list(map(identities, range(world_size)))
    assert of_ranks == [of_ranks[0]] * world_size and len(set(of_ranks[0])) == len(of_ranks[0])


def test_as_many_ranks_exchange_heads_as_divide_the_world_and_have_one_each() -> None:
    mask = create_block_mask(causal(), None, None, 64, 64, BLOCK_SIZE=8)
    degrees = {(1, 1): 1, (4, 1): 1, (4, 3): 2, (4, 4): 4, (4, 9): 4, (5, 4): 1, (6, 5): 3}
    got = {sizes: build(mask, sizes[0], schedule="ulysses").degree_for(sizes[1]) for sizes in degrees}
    assert got == degrees
    assert replace(build(mask, 4, schedule="ulysses"), degree=2).degree_for(2) == 2


@pytest.mark.long
@given(plans())
def test_every_rank_derives_the_same_plan(plan: Plan) -> None:
    for rank in range(plan.world_size):
        sides: dict[str, Any] = {"balancer": plan.balancer}
        if plan.balancer == "natural":
            sides = {"balancer": None, "lengths": plan.q.lengths, "kv_lengths": plan.kv.lengths}
        other_view = build(plan.mask, plan.world_size, rank, **sides)
        own = plan.for_rank(rank)
        assert own.rank == rank and own.work == other_view.work
        for name, value in vars(own.tables("cpu", 1, 1)).items():
            other = getattr(other_view.tables("cpu", 1, 1), name)
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, name


@pytest.mark.parametrize("world_size", [1, 3, 64])
def test_the_repr_of_a_plan_is_a_line_without_tensors(world_size: int) -> None:
    mask = create_block_mask(document(lengths=[300, 212]), None, None, 512, 512, BLOCK_SIZE=8)
    plan = tritoncp.make_plan({"a": mask}, world_size=world_size)["a"]
    for text in (repr(plan), repr(plan.part(0, 2)), repr(plan.q)):
        assert "tensor" not in text and "\n" not in text and len(text) < 400
    assert f"rank=0 of {world_size}, s_local={plan.s_local}" in repr(plan)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))], ids=["copied", "pickled"]
)
def test_plans_are_copied_and_pickled(clone: Callable[[Plan], Plan]) -> None:
    mask = create_block_mask(
        and_masks(causal(), document(lengths=[20, 28])), None, None, 48, 48, BLOCK_SIZE=16
    )
    plan = tritoncp.make_plan(mask, world_size=2, rank=1)
    x = torch.randn(1, 1, 48, 16)
    world = tritoncp.simulate(2)
    shards = world.shard(x, plan, dim=2)
    want = world.flex_attention(shards, shards, shards, plan)
    other = clone(plan)
    assert str(other) == str(plan) and repr(other) == repr(plan) and other.rank == 1
    assert other.q.order_is_read
    for a, b in zip(world.flex_attention(shards, shards, shards, other), want):
        assert torch.equal(a, b)
