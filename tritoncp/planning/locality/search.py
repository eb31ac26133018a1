"""The search for a placement: in pieces of several blocks first, of many ranks in groups first."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tritoncp.planning.locality.pieces import (
    MAX_PIECES,
    MAX_SEARCHED_RANKS,
    MIN_PIECES,
    View,
    count_groups,
    even_counts,
    piece_counts,
)
from tritoncp.planning.locality.swaps import MAX_EVEN_RATIO, Assignment
from tritoncp.planning.locality.windows import Columns
from tritoncp.planning.work import Work

# On the work of one rank's windows, as a fraction of the mean; each yields a candidate placement.
TOLERANCES = (0.01, 0.015, 0.02)
SIZE_COUNTS = (64, 16)  # number of sizes of the first window; each yields a candidate placement
MAX_SWAPS = 200  # swaps tried on a placement
GROUP_SWAPS = 16  # swaps tried on the placement of one group of many, in pieces and in blocks
GROUP_SIZES = 4  # number of sizes of the first window in a group
GROUP_TOLERANCE = 0.005  # as TOLERANCES, of groups of ranks
GROUP_RATIO = 1.005  # max/mean work of groups of ranks that counts as even
MAX_WINDOW_SEARCHES = 1024  # sizes of the first window, times ranks, where only one placement is searched
# Blocks x pairs of ranks up to which every tolerance is tried and every placement improved.
MAX_SMALL_SIZE = 1 << 20
# Blocks x ranks beyond which no placement is improved: the tables would take gigabytes.
MAX_IMPROVED_SIZE = 1 << 24


def place_blocks(work: Work) -> Tensor:
    """Return the owner of each block: int64 [blocks]. Ranks hold equal numbers of blocks to within one.

    Long sequences are placed in pieces of several blocks, which are then halved and improved again.
    """
    n, world_size = len(work.costs), work.world_size
    contiguous = torch.arange(n) * world_size // max(1, n)
    if n <= world_size or world_size == 1:
        return contiguous
    fine = View.of(work)
    groups = count_groups(n, world_size)
    if groups > 1:
        return _place_in_groups(fine, groups)
    sizes = {1 << (n // pieces).bit_length() - 1 for pieces in piece_counts(n, world_size)}
    owners = [_place_in_pieces(fine, size) for size in sorted(sizes)]
    if sizes == {1}:
        return owners[0]
    columns = Columns(fine)
    assignments = [Assignment(columns, owner) for owner in (contiguous, *owners)]
    best = min(assignments, key=Assignment.rank)
    if float(best.work.max()) > best.cap and n * world_size <= MAX_IMPROVED_SIZE:
        best.improve(MAX_SWAPS // 4)
    return best.owner


def _place_in_groups(fine: View, groups: int) -> Tensor:
    """Place pieces on groups of ranks, and then the blocks of each group on its ranks, in smaller pieces."""
    n, ranks, total = len(fine.costs), fine.world_size // groups, float(fine.costs.sum())
    of_groups = fine._replace(world_size=groups)
    size = _piece_size(n, 32 * groups)
    columns = Columns(of_groups.in_pieces(size))
    assignment = Assignment(
        columns, columns.deal(SIZE_COUNTS[-1], GROUP_TOLERANCE), GROUP_RATIO * total / groups
    )
    assignment.improve(MAX_SWAPS // 4)
    group_of = even_counts(assignment.owner.repeat_interleave(size)[:n], of_groups)
    owner = torch.zeros_like(group_of)
    for group in range(groups):
        blocks = (group_of == group).nonzero()[:, 0]
        placed = _place_group(fine.of_group(blocks, ranks), total / fine.world_size)
        owner[blocks] = group * ranks + placed
    return owner


def _place_group(view: View, mean: float) -> Tensor:
    """Place the blocks of a group on its ranks. mean: of the work of all ranks"""
    size, cap = _piece_size(len(view.costs), max(MIN_PIECES, 16 * view.world_size)), MAX_EVEN_RATIO * mean
    columns = Columns(view.in_pieces(size))
    assignment = Assignment(columns, columns.deal(GROUP_SIZES, TOLERANCES[0]), cap)
    assignment.improve(GROUP_SWAPS)
    owner = even_counts(assignment.owner.repeat_interleave(size)[: len(view.costs)], view)
    assignment = Assignment(Columns(view), owner, cap)
    for steps in (GROUP_SWAPS, MAX_SWAPS):
        if float(assignment.work.max()) > cap:
            assignment.improve(steps)
    return assignment.owner


def _piece_size(blocks: int, pieces: int) -> int:
    """Return the largest power of two that cuts blocks into this number of pieces at least."""
    return 1 << max(1, blocks // pieces).bit_length() - 1


def _place_in_pieces(fine: View, size: int) -> Tensor:
    """Place pieces of ``size`` blocks, a power of two, then improve the placement in pieces of half the size,
    and so on while that is quick. Returns the owner of each block."""
    n = len(fine.costs)
    owner = _search(Columns(fine.in_pieces(size)), size == 1 or fine.world_size <= MAX_SEARCHED_RANKS)
    while size > 1:
        if 2 * -(-n // size) > MAX_PIECES:
            return even_counts(owner.repeat_interleave(size)[:n], fine)
        size //= 2
        pieces = fine.in_pieces(size)
        columns = Columns(pieces)
        owner = owner.repeat_interleave(2)[: columns.n]
        assignment = Assignment(columns, even_counts(owner, pieces))
        assignment.improve(MAX_SWAPS if columns.world_size <= MAX_SEARCHED_RANKS else MAX_SWAPS // 10)
        owner = assignment.owner
    return owner


def _search(columns: Columns, thorough: bool) -> Tensor:
    """Return the best placement of several parameters: the owner of each block.

    thorough: try all parameters, and improve every placement, unless the problem is large
    """
    contiguous = torch.arange(columns.n) * columns.world_size // max(1, columns.n)
    small = thorough and columns.n * columns.world_size**2 <= MAX_SMALL_SIZE
    improvable = columns.n * columns.world_size <= MAX_IMPROVED_SIZE
    swaps = MAX_SWAPS if small else MAX_SWAPS // 4 if improvable else 0
    cuts = max(4, min(SIZE_COUNTS[-1], MAX_WINDOW_SEARCHES // columns.world_size))
    tries = list(itertools.product(SIZE_COUNTS, TOLERANCES)) if small else [(cuts, TOLERANCES[0])]
    owners = [contiguous, *(columns.deal(*parameters) for parameters in tries)]
    assignments = [Assignment(columns, owner) for owner in owners]
    for assignment in assignments if small else [min(assignments, key=Assignment.rank)]:
        assignment.improve(swaps)
    return min(assignments, key=Assignment.rank).owner
