"""Windows of blocks on a circle: assignment to each rank of the two windows that see the fewest keys."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import computed_once
from tritoncp.planning.work import Work


def choose_windows(work: Work, cuts: int, tolerance: float) -> Tensor:
    """Assign to one rank after the other the windows that see the fewest columns: owner of each block, int64
    [n].

    cuts: number of sizes of the first window that are tried; tolerance: accepted deviation of a rank's work,
        as a fraction
    """
    owner = torch.full((len(work.costs),), -1, dtype=torch.int64)
    for rank in range(work.world_size):
        free = FreeBlocks(work, owner < 0)
        ranks_left = work.world_size - rank
        share = -(-free.n // ranks_left)
        target = float(free.cost.sum()) / ranks_left
        owner[free.ids if share == free.n else free.choose(share, target, cuts, tolerance)] = rank
    return owner


class FreeBlocks:
    """The blocks without an owner, on a circle."""

    def __init__(self, work: Work, free: Tensor) -> None:
        self.ids = free.nonzero()[:, 0]
        self.n = n = len(self.ids)
        self.cost = work.costs[self.ids]
        self.total = torch.zeros(2 * n + 1, dtype=torch.float64)
        torch.cumsum(torch.cat([self.cost, self.cost]), 0, out=self.total[1:])
        place = torch.zeros(len(free) + 1, dtype=torch.int64)
        torch.cumsum(free, 0, out=place[1:])
        column, first, last = work.readers.unbind(1)
        first, last = place[first], place[last]
        nonempty = last > first
        column = column[nonempty].repeat(2)
        first, last = (torch.cat([x[nonempty], x[nonempty] + n]) for x in (first, last))
        order = (column * (2 * n + 1) + first).argsort()
        column, self.first, self.last = column[order], first[order], last[order]
        self.place, self.hardest = torch.arange(n), int(self.cost.argmax())
        self.before = torch.zeros_like(self.last)  # where the column's previous run ends
        self.before[1:] = torch.where(column[1:] == column[:-1], self.last[:-1], 0)

    def work(self, size: int) -> Tensor:
        """Sum the work of the window of ``size`` blocks that starts at each block: float64 [n]."""
        return self.total[size : size + self.n] - self.total[: self.n]

    @computed_once
    def count_visible(self, size: int) -> Tensor:
        """Count the columns that each window of ``size`` blocks sees: int64 [n]. A run of blocks adds one to
        the windows that reach it and start behind the previous run of its column."""
        begin = torch.maximum(self.before, self.first - size + 1).clamp(0, self.n)
        until = torch.maximum(self.last.clamp(max=self.n), begin)
        step = torch.bincount(begin, minlength=self.n + 1) - torch.bincount(until, minlength=self.n + 1)
        return step.cumsum(0)[: self.n]

    def starts_with_hardest(self, size: int) -> Tensor:
        """Return the starts of the windows of ``size`` blocks that hold the costliest block, ascending."""
        first = self.hardest - size + 1
        parts = torch.arange(max(first, 0), self.hardest + 1), torch.arange(min(first, 0), 0) + self.n
        return torch.cat(parts)

    def choose(self, share: int, target: float, cuts: int, tolerance: float) -> Tensor:
        """Choose the blocks of one rank: ``share`` of them with ``target`` work, in one window or two."""
        sizes = sorted({share * k // cuts for k in range(1, cuts + 1)} - {0})
        width = max(tolerance * target, 1e-9)
        while True:
            options = [pair for size in sizes if (pair := self._pair(size, share - size, target, width))]
            if options:
                _, at, size, other = min(options)
                windows = torch.cat([torch.arange(size) + at, torch.arange(share - size) + other])
                return self.ids[windows % self.n]
            width *= 4

    def _pair(self, size: int, rest: int, target: float, width: float) -> tuple[int, int, int, int] | None:
        """Find the windows of ``size`` and ``rest`` blocks that see the fewest columns: (columns, start,
        size, start of the second window), None if no two fit.

        The second window is looked up by its work, in buckets of ``width``.
        """
        at = self.starts_with_hardest(size)
        steps = int(target / width) + 2
        bucket = (self.work(rest) / width).round().long().clamp(max=steps)
        least = torch.full((steps + 1,), torch.iinfo(torch.int64).max)
        least.scatter_reduce_(0, bucket, self.count_visible(rest) * self.n + self.place, "amin")
        least[steps] = torch.iinfo(torch.int64).max
        target_bucket = ((target - self.work(size)[at]) / width).round().long()
        best_window = least[target_bucket.clamp(0, steps)]
        other = best_window % self.n
        disjoint = ((other - at) % self.n >= size) & ((at - other) % self.n >= rest) | (rest == 0)
        valid = (target_bucket >= 0) & (best_window < torch.iinfo(torch.int64).max) & disjoint
        if not bool(valid.any()):
            return None
        columns = torch.where(
            valid, best_window // self.n + self.count_visible(size)[at], torch.iinfo(torch.int64).max
        )
        best = int(columns.argmin())
        return int(columns[best]), int(at[best]), size, int(other[best])
