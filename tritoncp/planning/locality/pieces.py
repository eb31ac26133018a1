"""Pieces of several neighbouring blocks, in which the balancer "locality" places long sequences."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.planning.work import Work, merge_ranges

MIN_PIECES = 512  # blocks up to twice as many are placed one by one
MAX_PIECES = 4096  # pieces up to which a placement in pieces is improved
MIN_GROUPED_RANKS = 256  # ranks from which on groups of ranks are placed first
MAX_SEARCHED_RANKS = 16  # ranks up to which several sizes of pieces are tried


class View(NamedTuple):
    """The work of pieces of neighbouring blocks, and the pieces of keys that they see; fields as of Work.

    costs are on the CPU, float64
    """

    costs: Tensor
    world_size: int
    sees: tuple[Tensor, ...]
    columns: int
    together: bool

    @classmethod
    def of(cls, work: Work) -> View:
        return cls(work.costs.cpu().double(), work.world_size, work.sees, work.columns, work.together)

    def in_pieces(self, size: int) -> View:
        """Return the view of pieces of ``size`` blocks; a piece sees the columns that any of its blocks
        sees."""
        if size == 1:
            return self
        blocks, columns = -(-len(self.costs) // size), -(-self.columns // size)
        place = torch.arange(len(self.costs)) // size
        costs = torch.zeros(blocks, dtype=torch.float64).index_add_(0, place, self.costs)
        sees = [
            merge_runs(runs[:, 0] // size, runs[:, 1] // size, (runs[:, 2] + size - 1) // size, columns)
            for runs in self.sees
        ]
        return View(costs, self.world_size, tuple(sees), columns, self.together)

    def of_group(self, blocks: Tensor, ranks: int) -> View:
        """Return the view of some blocks, ascending, on some ranks. Its columns are the ones that the blocks
        see, at most twice as many as blocks: several neighbouring ones are one where there are more."""
        place = torch.full((len(self.costs),), -1)
        place[blocks] = torch.arange(len(blocks))
        steps, group_runs = torch.zeros(self.columns + 1, dtype=torch.int64), []
        for runs in self.sees:
            runs = runs[place[runs[:, 0]] >= 0]
            ones = torch.ones(len(runs), dtype=torch.int64)
            steps.index_add_(0, runs[:, 1], ones).index_add_(0, runs[:, 2], -ones)
            group_runs.append(runs)
        number = torch.nn.functional.pad((steps.cumsum(0)[:-1] > 0).cumsum(0), (1, 0))
        size = max(1, -(-int(number[-1]) // (2 * len(blocks))))
        columns = -(-int(number[-1]) // size)
        sees = [
            merge_runs(
                place[runs[:, 0]],
                number[runs[:, 1]] // size,
                (number[runs[:, 2]] + size - 1) // size,
                columns,
            )
            for runs in group_runs
        ]
        return View(self.costs[blocks], ranks, tuple(sees), columns, False)


def merge_runs(row: Tensor, start: Tensor, end: Tensor, columns: int) -> Tensor:
    """Merge runs of columns that overlap or touch in a row: int64 [n, 3] rows (row, start, end)."""
    line = columns + 2  # a spare column, so that ranges of different rows do not touch
    start, end = merge_ranges(row * line + start, row * line + end)
    row = start // line
    return torch.stack([row, start - row * line, end - row * line], 1)


def piece_counts(n: int, world_size: int) -> list[int]:
    """Return the numbers of pieces in which to place ``n`` blocks; [n]: block by block."""
    fewest = max(16 * world_size, min(32 * world_size, MAX_PIECES // 2))
    if n <= 2 * max(fewest, MIN_PIECES):
        return [n]
    if world_size <= MAX_SEARCHED_RANKS and n <= 2 * MAX_PIECES:  # half a second each: the best of several
        return [pieces for pieces in (16 * world_size, 32 * world_size, 64 * world_size) if pieces <= n]
    return [32 * world_size if world_size <= MAX_SEARCHED_RANKS else fewest]


def even_counts(owner: Tensor, view: View) -> Tensor:
    """Move blocks, the cheapest first, from ranks with too many to ranks with too few and the least work,
    until ranks hold equal numbers to within one."""
    owner, ranks = owner.clone(), view.world_size
    counts = owner.bincount(minlength=ranks)
    share, longer = divmod(len(owner), ranks)
    quota = torch.full((ranks,), share)
    quota[counts.argsort(descending=True, stable=True)[:longer]] += 1
    load = torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner, view.costs)
    surplus = []
    for rank in (counts > quota).nonzero()[:, 0].tolist():
        blocks = (owner == rank).nonzero()[:, 0]
        extra = int(counts[rank] - quota[rank])
        surplus += blocks[view.costs[blocks].argsort(stable=True)[:extra]].tolist()
    room = (quota - counts).clamp(min=0)
    surplus.sort(key=lambda block: -float(view.costs[block]))
    for block in surplus:
        load[owner[block]] -= view.costs[block]
        to = int(load.masked_fill(room == 0, torch.inf).argmin())
        owner[block] = to
        room[to] -= 1
        load[to] += view.costs[block]
    return owner


def count_groups(n: int, world_size: int) -> int:
    """Return the number of groups of equal numbers of ranks on which ``n`` blocks are placed first; 1: none.

    >>> count_groups(8192, 64), count_groups(8192, 256), count_groups(65536, 1024), count_groups(8192, 257)
    (1, 16, 32, 1)
    """
    if world_size < MIN_GROUPED_RANKS or n < 16 * world_size:
        return 1
    return max(groups for groups in range(1, math.isqrt(world_size) + 1) if world_size % groups == 0)
