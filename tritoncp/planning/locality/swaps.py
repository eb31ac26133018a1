"""Swaps of two blocks between ranks, which even out the work and save keys."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.planning.locality.windows import Columns
from tritoncp.planning.work import merge_ranges

MAX_EVEN_RATIO = 1.018  # max/mean work that counts as even
MAX_SWAP_CANDIDATES = 128  # blocks of each rank that a swap is chosen from


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
