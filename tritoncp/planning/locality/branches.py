"""Whole branches of a prefix tree: a rank holds all blocks of the branches whose ends it holds.

A rank that holds the end of a branch sees the branch and the common prefix, and fetches what it does not
hold of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.planning.locality.pieces import View, even_counts, loads


def whole_branches(view: View) -> Tensor | None:
    """Assign the branches of a common prefix whole, as far as there is room, then the blocks of the prefix:
    owner of each block.

    The prefix is made of the blocks whose keys more than half of all blocks see. None if there is none, or
    if the others are one branch of fewer than two thirds of all blocks.
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
    _fill(view, owner, prefix)
    return even_counts(owner, view)


def _number_branches(view: View, shared: Tensor) -> Tensor:
    """Number the branches, which see no keys of each other: branch of each block, int64 [blocks]."""
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


def _fill(view: View, owner: Tensor, prefix: Tensor) -> None:
    """Assign the blocks of the prefix, the costliest first, to the rank with room that has the least work.

    owner: changed; -1 = none. prefix: blocks, by rising cost
    """
    ranks, mean = view.world_size, float(view.costs.sum()) / view.world_size
    assigned = owner >= 0
    room = (view.n // ranks - owner[assigned].bincount(minlength=ranks)).double()
    lack = mean - loads(owner[assigned], view.costs[assigned], ranks)
    for block in prefix.flip(0).tolist():
        rank = int(torch.where(room > 0, lack / room.clamp(min=1), lack - 1e12).argmax())
        owner[block] = rank
        room[rank] -= 1
        lack[rank] -= float(view.costs[block])
