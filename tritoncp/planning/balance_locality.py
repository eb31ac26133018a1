"""The balancer that minimises remote keys under even work and even numbers of blocks.

Blocks lie on a circle. Ranks choose in turn: each takes two windows of the circle, one of which holds the
costliest free block, such that the two have the rank's share of blocks and work and see the fewest keys; its
blocks then leave the circle. Swaps of two blocks between ranks afterwards even out the work and save keys.

A long sequence is first placed in pieces of several blocks: the time hardly grows with its length. Many ranks
are placed in groups first, and the blocks of each group on its ranks: the time grows with the number of
ranks, not with its square.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import computed_once
from tritoncp.planning.balance_pieces import (
    MAX_PIECES,
    MAX_SEARCHED_RANKS,
    MIN_PIECES,
    View,
    count_groups,
    even_counts,
    piece_counts,
)
from tritoncp.planning.work import Work, merge_ranges, transpose_runs

MAX_EVEN_RATIO = 1.018  # max/mean work that counts as even
# On the work of one rank's windows, as a fraction of the mean; each yields a candidate placement.
TOLERANCES = (0.01, 0.015, 0.02)
SIZE_COUNTS = (64, 16)  # number of sizes of the first window; each yields a candidate placement
MAX_SWAP_CANDIDATES = 128  # blocks of each rank that a swap is chosen from
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


class Columns:
    """The key blocks that query blocks see, the masks side by side: columns [masks * width].

    row, start, end: the columns that query blocks see, as disjoint runs
    column, first, last: the blocks that see a column, as runs sorted by column
    """

    def __init__(self, work: View) -> None:
        self.costs, self.world_size = work.costs, work.world_size
        self.n, self.masks, self.width = len(work.costs), max(1, len(work.sees)), work.columns
        self.together = work.together
        rows, cols = [torch.zeros(0, 3, dtype=torch.int64)], [torch.zeros(0, 3, dtype=torch.int64)]
        for index, sees in enumerate(work.sees):
            offset = index * self.width
            rows.append(sees + torch.tensor([0, offset, offset]))
            cols.append(transpose_runs(sees, self.n, self.width) + torch.tensor([offset, 0, 0]))
        self.row, self.start, self.end = torch.cat(rows).T.contiguous()
        self.column, self.first, self.last = torch.cat(cols).T.contiguous()
        order = self.row.argsort(stable=True)
        self.row, self.start, self.end = self.row[order], self.start[order], self.end[order]
        self.runs_from = torch.searchsorted(self.row, torch.arange(self.n + 1))
        own = self.row + (self.start // max(1, self.width)) * self.width
        inside = (self.start <= own) & (own < self.end)
        self.sees_itself = torch.zeros(self.masks * self.width, dtype=torch.bool)
        if self.together:
            self.sees_itself[own[inside]] = True

    def deal(self, cuts: int, tolerance: float) -> Tensor:
        """Give ranks in turn the windows that see the fewest columns: owner of each block, int64 [blocks]."""
        owner = torch.full((self.n,), -1, dtype=torch.int64)
        for rank in range(self.world_size):
            free = FreeBlocks(self, owner < 0)
            ranks_left = self.world_size - rank
            share = -(-free.n // ranks_left)
            if share == 0:
                break
            target = float(free.cost.sum()) / ranks_left
            owner[free.ids if share == free.n else free.choose(share, target, cuts, tolerance)] = rank
        return owner


class FreeBlocks:
    """The blocks without an owner, on a circle."""

    def __init__(self, columns: Columns, free: Tensor) -> None:
        self.ids = free.nonzero()[:, 0]
        self.n = n = len(self.ids)
        self.cost = columns.costs[self.ids]
        self.total = torch.zeros(2 * n + 1, dtype=torch.float64)
        torch.cumsum(torch.cat([self.cost, self.cost]), 0, out=self.total[1:])
        place = torch.zeros(len(free) + 1, dtype=torch.int64)
        torch.cumsum(free, 0, out=place[1:])
        first, last = place[columns.first], place[columns.last]
        nonempty = last > first
        column, first, last = (x[nonempty] for x in (columns.column, first, last))
        column, first, last = (
            torch.cat([column, column]),
            torch.cat([first, first + n]),
            torch.cat([last, last + n]),
        )
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


class Assignment:
    """An owner for each block, improved by swaps of two blocks.

    count: int32 [ranks, columns], how many of a rank's blocks see a column
    joins: float32 [ranks, blocks], remote columns that a rank gains with a block
    leaves: float32 [blocks], remote columns that the owner gains (or saves, below 0) without the block
    """

    def __init__(self, columns: Columns, owner: Tensor, cap: float | None = None) -> None:
        self.columns, self.owner = columns, owner.clone()
        self.home = (
            owner.repeat(columns.masks)
            if columns.together
            else torch.full((columns.masks * columns.width,), -1)
        )
        self.work = torch.zeros(columns.world_size, dtype=torch.float64).index_add_(0, owner, columns.costs)
        self.cap = MAX_EVEN_RATIO * float(self.work.mean()) if cap is None else cap

    @cached_property
    def count(self) -> Tensor:
        c, width = self.columns, self.home.numel()
        edges = torch.zeros(c.world_size, width + 1, dtype=torch.int32)
        line, one = self.owner[c.row] * (width + 1), torch.ones(len(c.row), dtype=torch.int32)
        edges.view(-1).index_add_(0, line + c.start, one).index_add_(0, line + c.end, -one)
        return edges.cumsum_(1)[:, :width]

    def count_remote(self) -> int:
        """Count the remote columns of all ranks, without a table of ranks x columns."""
        c, width = self.columns, self.home.numel()
        line = self.owner[c.row] * width  # runs of neighbouring ranks may touch and merge: only lengths count
        start, end = merge_ranges(line + c.start, line + c.end)
        own = (self.home * width + torch.arange(width))[self.home >= 0]  # columns of own keys
        at = torch.searchsorted(start, own, right=True)
        is_own = own < torch.nn.functional.pad(end, (1, 0), value=-1)[at]
        return int((end - start).sum()) - int(is_own.sum())

    def remote(self, rank: int) -> int:
        return int(((self.count[rank] > 0) & (self.home != rank)).sum())

    def rank(self) -> tuple[float, int]:
        """Return the sort key of placements, the best first: largest work down to the cap, then remote
        columns."""
        return max(float(self.work.max()), self.cap), self.count_remote()

    def improve(self, steps: int) -> None:
        """Swap two blocks of two ranks as long as that helps: until no rank's work exceeds the cap, then to
        save keys."""
        ranks = len(self.work)
        self.joins, self.leaves = torch.zeros(ranks, self.columns.n), torch.zeros(self.columns.n)
        self._measure(range(ranks))
        settled: set[tuple[int, int]] = set()
        for _ in range(steps):
            pair = self._choose_ranks(settled)
            if pair is None:
                return
            if self._swap(*pair):
                settled = {other for other in settled if not set(other) & set(pair)}
            else:
                settled.add(pair)

    def _measure(self, ranks: Iterable[int]) -> None:
        """Recompute joins and leaves of these ranks."""
        c = self.columns
        for rank in ranks:
            count, away = self.count[rank], self.home != rank
            unseen = (count == 0) & away
            self.joins[rank] = (
                self._count_in_rows(unseen)
                - self._count_own(unseen & c.sees_itself)
                - self._count_own(count > 0)
            )
            owned = self.owner == rank
            leaves = self._count_own(count > c.sees_itself) - self._count_in_rows((count == 1) & away)
            self.leaves[owned] = leaves[owned]

    def _count_in_rows(self, flag: Tensor) -> Tensor:
        """Count the flagged columns that each block sees."""
        c = self.columns
        before = torch.zeros(len(flag) + 1, dtype=torch.int32)
        torch.cumsum(flag, 0, out=before[1:])
        return torch.zeros(c.n).index_add_(0, c.row, (before[c.end] - before[c.start]).float())

    def _count_own(self, flag: Tensor) -> Tensor:
        """Count the flagged columns that are each block's own keys."""
        c = self.columns
        return flag.view(c.masks, c.n).sum(0).float() if c.together else torch.zeros(c.n)

    def _choose_ranks(self, settled: set[tuple[int, int]]) -> tuple[int, int] | None:
        """Choose the pair of ranks for the next swap; None if no pair promises a gain."""
        busy = int(self.work.argmax())
        if float(self.work[busy]) > self.cap:
            for other in self.work.argsort().tolist():
                pair = min(busy, other), max(busy, other)
                if other != busy and pair not in settled:
                    return pair
            return None
        moves = self.joins + self.leaves  # [ranks, blocks]
        ranks = len(self.work)
        least = torch.full((ranks, ranks), torch.inf)
        least.scatter_reduce_(1, self.owner.expand(ranks, -1), moves, "amin")
        saved = (least + least.T).triu(1)
        for low, high in settled:
            saved[low, high] = 0
        best = int(saved.argmin())
        return divmod(best, ranks) if float(saved.flatten()[best]) < 0 else None

    def _swap(self, low: int, high: int) -> bool:
        """Swap the two blocks of these ranks with the largest gain; False if no swap helps."""
        low_blocks, high_blocks = (self._cheapest(*pair) for pair in ((low, high), (high, low)))
        moved = (
            self.joins[high, low_blocks] + self.leaves[low_blocks],
            self.joins[low, high_blocks] + self.leaves[high_blocks],
        )
        shift = self.columns.costs[low_blocks][:, None] - self.columns.costs[high_blocks]
        change = self._weigh(self.work[low] - shift) + self._weigh(self.work[high] + shift)
        change += (moved[0][:, None] + moved[1]).double()
        best = int(change.argmin())
        one, two = int(low_blocks[best // len(high_blocks)]), int(high_blocks[best % len(high_blocks)])
        before = self._value(low, high)
        self._exchange(one, two)
        if self._value(low, high) >= before:
            self._exchange(two, one)
            return False
        self._measure((low, high))
        return True

    def _cheapest(self, rank: int, to: int) -> Tensor:
        """Blocks of a rank that another would gain the fewest keys with."""
        owned = (self.owner == rank).nonzero()[:, 0]
        moves = self.joins[to, owned] + self.leaves[owned]
        return owned[moves.topk(min(MAX_SWAP_CANDIDATES, len(owned)), largest=False).indices]

    def _weigh(self, work: Tensor) -> Tensor:
        """Convert work above the cap to columns: a hundredth of the cap equals all columns."""
        return (work - self.cap).clamp(min=0) * (100 * self.home.numel() / self.cap)

    def _value(self, low: int, high: int) -> float:
        """Return the part of the objective that depends on these two ranks, to be minimised."""
        return self.remote(low) + self.remote(high) + float(self._weigh(self.work[[low, high]]).sum())

    def _exchange(self, one: int, two: int) -> None:
        c, (a, b) = self.columns, (int(self.owner[one]), int(self.owner[two]))
        for block, source, target in ((one, a, b), (two, b, a)):
            for run in range(int(c.runs_from[block]), int(c.runs_from[block + 1])):
                columns = slice(int(c.start[run]), int(c.end[run]))
                self.count[source, columns] -= 1
                self.count[target, columns] += 1
            self.owner[block] = target
            if c.together:
                self.home[block :: c.n] = target
            self.work[source] -= c.costs[block]
            self.work[target] += c.costs[block]
