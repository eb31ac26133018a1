"""Ranks and turns that a dry run takes, so that a thousand ranks cost no more than a few."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.planning.costs.layer import Shape
from tritoncp.planning.costs.message_bytes import trade_heads
from tritoncp.planning.costs.traffic import Hop
from tritoncp.planning.plan import Plan

MAX_KINDS = 16  # of ranks, by their lengths and heads


def ranks_to_measure(plan: Plan, shape: Shape) -> list[int]:
    """Choose ranks that include the one with the max memory in a forward pass, and in a backward pass.

    What a rank allocates follows from its lengths, from its heads, and from the rows that it sends and
    receives. At any moment the buffers that are alive are one of the sums of :class:`Loads`, so that for
    each sum the rank with the max is taken, among ranks with equal lengths and heads. Where lengths or
    heads differ in more than 16 ways, as where each rank has another length, 16 of these are taken.
    """
    loads = loads_of(plan, shape)
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, kind in enumerate(loads.kinds):
        members.setdefault(kind, []).append(rank)
    kinds = list(members.values())
    largest = (loads.sums[ranks].argmax(0).unique() for ranks in kinds[:: -(-len(kinds) // MAX_KINDS)])
    return [ranks[i] for ranks, places in zip(kinds, largest) for i in places.tolist()]


class Loads(NamedTuple):
    """What the memory of each rank follows from: its lengths and heads, and sums that it grows with, int64
    [W, n]."""

    kinds: Sequence[tuple[int, ...]]
    sums: Tensor


def loads_of(plan: Plan, shape: Shape) -> Loads:
    """Return the loads of all ranks under the plan's schedule."""
    lengths = list(zip(plan.q.lengths, plan.kv.lengths, strict=True))
    if plan.is_local or plan.schedule == "allgather":
        return Loads(lengths, torch.zeros(plan.world_size, 1, dtype=torch.int64))
    if plan.schedule == "ring":
        return Loads(lengths, _ring_sums(plan))
    if plan.schedule == "fetch":
        return Loads(lengths, _fetch_sums(plan, shape))
    rows, q_heads, kv_heads, _ = trade_heads(plan, shape)
    between, degree = loads_of(rows, shape), len(q_heads)
    places = [(len(q), len(kv)) for q, kv in zip(q_heads, kv_heads, strict=True)] * rows.world_size
    kinds = [
        own + place + between.kinds[rank // degree] for rank, (own, place) in enumerate(zip(lengths, places))
    ]
    return Loads(kinds, between.sums.repeat_interleave(degree, 0))


def _fetch_sums(plan: Plan, shape: Shape) -> Tensor:
    """Sum the rows that each rank sends, those that it fetches and the largest part that returns to it, in
    every way in which they can be alive: rows in the layer's dtype, their gradients in float32 (float64 for
    float64 tensors), both or neither, and the part in float32."""
    remote = plan.traffic.clone().fill_diagonal_(0)
    item, wide = shape.itemsize, max(4, shape.itemsize)
    alive = 0, item, wide, item + wide
    weights = torch.tensor(list(itertools.product(alive, alive, (0, wide))))
    return torch.stack([remote.sum(0), remote.sum(1), remote.amax(0)], 1) @ weights[1:].T


def _ring_sums(plan: Plan) -> Tensor:
    """Count the buffers that each rank has at the beginning, and when its gradient comes home: int64 [W, 5].

    In turn t a rank has up to two buffers of keys, the one that it holds and the one that it receives, and
    as many gradients. Keys come for turn t if those of the owner t ranks before travel that far. If two come
    one after the other to any rank, they do to one in turns 1 and 2. One gradient more comes home in the turn
    in which the rank's keys have been at their last reader, and is there in the next turn too. Only where a
    rank holds keys does a step expand latents.
    """
    step, reach = plan.derived.ring_route
    ranks = torch.arange(plan.world_size)

    def comes(turn: Tensor) -> Tensor:
        """Whether keys come to each rank for a turn."""
        return (reach[(ranks - step * turn) % plan.world_size] >= turn).long()

    first = torch.ones_like(ranks)
    now, then, later = (comes(turn) * (reach > 0) for turn in (reach, reach + 1, reach + 2))
    return torch.stack(
        [
            comes(first),
            comes(first) + comes(first + 1),
            comes(first) * (1 + comes(first + 1)),
            torch.maximum(now + then, then + later),
            torch.maximum(now * (1 + then), then * (1 + later)),
        ],
        1,
    )


def differing_turns(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """Drop turns of a ring in which nothing is allocated that was not before; a turn reads the keys it holds.

    What a turn allocates follows from the messages of this turn and of the two before it. Where such messages
    come a second time, and all that came in between had come before, the ring goes on from the first time.
    """
    numbers: dict[tuple[bool, ...], int] = {}
    kinds = [numbers.setdefault(_messages(hop), len(numbers)) for hop in hops]
    seen: set[tuple[int, ...]] = set()
    kept: list[Hop] = []
    tail: list[tuple[int, ...]] = []  # messages of the turns that are kept from the last new ones on
    for turn, hop in enumerate(hops):
        window = tuple(kinds[max(0, turn - 2) : turn + 1])
        if window in tail:
            dropped = len(tail) - 1 - tail.index(window)
            del tail[len(tail) - dropped :], kept[len(kept) - dropped :]
            continue
        tail = [*tail, window] if window in seen else [window]
        seen.add(window)
        kept.append(hop._replace(reads=hop.holds))
    return tuple(kept)


def _messages(hop: Hop) -> tuple[bool, ...]:
    """Return which messages a hop has, and whether it holds keys."""
    peers = hop.next, hop.previous, hop.dkv_to, hop.dkv_next, hop.dkv_home
    return hop.holds, *(peer is not None for peer in peers)
