"""Swaps of two blocks between ranks, which even out the work and save keys."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.masks.block_runs import merge_ranges
from tritoncp.planning.locality.pieces import View

MAX_SWAP_CANDIDATES = 128  # blocks of each rank that a swap is chosen from
MAX_IMPROVED_SIZE = 1 << 24  # blocks x ranks beyond which the tables of swaps would take gigabytes


class Assignment:
    """An owner for each block, improved by swaps of two blocks.

    count: int32 [ranks, columns], how many of a rank's blocks see a column
    joins: float32 [ranks, blocks], remote columns that a rank gains with a block
    leaves: float32 [blocks], remote columns that the owner gains (or saves, below 0) without the block
    """

    def __init__(self, view: View, owner: Tensor, cap: float) -> None:
        self.view, self.owner, self.cap = view, owner.clone(), cap
        nobody = torch.full((view.masks * view.width,), -1)
        self.home = owner.repeat(view.masks) if view.together else nobody
        self.work = torch.zeros(view.world_size, dtype=torch.float64).index_add_(0, owner, view.costs)

    @cached_property
    def count(self) -> Tensor:
        view, rows = self.view, torch.arange(self.view.n)[None]
        tables = [
            visible.sum_readers(rows, torch.ones_like(rows), self.owner, view.world_size)[:, 0]
            for visible in view.visible
        ]
        return torch.cat(tables, 1).int() if tables else torch.zeros(view.world_size, len(self.home)).int()

    def count_remote(self) -> int:
        """Count the remote columns of all ranks, in large worlds without a table of ranks x columns."""
        if len(self.work) * self.view.n <= MAX_IMPROVED_SIZE:
            return sum(map(self.remote, range(len(self.work))))
        (row, start, end), width = self.view.runs, self.home.numel()
        line = self.owner[row] * width  # runs of neighbouring ranks may touch and merge: only lengths count
        start, end = merge_ranges(line + start, line + end)
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
        if ranks * self.view.n > MAX_IMPROVED_SIZE:
            return
        self.joins, self.leaves = torch.zeros(ranks, self.view.n), torch.zeros(self.view.n)
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
        sees_itself = self.view.sees_itself
        for rank in ranks:
            count, away = self.count[rank], self.home != rank
            unseen = (count == 0) & away
            self.joins[rank] = (
                self._count_in_rows(unseen)
                - self._count_own(unseen & sees_itself)
                - self._count_own(count > 0)
            )
            owned = self.owner == rank
            leaves = self._count_own(count > sees_itself) - self._count_in_rows((count == 1) & away)
            self.leaves[owned] = leaves[owned]

    def _count_in_rows(self, flag: Tensor) -> Tensor:
        """Count the flagged columns that each block sees."""
        row, start, end = self.view.runs
        before = torch.zeros(len(flag) + 1, dtype=torch.int32)
        torch.cumsum(flag, 0, out=before[1:])
        return torch.zeros(self.view.n).index_add_(0, row, (before[end] - before[start]).float())

    def _count_own(self, flag: Tensor) -> Tensor:
        """Count the flagged columns that are each block's own keys."""
        view = self.view
        return flag.view(view.masks, view.n).sum(0).float() if view.together else torch.zeros(view.n)

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
        shift = self.view.costs[low_blocks][:, None] - self.view.costs[high_blocks]
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
        view, (a, b) = self.view, (int(self.owner[one]), int(self.owner[two]))
        _, start, end = view.runs
        for block, source, target in ((one, a, b), (two, b, a)):
            for run in range(int(view.runs_from[block]), int(view.runs_from[block + 1])):
                columns = slice(int(start[run]), int(end[run]))
                self.count[source, columns] -= 1
                self.count[target, columns] += 1
            self.owner[block] = target
            if view.together:
                self.home[block :: view.n] = target
            self.work[source] -= view.costs[block]
            self.work[target] += view.costs[block]
