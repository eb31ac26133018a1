"""What travels: which rank reads whose keys, the hops of a ring, the slots a rank fetches.

All of it follows from the mask and the two placements, so every rank derives the same tables.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncp.masks import Mask
from tritoncp.runs import ramps
from tritoncp.sharding import Placement, by_position


def seen_blocks(mask: Mask, q: Placement) -> Tensor:
    """Which KV blocks each rank's queries see in any head: bool [W, Bn, KV blocks]."""
    seen = []
    for slots in q.slots:
        blocks = torch.where(slots[..., 2] > 0, slots[..., 1] // mask.q_block, -1)
        seen.append(mask.runs.take(blocks.long()).columns())
    return torch.stack(seen)


def readers(seen: Tensor, kv: Placement) -> Tensor:
    """readers[r, s]: rank r's queries see a key that rank s holds. bool [W, W]."""
    return torch.stack([_wanted(seen, slots, kv.block).flatten(1).any(1) for slots in kv.slots], 1)


def _wanted(seen: Tensor, slots: Tensor, block: int) -> Tensor:
    """Which of ``slots`` [Bp, n, 3] readers see that see [..., Bn, blocks]: bool [..., Bn or Bp, n]."""
    batch = max(seen.shape[-2], slots.shape[0])
    seen = seen.expand(*seen.shape[:-2], batch, -1)
    at = (slots[..., 1] // block).long().expand(*seen.shape[:-1], -1)
    return seen.gather(-1, at) & (slots[..., 2] > 0)


@dataclass(frozen=True)
class Hop:
    """One turn of the ring as one rank sees it; peers are ranks, None = nothing moves.

    owner:     whose K and V would lie here in this turn
    here:      whether they do: nobody reads them further along
    reads:     whether this rank's queries see any of it
    next:      who gets this K and V for the next turn
    previous:  who sends K and V for the next turn
    dkv_to:    who gets the gradient of this turn's K and V: the next reader, or at last the owner
    dkv_next:  who sends the gradient that belongs to the next turn's K and V
    dkv_home:  who sends home the gradient of this rank's own K and V, in this turn
    """

    owner: int
    here: bool
    reads: bool
    next: int | None
    previous: int | None
    dkv_to: int | None
    dkv_next: int | None
    dkv_home: int | None


def ring(reads: Tensor, rank: int) -> tuple[Hop, ...]:
    """The turns of one rank. K and V travel in one direction, as far as the last rank that reads them; their
    gradient follows one hop behind and goes home in one send. The direction is the one with fewer hops.

    reads: bool [W, W] of :func:`readers`.

    >>> causal = torch.ones(4, 4, dtype=torch.bool).tril()
    >>> [(hop.owner, hop.next, hop.dkv_to) for hop in ring(causal, 1)]
    [(1, 2, None), (0, 2, 2), (3, None, None), (2, None, None)]
    >>> window = causal.triu(-1)
    >>> [(hop.owner, hop.next, hop.dkv_to) for hop in ring(window, 1)]
    [(1, 2, None), (0, None, 0)]
    """
    world = len(reads)
    step, reach = min(((d, _reach(reads, d)) for d in (1, -1)), key=lambda found: sum(found[1]))
    mine = reads[rank].tolist()
    following, preceding = (rank + step) % world, (rank - step) % world
    hops = []
    for turn in range(max(reach) + 1):
        owner, after = (rank - step * turn) % world, (rank - step * (turn + 1)) % world
        here, goes_on, comes = turn <= reach[owner], turn < reach[owner], turn < reach[after]
        hop = Hop(
            owner=owner,
            here=here,
            reads=here and (turn == 0 or mine[owner]),
            next=following if goes_on else None,
            previous=preceding if comes else None,
            dkv_to=None if not here or turn == 0 else following if goes_on else owner,
            dkv_next=preceding if comes and turn > 0 else None,
            dkv_home=(rank + step * turn) % world if turn == reach[rank] and turn > 0 else None,
        )
        hops.append(hop)
    return tuple(hops)


def _reach(reads: Tensor, step: int) -> list[int]:
    """How many hops each rank's K and V travel in one direction."""
    ranks = torch.arange(len(reads))
    hops = (ranks[:, None] - ranks) * step % len(reads)  # from each owner to each reader
    return torch.where(reads, hops, 0).amax(0).tolist()


def trade(heads: int, kv_heads: int, degree: int) -> tuple[list[range], list[range]]:
    """Query heads of each of ``degree`` ranks, even to within one, and the KV heads they read.

    >>> trade(8, 2, 3)
    ([range(0, 2), range(2, 5), range(5, 8)], [range(0, 1), range(0, 2), range(1, 2)])
    """
    cuts, group = [heads * i // degree for i in range(degree + 1)], heads // kv_heads
    q_heads = [range(a, b) for a, b in itertools.pairwise(cuts)]
    return q_heads, [range(part.start // group, (part.stop - 1) // group + 1) for part in q_heads]


@dataclass(frozen=True, eq=False)
class Fetch:
    """What one rank sends and takes in one all-to-all.

    batched: whether batch rows fetch different rows; then rows are numbered over [B, S_local], else over
             [S_local] and each carries all batch rows
    rows:    local rows to send, receiver after receiver: int64 [sum(sends)]
    sends:   how many of them go to each rank
    takes:   how many rows come from each rank, in rank order
    slots:   the slots of what has come: int32 [Bn, n, 3], sorted by global position
    """

    batched: bool
    rows: Tensor
    sends: tuple[int, ...]
    takes: tuple[int, ...]
    slots: Tensor


def fetch(seen: Tensor, kv: Placement, rank: int) -> Fetch:
    """What ``rank`` sends and takes when every rank gets exactly the remote slots that its queries see."""
    world, mine = range(kv.world_size), kv.slots[rank]
    rows = []
    for reader in world:
        wanted = _wanted(seen[reader], mine, kv.block) & (reader != rank)
        rows.append(_rows(wanted, mine, kv.lengths[rank]))
    slots: list[Tensor] = []
    takes: list[int] = []
    for owner in world:
        wanted = _wanted(seen[rank], kv.slots[owner], kv.block) & (owner != rank)
        table, tokens = _packed(wanted, kv.slots[owner], sum(takes))
        slots.append(table)
        takes.append(tokens)
    batched = max(seen.shape[1], mine.shape[0]) > 1
    return Fetch(
        batched, torch.cat(rows), tuple(map(len, rows)), tuple(takes), by_position(torch.cat(slots, 1))
    )


def _rows(wanted: Tensor, slots: Tensor, length: int) -> Tensor:
    """The rows of wanted slots, batch row after batch row: int64, numbered over [Bn, length]."""
    slots = slots.expand(wanted.shape[0], -1, -1).long()
    batch, index = wanted.nonzero(as_tuple=True)
    first, _, tokens = slots[batch, index].unbind(1)
    return ramps(batch * length + first, tokens)


def _packed(wanted: Tensor, slots: Tensor, start: int) -> tuple[Tensor, int]:
    """The wanted slots as they lie one after the other from row ``start``, others empty; how many rows."""
    tokens = torch.where(wanted, slots[..., 2], 0).long()  # [Bn, n]
    flat = tokens.flatten()
    first = (flat.cumsum(0) - flat + start).view_as(tokens)
    table = torch.stack([first, slots[..., 1].expand_as(tokens).long(), tokens], -1)
    return table.int(), int(flat.sum())
