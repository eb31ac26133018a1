"""Traffic between ranks: rows of keys that ranks read from each other, steps of a ring, rows of a fetch.

The tables follow from the mask and the two placements, so every rank derives the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.masks.mask import Mask
from tritoncp.masks.runs.block_runs import ramps
from tritoncp.planning.placement import Placement, sort_by_position

HEAD_GROUPS = 2  # one group is gathered while the other is computed; more groups would have smaller messages
SMALL = 1 << 20  # bytes of a rank's K and V below which the latency of a second message exceeds its overlap


def count_queries(mask: Mask, q: Placement, ranks: Sequence[int]) -> Tensor:
    """Count the queries of each rank that see a KV block, over all heads: int64 [ranks, Bn, KV blocks]."""
    slots_by_rank = [q.slots[rank] for rank in ranks]
    slots = torch.cat(slots_by_rank, 1)
    rank = torch.repeat_interleave(torch.tensor([x.shape[1] for x in slots_by_rank]))
    blocks = (slots[..., 1] // mask.q_block).long()
    return mask.runs.sum_readers(blocks, slots[..., 2].long(), rank, len(slots_by_rank))


def sum_by_owner(x: Tensor, kv: Placement) -> Tensor:
    """Sum ``x`` [ranks, Bn, KV blocks] over the tokens that each rank holds: int64 [ranks, W]."""
    slots = torch.cat(kv.slots, 1)
    batch = max(x.shape[1], len(slots))
    at = (slots[..., 1] // kv.block).long().expand(len(x), batch, -1)
    tokens = x.expand(-1, batch, -1).gather(2, at) * slots[..., 2]
    total = torch.nn.functional.pad(tokens.sum(1).cumsum(1), (1, 0))
    ends = torch.tensor([0, *(part.shape[1] for part in kv.slots)]).cumsum(0)
    return total[:, ends].diff(dim=1)


def _requested_slots(visible: Tensor, slots: Tensor, block: int) -> Tensor:
    """Mark the ``slots`` [Bp, n, 3] in blocks that readers see, ``visible`` [..., Bn, blocks]: bool
    [..., Bn or Bp, n]."""
    batch = max(visible.shape[-2], slots.shape[0])
    visible = visible.expand(*visible.shape[:-2], batch, -1)
    at = (slots[..., 1] // block).long().expand(*visible.shape[:-1], -1)
    return visible.gather(-1, at)


class Hop(NamedTuple):
    """Messages of one rank in one step of the ring; peers are ranks, None = no message.

    owner:     rank whose K and V this step is about
    holds:     whether they reach this rank: K and V are sent only as far as the last rank that reads them
    reads:     whether this rank computes a step: its queries see some of these keys, or the keys are its own
    more:      whether this rank's queries see K and V of a later step
    next:      rank to which K and V are sent, for the next step
    previous:  rank that sends the K and V of the next step
    dkv_to:    rank to which the gradient of this step's K and V is sent: the next reader, or in the end the
               owner
    dkv_next:  rank that sends the gradient of the next step's K and V
    dkv_home:  rank that sends the gradient of this rank's shard of K and V in this step

    Three ranks with contiguous pieces of a causal mask: rank 1 reads its keys and rank 0's.

    >>> reads = torch.ones(3, 3, dtype=torch.bool).tril()
    >>> hops = ring(reads, 1, ring_route(reads))
    >>> [(hop.owner, hop.holds, hop.reads, hop.more) for hop in hops]
    [(1, True, True, True), (0, True, True, False), (2, False, False, False)]
    >>> [(hop.next, hop.previous) for hop in hops]      # rank 2 gets both keys, rank 0 sends its keys
    [(2, 0), (2, None), (None, None)]
    >>> [(hop.dkv_to, hop.dkv_next, hop.dkv_home) for hop in hops]      # rank 2 returns rank 1's gradient
    [(None, None, None), (2, None, 2), (None, None, None)]
    """

    owner: int
    holds: bool
    reads: bool
    more: bool
    next: int | None
    previous: int | None
    dkv_to: int | None
    dkv_next: int | None
    dkv_home: int | None


def ring_route(reads: Tensor) -> tuple[int, Tensor]:
    """Choose the direction of the ring (1 or -1) with fewer hops, and count the hops of each rank's K and V:
    int64 [W].

    reads: bool [W, W], whether rank r's queries see keys of rank s.
    """
    return min(((step, _reach(reads, step)) for step in (1, -1)), key=lambda route: int(route[1].sum()))


def ring(reads: Tensor, rank: int, route: tuple[int, Tensor]) -> tuple[Hop, ...]:
    """List the steps of one rank in the ring. K and V are sent in one direction, as far as the last rank that
    reads them; their gradient follows one hop behind and returns to the owner in one message.

    reads: as for :func:`ring_route`; route: its result.

    >>> causal = torch.ones(4, 4, dtype=torch.bool).tril()
    >>> [(hop.owner, hop.next, hop.dkv_to) for hop in ring(causal, 1, ring_route(causal))]
    [(1, 2, None), (0, 2, 2), (3, None, None), (2, None, None)]
    >>> window = causal.triu(-1)
    >>> [(hop.owner, hop.next, hop.dkv_to) for hop in ring(window, 1, ring_route(window))]
    [(1, 2, None), (0, None, 0)]
    """
    world = len(reads)
    step, hops_of = route
    reach = hops_of.tolist()
    own_reads = reads[rank].tolist()
    following, preceding = (rank + step) % world, (rank - step) % world
    owners = [(rank - step * turn) % world for turn in range(max(reach) + 1)]
    turn_reads = [
        turn == 0 or (turn <= reach[owner] and own_reads[owner]) for turn, owner in enumerate(owners)
    ]
    last, hops = max(turn for turn, is_read in enumerate(turn_reads) if is_read), []
    for turn, owner in enumerate(owners):
        after = (owner - step) % world
        holds, goes_on, comes = turn <= reach[owner], turn < reach[owner], turn < reach[after]
        hop = Hop(
            owner=owner,
            holds=holds,
            reads=turn_reads[turn],
            more=turn < last,
            next=following if goes_on else None,
            previous=preceding if comes else None,
            dkv_to=None if not holds or turn == 0 else following if goes_on else owner,
            dkv_next=preceding if comes and turn > 0 else None,
            dkv_home=(rank + step * turn) % world if turn == reach[rank] and turn > 0 else None,
        )
        hops.append(hop)
    return tuple(hops)


def _reach(reads: Tensor, step: int) -> Tensor:
    """Count the hops of each rank's K and V in one direction."""
    ranks = torch.arange(len(reads))
    hops = (ranks[:, None] - ranks) * step % len(reads)  # from each owner to each reader
    return torch.where(reads, hops, 0).amax(0)


