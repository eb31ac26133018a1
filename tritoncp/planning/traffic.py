"""What travels: which rank reads whose keys, the hops of a ring, the slots a rank fetches.

All of it follows from the mask and the two placements, so every rank derives the same tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncp.masks.block_runs import ramps
from tritoncp.masks.mask import Mask
from tritoncp.planning.placement import Placement, by_position, numbered

CHUNK = 1 << 21  # (rank, block) pairs at a time: what is held of a large world's table while it is made
HEAD_GROUPS = 2  # one gathered, one computed: more only makes smaller messages
SMALL = 1 << 20  # bytes of K and V of a rank: below, a second message takes longer than it hides


def weights(mask: Mask, q: Placement, ranks: Sequence[int]) -> Tensor:
    """How many of each rank's queries see a KV block, over all heads: int64 [ranks, Bn, KV blocks]."""
    held = [q.slots[rank] for rank in ranks]
    slots, rank = torch.cat(held, 1), numbered([len(x[0]) for x in held])
    blocks = torch.where(slots[..., 2] > 0, slots[..., 1] // mask.q_block, -1)
    runs = mask.runs.take(blocks.long())
    batch, heads, rows, columns = runs.shape
    row, start, end, _ = runs._flat()
    b, at = row // max(1, heads * rows), row % max(1, rows)
    tokens = slots[..., 2].long().expand(batch, -1)[b, at]
    line = (rank[at] * batch + b) * (columns + 1)
    edges = torch.zeros(len(held) * batch * (columns + 1), dtype=torch.int64)
    edges.index_add_(0, line + start, tokens).index_add_(0, line + end, -tokens)
    return edges.view(len(held), batch, columns + 1).cumsum_(2)[..., :columns]


def seen_blocks(mask: Mask, q: Placement) -> Tensor:
    """Which KV blocks each rank's queries see in any head: bool [W, Bn, KV blocks]."""
    return torch.cat([weights(mask, q, ranks) > 0 for ranks in _chunks(q.world_size, mask.runs.n_cols)])


def by_owner(x: Tensor, kv: Placement) -> Tensor:
    """Sums of ``x`` [ranks, Bn, KV blocks] over the tokens that each rank holds: int64 [ranks, W]."""
    slots = torch.cat(kv.slots, 1)
    batch = max(x.shape[1], len(slots))
    at = (slots[..., 1] // kv.block).long().expand(len(x), batch, -1)
    each = x.expand(-1, batch, -1).gather(2, at) * slots[..., 2]
    total = torch.nn.functional.pad(each.sum(1).cumsum(1), (1, 0))
    ends = torch.tensor([0, *(part.shape[1] for part in kv.slots)]).cumsum(0)
    return total[:, ends].diff(dim=1)


def traffic(seen: Tensor, kv: Placement) -> Tensor:
    """rows[r, s]: how many rows of keys rank r's queries see of those that rank s holds, over all batch rows:
    int64 [W, W]. What lies beside the diagonal has to travel."""
    parts = [by_owner(seen[ranks.start : ranks.stop], kv) for ranks in _chunks(len(seen), seen.shape[2])]
    return torch.cat(parts)


def _chunks(world_size: int, blocks: int) -> list[range]:
    step = max(1, CHUNK // max(1, blocks))
    return [range(first, min(first + step, world_size)) for first in range(0, world_size, step)]


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
    more:      whether they see any of a later turn's
    next:      who gets this K and V for the next turn
    previous:  who sends K and V for the next turn
    dkv_to:    who gets the gradient of this turn's K and V: the next reader, or at last the owner
    dkv_next:  who sends the gradient that belongs to the next turn's K and V
    dkv_home:  who sends home the gradient of this rank's own K and V, in this turn
    """

    owner: int
    here: bool
    reads: bool
    more: bool
    next: int | None
    previous: int | None
    dkv_to: int | None
    dkv_next: int | None
    dkv_home: int | None


def way(reads: Tensor) -> tuple[int, Tensor]:
    """In which direction K and V go around (1 or -1), and how many hops each rank's do: int64 [W].

    The direction is the one with fewer hops.  reads: bool [W, W], rank r's queries see keys of rank s.
    """
    return min(((step, _reach(reads, step)) for step in (1, -1)), key=lambda found: int(found[1].sum()))


def ring(reads: Tensor, rank: int, around: tuple[int, Tensor] | None = None) -> tuple[Hop, ...]:
    """The turns of one rank. K and V travel in one direction, as far as the last rank that reads them; their
    gradient follows one hop behind and goes home in one send.

    reads: as for :func:`way`, whose answer ``around`` is, where it is known.

    >>> causal = torch.ones(4, 4, dtype=torch.bool).tril()
    >>> [(hop.owner, hop.next, hop.dkv_to) for hop in ring(causal, 1)]
    [(1, 2, None), (0, 2, 2), (3, None, None), (2, None, None)]
    >>> window = causal.triu(-1)
    >>> [(hop.owner, hop.next, hop.dkv_to) for hop in ring(window, 1)]
    [(1, 2, None), (0, None, 0)]
    """
    world = len(reads)
    step, hops_of = around or way(reads)
    reach = hops_of.tolist()
    mine = reads[rank].tolist()
    following, preceding = (rank + step) % world, (rank - step) % world
    owners = [(rank - step * turn) % world for turn in range(max(reach) + 1)]
    read = [turn == 0 or (turn <= reach[owner] and mine[owner]) for turn, owner in enumerate(owners)]
    last, hops = max(turn for turn, seen in enumerate(read) if seen), []
    for turn, owner in enumerate(owners):
        after = (owner - step) % world
        here, goes_on, comes = turn <= reach[owner], turn < reach[owner], turn < reach[after]
        hop = Hop(
            owner=owner,
            here=here,
            reads=read[turn],
            more=turn < last,
            next=following if goes_on else None,
            previous=preceding if comes else None,
            dkv_to=None if not here or turn == 0 else following if goes_on else owner,
            dkv_next=preceding if comes and turn > 0 else None,
            dkv_home=(rank + step * turn) % world if turn == reach[rank] and turn > 0 else None,
        )
        hops.append(hop)
    return tuple(hops)


def hops_sent(around: tuple[int, Tensor], rank: int) -> tuple[int, int]:
    """How often a rank sends K and V on, and how often a gradient of them.

    >>> window = torch.ones(4, 4, dtype=torch.bool).tril().triu(-1)
    >>> [hops_sent(way(window), rank) for rank in range(4)]
    [(1, 0), (1, 1), (1, 1), (0, 1)]
    """
    step, reach = around
    turn = (rank - torch.arange(len(reach))) * step % len(reach)  # in which each rank's K and V come here
    return int((turn < reach).sum()), int(((turn <= reach) & (turn > 0)).sum())


def _reach(reads: Tensor, step: int) -> Tensor:
    """How many hops each rank's K and V travel in one direction."""
    ranks = torch.arange(len(reads))
    hops = (ranks[:, None] - ranks) * step % len(reads)  # from each owner to each reader
    return torch.where(reads, hops, 0).amax(0)


def head_groups(kv_heads: int, nbytes: int) -> list[int]:
    """KV heads that are gathered together: sizes of at most HEAD_GROUPS pieces, of one where all heads of a
    rank have few bytes.

    >>> head_groups(3, SMALL), head_groups(1, SMALL)
    ([2, 1], [1])
    """
    size = -(-kv_heads // min(kv_heads, HEAD_GROUPS if nbytes >= SMALL else 1))
    return [min(size, kv_heads - start) for start in range(0, kv_heads, size)]


def trade(heads: int, kv_heads: int, degree: int) -> tuple[list[range], list[range]]:
    """Query heads of each of ``degree`` ranks, even to within one, and the KV heads they read.

    >>> trade(8, 2, 3)
    ([range(0, 2), range(2, 5), range(5, 8)], [range(0, 1), range(0, 2), range(1, 2)])
    """
    cuts, group = [heads * i // degree for i in range(degree + 1)], heads // kv_heads
    q_heads = [range(a, b) for a, b in itertools.pairwise(cuts)]
    return q_heads, [range(part.start // group, (part.stop - 1) // group + 1) for part in q_heads]


def share(kv_parts: Sequence[range]) -> bool:
    """Whether several ranks read the same KV head, so that its gradient is a sum of theirs.

    >>> [share(trade(heads, 2, 2)[1]) for heads in (8, 2)], share(trade(8, 2, 3)[1])
    ([False, False], True)
    """
    return any(a.stop > b.start for a, b in itertools.pairwise(kv_parts))


@dataclass(frozen=True, eq=False)
class Fetch:
    """The rows that one rank sends and receives in one all-to-all.

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
    """The rows that ``rank`` sends and receives if all ranks fetch the remote slots that they see."""
    mine = kv.slots[rank]
    wanted = _wanted(seen, mine, kv.block)  # [W, Bn, n]
    wanted[rank] = False
    sends = (wanted * mine[..., 2]).sum((1, 2)).tolist()
    slots, owner = torch.cat(kv.slots, 1), numbered([part.shape[1] for part in kv.slots])
    tokens = torch.where(_wanted(seen[rank], slots, kv.block) & (owner != rank), slots[..., 2], 0).long()
    takes = torch.zeros(kv.world_size, dtype=torch.int64).index_add_(0, owner, tokens.sum(0)).tolist()
    return Fetch(
        batched=max(seen.shape[1], mine.shape[0]) > 1,
        rows=_rows(wanted, mine, kv.lengths[rank]),
        sends=tuple(sends),
        takes=tuple(takes),
        slots=by_position(_packed(slots, tokens, owner)),
    )


def _rows(wanted: Tensor, slots: Tensor, length: int) -> Tensor:
    """The rows of the slots [Bp, n, 3] that each reader wants [W, Bn, n], batch row after batch row: int64,
    numbered over [Bn, length]."""
    _, batch, index = wanted.nonzero(as_tuple=True)
    first, _, tokens = slots.expand(wanted.shape[1], -1, -1)[batch, index].long().unbind(1)
    return ramps(batch * length + first, tokens)


def _packed(slots: Tensor, tokens: Tensor, owner: Tensor) -> Tensor:
    """Slots with so many tokens [Bn, n] each, as they lie when they come owner after owner, and of an owner
    batch row after batch row: int32 [Bn, n, 3]."""
    batch = torch.arange(len(tokens))[:, None]
    order = (owner * len(tokens) + batch).flatten().argsort(stable=True)
    come = tokens.flatten()[order]
    first = torch.empty_like(come)
    first[order] = come.cumsum(0) - come
    return torch.stack([first.view_as(tokens), slots[..., 1].expand_as(tokens), tokens], -1).int()
