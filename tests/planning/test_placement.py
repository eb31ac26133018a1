"""Tests of shard, unshard and positions over every kind of placement."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tritoncp
from tests.multiprocess.ranks import run
from tritoncp import Mask, Plan, full_mask
from tritoncp.masks.runs.block_runs import Runs
from tritoncp.planning.build import build
from tritoncp.planning.placement import by_blocks, row_positions


def random_mask(batch: int, rows: int, cut: int, block: int, seed: int) -> Mask:
    """Make a mask of random blocks, whose batch rows have different costs; the last block is ``cut`` tokens
    short."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(1, 4, (batch, 1, rows, rows), generator=g, dtype=torch.uint8)
    length = rows * block - cut
    return Mask(length, length, block, block, Runs.from_kinds(kinds), None, None, None)


@st.composite
def placements(draw: Callable, world: int, length: int) -> Plan:
    """Draw plans of any balancer and block, of common or separate batch rows, or in pieces of any length."""
    block = draw(st.integers(1, 5))
    rows = -(-length // block)
    mask = random_mask(
        draw(st.sampled_from([1, 2])), rows, rows * block - length, block, draw(st.integers(0, 99))
    )
    balancer = draw(st.sampled_from(["ptrr", "head_tail", "contiguous", None, "lengths"]))
    if balancer != "lengths":
        return build(mask, world, balancer=balancer)
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=world - 1, max_size=world - 1)))
    return build(mask, world, balancer=None, lengths=[b - a for a, b in pairwise([0, *cuts, length])])


def plans() -> st.SearchStrategy[Plan]:
    sizes = st.tuples(st.integers(1, 5), st.integers(1, 30))  # ranks, tokens
    return sizes.flatmap(lambda size: placements(*size))