def head_groups(kv_heads: int, nbytes: int) -> list[int]:
    """Split the KV heads into groups that are gathered together: sizes of up to HEAD_GROUPS groups, or of one
    group if all heads of a rank have fewer than SMALL bytes.

    >>> head_groups(3, SMALL), head_groups(1, SMALL)
    ([2, 1], [1])
    """
    size = -(-kv_heads // min(kv_heads, HEAD_GROUPS if nbytes >= SMALL else 1))
    return [min(size, kv_heads - start) for start in range(0, kv_heads, size)]


def trade(heads: int, kv_heads: int, degree: int) -> tuple[list[range], list[range]]:
    """Split the query heads evenly among ``degree`` ranks; also return the KV heads that each rank reads.

    >>> trade(8, 2, 3)
    ([range(0, 2), range(2, 5), range(5, 8)], [range(0, 1), range(0, 2), range(1, 2)])
    """
    cuts, group = [heads * i // degree for i in range(degree + 1)], heads // kv_heads
    q_heads = [range(a, b) for a, b in itertools.pairwise(cuts)]
    return q_heads, [range(part.start // group, (part.stop - 1) // group + 1) for part in q_heads]


def share(kv_parts: Sequence[range]) -> bool:
    """Return whether several ranks read the same KV head, so that its gradient is summed over ranks.

    >>> [share(trade(heads, 2, 2)[1]) for heads in (8, 2)], share(trade(8, 2, 3)[1])
    ([False, False], True)
    """
    return any(a.stop > b.start for a, b in itertools.pairwise(kv_parts))


@dataclass(frozen=True, eq=False)
class Fetch:
    """Rows of keys that one rank sends and receives in one all-to-all.

    batched: whether batch rows fetch different rows. If so, rows are numbered over [B, S_local]; else over
             [S_local], each for all batch rows
    rows:    local rows to send, receiver after receiver: int64 [sum(sends)]
    sends:   number of rows to each rank
    takes:   number of rows received from each rank, in rank order
    slots:   the slots of the received buffer: int32 [Bn, n, 3], sorted by global position

    Three blocks of 4 tokens: rank 1 has blocks 1 and 2, and sees the keys of block 0, which rank 0 has.

    >>> from tritoncp import causal, create_block_mask, make_plan
    >>> mask = create_block_mask(causal(), 1, 1, 12, 12, BLOCK_SIZE=4)
    >>> plan = make_plan(mask, world_size=2, rank=0, balancer="head_tail", schedule="fetch")
    >>> sender, receiver = plan.fetch, plan.for_rank(1).fetch
    >>> sender.batched, sender.rows.tolist(), sender.sends, sender.takes
    (False, [0, 1, 2, 3], (0, 4), (0, 0))
    >>> receiver.sends, receiver.takes, receiver.slots.tolist()
    ((0, 0), (4, 0), [[[0, 0, 4]]])
    """

    batched: bool
    rows: Tensor
    sends: tuple[int, ...]
    takes: tuple[int, ...]
    slots: Tensor


def fetch(visible: Tensor, kv: Placement, rank: int) -> Fetch:
    """List the rows that ``rank`` sends and receives if each rank fetches the remote slots that it sees."""
    own_slots = kv.slots[rank]
    requested = _requested_slots(visible, own_slots, kv.block)  # [W, Bn, n]
    requested[rank] = False
    sends = (requested * own_slots[..., 2]).sum((1, 2)).tolist()
    slots, owner = kv.all_slots()
    tokens = torch.where(
        _requested_slots(visible[rank], slots, kv.block) & (owner != rank), slots[..., 2], 0
    ).long()
    takes = torch.zeros(kv.world_size, dtype=torch.int64).index_add_(0, owner, tokens.sum(0)).tolist()
    return Fetch(
        batched=max(visible.shape[1], own_slots.shape[0]) > 1,
        rows=_rows(requested, own_slots, kv.lengths[rank]),
        sends=tuple(sends),
        takes=tuple(takes),
        slots=sort_by_position(_received_slots(slots, tokens, owner)),
    )


def held_slots(own: Tensor, fetch: Fetch, length: int) -> Tensor:
    """Return the slots of a buffer of a rank's ``length`` rows (batch row after batch row if
    ``fetch.batched``), followed by the fetched rows: int32 [Bn, n, 3], sorted by global position."""
    shift = torch.tensor([length, 0, 0], dtype=torch.int32)
    rows = torch.arange(len(fetch.slots), dtype=torch.int32)[:, None, None]
    own = own + rows * shift  # one batch row unless ``fetch.batched``
    return sort_by_position(torch.cat([own, fetch.slots + len(fetch.slots) * shift], 1))


def _rows(requested: Tensor, slots: Tensor, length: int) -> Tensor:
    """List the rows of the slots [Bp, n, 3] that each reader requests [W, Bn, n], batch row after batch row:
    int64, numbered over [Bn, length]."""
    _, batch, index = requested.nonzero(as_tuple=True)
    first, _, tokens = slots.expand(requested.shape[1], -1, -1)[batch, index].long().unbind(1)
    return ramps(batch * length + first, tokens)


def _received_slots(slots: Tensor, tokens: Tensor, owner: Tensor) -> Tensor:
    """Return the slots in the received buffer, which has ``tokens`` [Bn, n] of each slot, by owner, then by
    batch row: int32 [Bn, n, 3]."""
    batch = torch.arange(len(tokens))[:, None]
    order = (owner * len(tokens) + batch).flatten().argsort(stable=True)
    arrivals = tokens.flatten()[order]
    first = torch.empty_like(arrivals)
    first[order] = arrivals.cumsum(0) - arrivals
    return torch.stack([first.view_as(tokens), slots[..., 1].expand_as(tokens), tokens], -1).int()
