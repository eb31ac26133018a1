"""Tests of traffic tables: equal on every rank, and consistent with the dense mask and the hops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import Case
from tests.draws import by_turns
from tests.zoo import BALANCERS
from tritoncp import Mask, Plan, make_plan
from tritoncp.planning.costs import traffic
from tritoncp.planning.placement import row_positions

WORLDS = (1, 3, 5)

NAMES = ("causal", "window", "prefix", "everything", "dilated", "pieces", "bits", "hidden rows")
CASES: dict[str, Callable[[], Mask]] = {
    name: Case((name, 55), batch=2, length=120, kv_length=120, block=32).block_mask
    for name in (*NAMES, "causal documents of rows")
}
CASES["one query a rank"] = Case(("causal", 0), batch=1, length=5, kv_length=5, block=1).block_mask


def plans(name: str, balancer: str | None, world: int) -> list[Plan]:
    plan = make_plan(CASES[name](), world_size=world, rank=0, balancer=balancer)
    return [plan.for_rank(rank) for rank in range(world)]


def dense_visible_blocks(plan: Plan) -> Tensor:
    """Return the listed blocks of this rank's queries, from the dense map: bool [B, KV blocks]."""
    kinds = plan.mask.runs.to_kinds() != 3  # [Bm, Hm, rows, columns]
    positions = plan.positions
    batch = max(len(kinds), len(positions))
    kinds, positions = kinds.any(1).expand(batch, -1, -1), positions.expand(batch, -1)
    rows = [kinds[b, (positions[b][positions[b] >= 0] // plan.mask.q_block).unique()] for b in range(batch)]
    return torch.stack([row.any(0) for row in rows])


@pytest.mark.sample(13)
@pytest.mark.parametrize(("order_and_mask", "world"), by_turns(product(BALANCERS, CASES), WORLDS))
def test_visible_blocks_and_traffic_equal_the_masks(
    order_and_mask: tuple[str | None, str], world: int
) -> None:
    balancer, name = order_and_mask
    all_plans = plans(name, balancer, world)
    for reader in all_plans:
        want = dense_visible_blocks(reader)
        assert torch.equal(reader.derived.visible_blocks[reader.rank], want)
        for owner in all_plans:
            positions = owner.kv.positions(owner.rank)
            real = [
                positions[b % len(positions)][positions[b % len(positions)] >= 0] for b in range(len(want))
            ]
            rows = sum(int(want[b, at // reader.mask.kv_block].sum()) for b, at in enumerate(real))
            assert int(reader.traffic[reader.rank, owner.rank]) == rows
        read = {hop.owner for hop in reader.ring if hop.reads}
        assert read == {reader.rank, *reader.traffic[reader.rank].nonzero()[:, 0].tolist()}


@pytest.mark.sample(11)
@pytest.mark.parametrize(("order_and_mask", "world"), by_turns(product(BALANCERS, CASES), WORLDS))
def test_a_fetch_has_the_visible_remote_blocks_and_no_other(
    order_and_mask: tuple[str | None, str], world: int
) -> None:
    balancer, name = order_and_mask
    all_plans = plans(name, balancer, world)
    for plan in all_plans:
        want, got = dense_visible_blocks(plan), plan.fetch
        batch = len(want) if got.batched else 1
        local = plan.kv.positions(plan.rank)
        positions = row_positions(got.slots, sum(got.takes))
        for b in range(batch):
            own = local[b % len(local)]
            remote = torch.ones(plan.kv.length, dtype=torch.bool)
            remote[own[own >= 0]] = False
            visible = want[b].repeat_interleave(plan.mask.kv_block)[: plan.kv.length] & remote
            present = positions[b % len(positions)]
            assert present[present >= 0].sort().values.tolist() == visible.nonzero()[:, 0].tolist()
        assert list(got.takes) == [other.fetch.sends[plan.rank] for other in all_plans]
        assert got.takes[plan.rank] == 0


@pytest.mark.parametrize("name", CASES)
def test_rows_arrive_where_their_slots_say(name: str) -> None:
    """Send the global position of each row instead of keys."""
    all_plans = plans(name, "ptrr", 3)
    batch = max(len(plan.fetch.slots) for plan in all_plans)
    sent = []
    for plan in all_plans:
        positions = plan.kv.positions(plan.rank)
        rows = positions.expand(batch, -1).flatten() if plan.fetch.batched else positions[0]
        sent.append(rows[plan.fetch.rows].split(list(plan.fetch.sends)))
    for plan in all_plans:
        came = torch.cat([parts[plan.rank] for parts in sent])
        for row in row_positions(plan.fetch.slots, len(came)):
            assert torch.equal(row[row >= 0], came[row >= 0])


READS = st.integers(1, 7).flatmap(
    lambda w: st.lists(st.lists(st.booleans(), min_size=w, max_size=w), min_size=w, max_size=w)
)


@given(READS)
def test_the_ring_brings_keys_to_every_reader_and_gradients_to_every_owner(table: list[list[bool]]) -> None:
    reads = torch.tensor(table)
    world = len(reads)
    route = traffic.ring_route(reads)
    hops = [traffic.ring(reads, rank, route) for rank in range(world)]
    location = list(range(world))  # owner of the K and V at each rank
    gradient: list[set[int] | None] = [None] * world  # ranks that have added to the gradient at each rank
    read = [set() for _ in range(world)]
    home = [set() for _ in range(world)]
    for turn in range(len(hops[0])):
        now = [hop[turn] for hop in hops]
        for rank, hop in enumerate(now):
            assert hop.holds == (location[rank] is not None)
            assert location[rank] in (hop.owner, None)
            if hop.reads:
                read[rank].add(hop.owner)
            if turn and hop.holds:
                gradient[rank] = (gradient[rank] or set()) | ({rank} if hop.reads else set())
        moved: list[int | None] = [None] * world
        followed: list[set[int] | None] = [None] * world
        for rank, hop in enumerate(now):
            if hop.next is not None:
                assert now[hop.next].previous == rank
                moved[hop.next] = location[rank]
            if hop.dkv_to is not None and hop.next is not None:
                assert now[hop.dkv_to].dkv_next == rank
                followed[hop.dkv_to] = gradient[rank]
            elif hop.dkv_to is not None:
                assert hop.dkv_to == hop.owner and now[hop.owner].dkv_home == rank
                home[hop.owner] |= gradient[rank]
        assert sum(hop.previous is not None for hop in now) == sum(hop.next is not None for hop in now)
        takes = sum(peer is not None for hop in now for peer in (hop.dkv_next, hop.dkv_home))
        assert takes == sum(hop.dkv_to is not None for hop in now)
        location, gradient = moved, followed
    for rank in range(world):
        assert read[rank] == {rank} | {owner for owner in range(world) if table[rank][owner]}
        assert home[rank] == {reader for reader in range(world) if table[reader][rank]} - {rank}


def queued_messages(hops: tuple[traffic.Hop, ...]) -> list[set[tuple[int, bool]]]:
    """List a rank's messages in the order in which the ring's backward pass starts them: for each message the
    peers, and whether the rank sends to them."""
    queue = []
    for hop in hops:
        queue.append({(hop.next, True), (hop.previous, False)})
        queue.append({(hop.dkv_to, True), (hop.dkv_next, False), (hop.dkv_home, False)})
    return [
        {(peer, sends) for peer, sends in message if peer is not None}
        for message in queue
        if any(peer is not None for peer, _ in message)
    ]


@given(READS)
def test_one_message_queue_per_rank_never_deadlocks(table: list[list[bool]]) -> None:
    """Simulate ranks: the parts of a message complete, in any order, when the peer is at the matching
    message; a rank starts its next message when all parts are complete."""
    reads = torch.tensor(table)
    route = traffic.ring_route(reads)
    queues = [queued_messages(traffic.ring(reads, rank, route)) for rank in range(len(reads))]
    while any(queues):
        heads = [queue[0] if queue else set() for queue in queues]
        met = [
            (rank, peer)
            for rank, head in enumerate(heads)
            for peer, sends in head
            if sends and (rank, False) in heads[peer]
        ]
        assert met, f"every rank waits: {queues}"
        for rank, peer in met:
            heads[rank].remove((peer, True))
            heads[peer].remove((rank, False))
        queues = [queue[1:] if queue and not queue[0] else queue for queue in queues]