def tensor_for(plan: Plan, dims: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Make a global tensor with distinct values; dims name its shape: "b" batch, "s" sequence, "d" 3."""
    batch = plan.q.slots[0].shape[0]
    shape = [{"b": batch, "s": plan.q.length, "d": 3}[d] for d in dims]
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


# -- where tokens are ---------------------------------------------------------------------------------


@given(plans())
@pytest.mark.bar(13)
def test_every_token_is_on_one_rank_in_order_and_padding_is_last(plan: Plan) -> None:
    everyone = [plan.q.positions(rank) for rank in range(plan.world_size)]
    for row in torch.cat(everyone, 1):
        assert row[row >= 0].sort().values.tolist() == list(range(plan.q.length))
    for rank, rows in enumerate(everyone):
        own = plan.for_rank(rank)
        assert rows.shape[1] == plan.q.lengths[rank] == own.s_local
        assert torch.equal(tritoncp.positions(own), rows) and torch.equal(own.valid, rows >= 0)
        assert plan.q.is_filled(rank) == bool((rows >= 0).all())
        for row in rows:
            real = row[row >= 0]
            assert bool((row[: len(real)] >= 0).all())  # padding last
            assert bool((real.diff() > 0).all())  # by global position
            assert plan.balancer != "natural" or bool((real.diff() == 1).all())


@given(plans())
def test_slots_are_pieces_of_one_block_and_cover_the_rows(plan: Plan) -> None:
    for rank in range(plan.world_size):
        row, position, tokens = plan.q.slots[rank].long().unbind(-1)
        nonempty = tokens > 0
        block = plan.mask.q_block
        assert bool((position // block == (position + tokens - 1) // block)[nonempty].all())
        assert torch.equal(row[nonempty], (tokens.cumsum(1) - tokens)[nonempty])  # one after the other
        assert torch.equal(row_positions(plan.q.slots[rank], plan.q.lengths[rank]), plan.q.positions(rank))


@given(plans())
def test_the_inverse_finds_rows_of_the_gathered_buffer(plan: Plan) -> None:
    everyone = [plan.q.positions(rank) for rank in range(plan.world_size)]
    padded = [torch.nn.functional.pad(rows, (0, plan.q.s_max - rows.shape[1]), value=-1) for rows in everyone]
    buffer = torch.cat(padded, 1)  # global position of each row of the gathered buffer
    want = torch.arange(plan.q.length).expand(buffer.shape[0], -1)
    assert torch.equal(buffer.gather(1, plan.q.inverse), want)
    slots = plan.q.gathered()
    assert torch.equal(row_positions(slots, buffer.shape[1]), buffer)
    if buffer.shape[1] == plan.q.length:  # no padding
        tables = *plan.q.slots, *everyone, plan.q.gathered_positions, plan.q.inverse
        assert plan.q.nbytes == sum(table.nbytes for table in tables)
    used = slots[..., 2] > 0
    assert all(bool((s[u][:, 1].diff() > 0).all()) for s, u in zip(slots, used))  # by global position


def test_blocks_without_slots_have_no_owner() -> None:
    """Rank 0 holds a block of one batch row only."""
    assert by_blocks(8, 4, [[[], [0, 1]], [[0], [1]]]).owners().tolist() == [[1, 1], [0, 1]]


# -- there and back -----------------------------------------------------------------------------------

LAYOUTS = ["bs", "bsd", "sb", "dsb", "bds", "sdb"]


@given(plans(), st.sampled_from(LAYOUTS), st.sampled_from([torch.float64, torch.int64, torch.bool]))
@pytest.mark.bar(13)
def test_unshard_inverts_shard(plan: Plan, dims: str, dtype: torch.dtype) -> None:
    x = tensor_for(plan, dims, dtype)
    world = tritoncp.simulate(plan.world_size)
    for dim, batch_dim in ((dims.index("s"), dims.index("b")), (dims.index("s") - 3, dims.index("b") - 3)):
        if len(dims) == 2 and dim < 0:
            dim, batch_dim = dim + 1, batch_dim + 1
        shards = world.shard(x, plan, dim=dim, batch_dim=batch_dim)
        assert [s.shape[dim] for s in shards] == list(plan.q.lengths)
        assert torch.equal(world.unshard(shards, plan, dim=dim, batch_dim=batch_dim), x)


@given(plans(), st.sampled_from(LAYOUTS))
def test_a_shard_holds_the_rows_at_its_positions_and_padding(plan: Plan, dims: str) -> None:
    x = tensor_for(plan, dims)
    order = dims.index("b"), dims.index("s")
    for rank in range(plan.world_size):
        got = tritoncp.shard(x, plan.for_rank(rank), dim=order[1], batch_dim=order[0], pad=-100)
        got, whole = (t.movedim(order, (0, 1)) for t in (got, x))
        for batch, rows in enumerate(plan.q.positions(rank)):
            assert torch.equal(got[batch][rows >= 0], whole[batch][rows[rows >= 0]])
            assert bool((got[batch][rows < 0] == -100).all())


@given(plans())
def test_a_tensor_without_a_batch_comes_back_with_one_where_rows_differ(plan: Plan) -> None:
    cache = tensor_for(plan, "sd")
    for rank in range(plan.world_size):
        got = tritoncp.shard(cache, plan.for_rank(rank), dim=0, batch_dim=None)
        rows = plan.q.positions(rank)
        assert got.shape == (*rows.shape[len(rows) == 1 :], 3)
        want = torch.where((rows >= 0)[..., None], cache[rows.clamp(min=0)], 0)
        assert torch.equal(got.view_as(want), want)


# -- gradients ----------------------------------------------------------------------------------------


@given(plans(), st.sampled_from(LAYOUTS))
def test_the_backward_of_shard_puts_rows_back_and_zeros_elsewhere(plan: Plan, dims: str) -> None:
    """<shard(x), y> = <x, backward(y)>, and positions of other ranks get zero gradient."""
    x = tensor_for(plan, dims).requires_grad_()
    where = {"dim": dims.index("s"), "batch_dim": dims.index("b")}
    total = torch.zeros_like(x)
    for rank in range(plan.world_size):
        own = plan.for_rank(rank)
        got = tritoncp.shard(x, own, pad=5, **where)
        y = torch.randn_like(got)
        (dx,) = torch.autograd.grad(got, x, y)
        real = tritoncp.shard(torch.ones_like(x), own, **where)
        torch.testing.assert_close((dx * x).sum(), (got * y * real).sum())
        assert torch.equal(tritoncp.shard(dx, own, **where), y * real)
        assert not bool((dx * total).any())
        total += dx


@given(plans())
def test_the_backward_of_unshard_gives_each_shard_its_rows(plan: Plan) -> None:
    world = tritoncp.simulate(plan.world_size)
    x = tensor_for(plan, "bs")
    shards = [s.detach().requires_grad_() for s in world.shard(x, plan, dim=1)]
    whole = world.unshard(shards, plan, dim=1)
    y = torch.randn_like(whole)
    for got, want in zip(torch.autograd.grad(whole, shards, y), world.shard(y, plan, dim=1)):
        assert torch.equal(got, want)


def test_unshard_over_real_ranks() -> None:
    """All ranks get the global tensor; grad="sum" is its adjoint, grad="slice" one rank's slice."""
    plans = build(random_mask(2, 7, 2, 4, 3), 3), build(full_mask(26, 26, block=4), 3, balancer=None)
    x = torch.randn(2, 26, 3, dtype=torch.float64)
    ys = torch.randn(3, 2, 26, 3, dtype=torch.float64)  # rank r's gradient of its copy

    def work(group):
        result = []
        for plan in plans:
            own = plan.for_rank(group.rank())
            for grad in ("sum", "slice"):
                local = tritoncp.shard(x, own, dim=1).requires_grad_()
                whole = tritoncp.unshard(local, own, group, dim=1, grad=grad)
                result.append((whole.detach(), torch.autograd.grad(whole, local, ys[group.rank()])[0]))
        return result

    for rank, result in enumerate(run(3, work)):
        for plan, (summed, sliced) in zip(plans, (result[:2], result[2:])):
            assert torch.equal(summed[0], x) and torch.equal(sliced[0], x)
            own = plan.for_rank(rank)
            torch.testing.assert_close(summed[1], tritoncp.shard(ys.sum(0), own, dim=1))
            assert torch.equal(sliced[1], tritoncp.shard(ys[rank], own, dim=1))
