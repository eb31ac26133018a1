"""The search for a placement: in pieces of several blocks first, of many ranks in groups first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.planning.locality.branches import whole_branches
from tritoncp.planning.locality.pieces import View, even_counts
from tritoncp.planning.locality.swaps import Assignment
from tritoncp.planning.locality.windows import choose_windows
from tritoncp.planning.work import Work

EVEN_RATIO = 1.018  # max/mean work that counts as even
MIN_PIECES = 512  # blocks up to twice as many are placed one by one
MAX_PIECES = 4096  # pieces up to which a placement in pieces is improved
MAX_SWAPS = 200  # swaps tried where the work of blocks is uneven
MIN_GROUPED_RANKS = 512  # ranks from which on groups of ranks are placed first
GROUP_RATIO = 1.005  # as EVEN_RATIO, of groups


class Effort(NamedTuple):
    """The effort of a search.

    pieces:     fewest pieces in which a long sequence is placed first
    cuts:       sizes of the first window that are tried
    swaps:      most swaps that are tried on a placement
    tolerances: of the work of one rank's windows, as a fraction of the mean; each yields a placement
    """

    pieces: int
    cuts: int
    swaps: int
    tolerances: tuple[float, ...] = (0.01,)


def place_blocks(work: Work) -> Tensor:
    """Return the owner of each block: int64 [blocks]. Ranks hold equal numbers of blocks to within one."""
    view, world_size = View.of(work), work.world_size
    if view.n <= world_size or world_size == 1:
        return assign_in_order(view)
    mean, groups = float(view.costs.sum()) / world_size, count_groups(view.n, world_size)
    if groups > 1:
        return _place_in_groups(view, groups, mean)
    if world_size <= 16:
        return _place(view, EVEN_RATIO * mean, Effort(32 * world_size, 64, 200, (0.01, 0.02)))
    pieces = max(16 * world_size, min(32 * world_size, MAX_PIECES // 2))
    return _place(view, EVEN_RATIO * mean, Effort(pieces, max(4, min(16, 1024 // world_size)), 50))


def _place_in_groups(view: View, groups: int, mean: float) -> Tensor:
    """Place blocks on groups of ranks, and then the blocks of each group on its ranks."""
    ranks = view.world_size // groups
    of_groups = replace(view, world_size=groups)
    group_of = _place(of_groups, GROUP_RATIO * mean * ranks, Effort(32 * groups, 16, 50))
    owner = torch.zeros_like(group_of)
    for group in range(groups):
        blocks = (group_of == group).nonzero()[:, 0]
        own = _place(view.of_group(blocks, ranks), EVEN_RATIO * mean, Effort(16 * ranks, 4, 16))
        owner[blocks] = group * ranks + own
    return owner


def assign_in_order(view: View) -> Tensor:
    """Return the owner of each block in even pieces in natural order."""
    return torch.arange(view.n) * view.world_size // max(1, view.n)


def count_groups(n: int, world_size: int) -> int:
    """Return the number of groups of equal numbers of ranks on which ``n`` blocks are placed first; 1: none.

    >>> count_groups(8192, 64), count_groups(8192, 512), count_groups(65536, 1024), count_groups(9999, 521)
    (1, 16, 32, 1)
    """
    if world_size < MIN_GROUPED_RANKS or n < 16 * world_size:
        return 1
    return max(groups for groups in range(1, math.isqrt(world_size) + 1) if world_size % groups == 0)


def _place(view: View, cap: float, effort: Effort) -> Tensor:
    """Place pieces of several blocks by windows or in natural order, then improve the placement by swaps, in
    pieces of half the size and so on while that is quick. Returns the owner of each block.

    cap: work of a rank that counts as even
    """
    n = view.n
    size = 1 << max(1, n // max(effort.pieces, MIN_PIECES)).bit_length() - 1
    blocks = view.in_pieces(size)
    windows = (choose_windows(blocks, effort.cuts, tolerance) for tolerance in effort.tolerances)
    starts = (assign_in_order(blocks), whole_branches(blocks), *windows)
    candidates = [Assignment(blocks, owner, cap) for owner in starts if owner is not None]
    for candidate in candidates:
        candidate.improve(effort.swaps)
    best = min(candidates, key=Assignment.rank)
    while size > 1 and 2 * -(-n // size) <= MAX_PIECES:
        size //= 2
        blocks = view.in_pieces(size)
        owner = even_counts(best.owner.repeat_interleave(2)[: blocks.n], blocks)
        best = Assignment(blocks, owner, cap)
        best.improve(effort.swaps)
    if size > 1:
        owner = even_counts(best.owner.repeat_interleave(size)[:n], view)
        best = min(
            (Assignment(view, each, cap) for each in (assign_in_order(view), owner)), key=Assignment.rank
        )
        if float(best.work.max()) > cap:
            best.improve(MAX_SWAPS)
    return best.owner
