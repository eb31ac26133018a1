"""Whole branches: each rank takes the branches of a common prefix whose ends it holds.

A rank that holds the last tokens of some branches sees the prefix and these branches, and holds its share of
all tokens. What it sees beyond its share is remote, wherever the tokens lie. So branches are kept whole;
ranks that would hold too much pass on the beginnings of theirs, which see only the prefix and themselves,
and take cheap blocks of the prefix in exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.planning.locality.pieces import View, even_counts

TOLERANCE = 1.005  # work of a rank over the mean up to which it keeps its branches whole


def whole_branches(view: View) -> Tensor | None:
    """Assign the branches of a common prefix whole, as far as work and room allow, and the blocks of the
    prefix where there is room: the owner of each block.

    The prefix are the blocks whose keys more than half of all blocks see. None if there are none, or if the
    others are one branch and fewer than two thirds.
    """
    column, first, last = view.readers
    readers = torch.zeros(view.masks * view.width, dtype=torch.int64).index_add_(0, column, last - first)
    shared = (readers.view(view.masks, -1) > view.n / 2).any(0)
    if not view.together or not bool(shared.any()) or bool(shared.all()):
        return None
    branch = _number_branches(view, shared)
    length = branch[~shared].bincount()
    if len(length) == 1 and int(shared.sum()) > view.n / 3:
        return None
    owner = torch.where(shared, -1, _longest_first(length, view.world_size)[branch])
    prefix = shared.nonzero()[:, 0]
    prefix = prefix[view.costs[prefix].argsort(stable=True)]
    prefix = _exchange(view, owner, prefix)
    _fill(view, owner, prefix)
    return even_counts(owner, view)


def _number_branches(view: View, shared: Tensor) -> Tensor:
    """Number the branches, between which no column of other than shared blocks is seen: int64 [blocks]."""
    column, first, last = view.readers
    column = column % view.width
    own = ~shared[column]
    low, high = torch.minimum(first, column)[own], torch.maximum(last, column + 1)[own]
    steps = torch.zeros(view.n + 1, dtype=torch.int64)  # cuts low + 1 .. high - 1 lie inside a branch
    steps.index_add_(0, low + 1, torch.ones_like(low)).index_add_(0, high, -torch.ones_like(high))
    starts = (steps.cumsum(0)[: view.n] <= 0) & ~shared
    return (starts.cumsum(0) - 1).clamp(min=0)


def _longest_first(length: Tensor, ranks: int) -> Tensor:
    """Assign the longest branches first, to the rank with the fewest blocks: rank of each branch, int64."""
    owner, held = torch.zeros_like(length), [0] * ranks
    for branch in length.argsort(descending=True, stable=True).tolist():
        owner[branch] = rank = held.index(min(held))
        held[rank] += int(length[branch])
    return owner


def _exchange(view: View, owner: Tensor, prefix: Tensor) -> Tensor:
    """Take the cheapest blocks, the beginnings of branches, from ranks that have too many or too much work,
    and give them cheap blocks of the prefix. Returns the blocks of the prefix that are left.

    owner: changed; -1 = none. prefix: blocks, by rising cost
    """
    share, mean = view.n // view.world_size, float(view.costs.sum()) / view.world_size * TOLERANCE
    held = [(owner == rank).nonzero()[:, 0] for rank in range(view.world_size)]
    offers = []
    for rank, blocks in enumerate(held):
        work = float(view.costs[blocks].sum())
        if len(blocks) > share or work + float(view.costs[prefix[: share - len(blocks)]].sum()) > mean:
            offers.append(rank)
    for turn, rank in enumerate(offers):
        blocks = held[rank][view.costs[held[rank]].argsort(stable=True)]
        own = prefix[turn :: len(offers)][:share]
        least = max(0, share - len(own))  # blocks to keep, if all of these are taken
        kept = torch.arange(min(share, len(blocks)), min(least, len(blocks)) - 1, -1)
        before = torch.nn.functional.pad(view.costs[own].cumsum(0), (1, 0))
        tail = torch.nn.functional.pad(view.costs[blocks].flip(0).cumsum(0), (1, 0))
        fits = tail[kept] + before[(share - kept).clamp(max=len(own))] <= mean
        keep = int(kept[fits][0]) if bool(fits.any()) else int(kept[-1])
        owner[blocks[: len(blocks) - keep]] = -1
        owner[own[: share - keep]] = rank
    return prefix[owner[prefix] < 0]


def _fill(view: View, owner: Tensor, prefix: Tensor) -> None:
    """Give the blocks without an owner to the ranks with room: beginnings of branches in even pieces, as many
    as their work allows, then the prefix, the costliest blocks first.

    owner: changed; -1 = none. prefix: its blocks without an owner
    """
    ranks, mean = view.world_size, float(view.costs.sum()) / view.world_size
    given = owner >= 0
    room = (view.n // ranks - owner[given].bincount(minlength=ranks)).clamp(min=0).double()
    lack = mean - torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner[given], view.costs[given])
    is_prefix = torch.zeros(view.n, dtype=torch.bool)
    is_prefix[prefix] = True
    begins = (~given & ~is_prefix).nonzero()[:, 0]
    if len(begins):
        cheap = float(view.costs[prefix].mean()) if len(prefix) else 0.0
        dear = max(float(view.costs[begins].mean()), 1.01 * cheap + 1e-9)
        wanted = torch.minimum(((lack - room * cheap) / (dear - cheap)).clamp(min=0), room) + 1e-9 * (
            room + 1
        )
        ends = wanted.cumsum(0) / wanted.sum() * len(begins)
        owner[begins] = torch.searchsorted(ends, torch.arange(len(begins)).double() + 0.5).clamp(
            max=ranks - 1
        )
        given = owner >= 0
        room = (view.n // ranks - owner[given].bincount(minlength=ranks)).double()
        lack = mean - torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner[given], view.costs[given])
    for block in prefix.flip(0).tolist():
        rank = int(torch.where(room > 0, lack / room.clamp(min=1), lack - 1e12).argmax())
        owner[block] = rank
        room[rank] -= 1
        lack[rank] -= float(view.costs[block])
