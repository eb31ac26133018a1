"""Whole branches of a prefix tree: all blocks of a branch go to one rank.

The end of a branch sees the whole branch and the common prefix, so its rank fetches the blocks of them that
it does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.planning.locality.pieces import even_counts
from tritoncp.planning.work import Work, document_starts


def whole_branches(work: Work) -> Tensor | None:
    """Assign whole branches of a common prefix while there is room, then the blocks of the prefix. Returns
    the owner of each block.

    The prefix consists of the blocks whose keys more than half of all blocks see. None if there is no prefix,
    or if the other blocks are one branch of fewer than two thirds of all blocks.
    """
    if not work.together:
        return None
    n, (column, first, last) = work.columns, work.readers.unbind(1)
    readers = torch.zeros(max(1, len(work.runs)) * n, dtype=torch.int64).index_add_(0, column, last - first)
    shared = (readers.view(-1, n) > n / 2).any(0)
    if not bool(shared.any()) or bool(shared.all()):
        return None
    is_start = torch.zeros(n, dtype=torch.int64)
    is_start[document_starts(work, shared)] = 1
    branch = (is_start.masked_fill(shared, 0).cumsum(0) - 1).clamp(min=0)
    length = branch[~shared].bincount()
    if len(length) == 1 and int(shared.sum()) > n / 3:
        return None
    return even_counts(torch.where(shared, -1, _longest_first(length, work.world_size)[branch]), work)


def _longest_first(length: Tensor, ranks: int) -> Tensor:
    """Assign the longest branches first, to the rank with the fewest blocks: rank of each branch, int64.

    >>> _longest_first(torch.tensor([1, 3, 2, 2]), 2).tolist()
    [0, 0, 1, 1]
    """
    lengths, owner, held = length.tolist(), torch.zeros_like(length), [0] * ranks
    for branch in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        owner[branch] = rank = held.index(min(held))
        held[rank] += lengths[branch]
    return owner
