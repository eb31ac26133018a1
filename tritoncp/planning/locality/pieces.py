"""The blocks that the balancer "locality" places: pieces of neighbouring ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.masks.block_runs import Runs
from tritoncp.masks.transposed_runs import transpose
from tritoncp.planning.work import Work


@dataclass(frozen=True, eq=False)
class View:
    """Blocks to be placed, or pieces of neighbouring blocks, and the columns of keys that they see.

    costs:    work of each block, float64 on the CPU
    visible:  for each mask, the columns that each block sees, as of :class:`Work`
    width:    columns of each mask
    together: whether the keys of block i, column i, are on the rank of its queries
    """

    costs: Tensor
    world_size: int
    visible: tuple[Runs, ...]
    width: int
    together: bool

    @classmethod
    def of(cls, work: Work) -> View:
        return cls(work.costs.cpu().double(), work.world_size, work.visible, work.columns, work.together)

    @property
    def n(self) -> int:
        return len(self.costs)

    @property
    def masks(self) -> int:
        return max(1, len(self.visible))

    def in_pieces(self, size: int) -> View:
        """Return the view of pieces of ``size`` blocks; a piece sees the columns that any of its blocks
        sees."""
        if size == 1:
            return self
        blocks, width = -(-self.n // size), -(-self.width // size)
        costs = torch.zeros(blocks, dtype=torch.float64).index_add_(
            0, torch.arange(self.n) // size, self.costs
        )
        visible = tuple(runs.unite(size) for runs in self.visible)
        return replace(self, costs=costs, visible=visible, width=width)

    @cached_property
    def runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The columns that blocks see, the masks side by side: disjoint runs (block, first column, end),
        sorted by block."""
        parts = [runs.table() + torch.tensor([0, i, i]) * self.width for i, runs in enumerate(self.visible)]
        table = torch.cat([torch.zeros(0, 3, dtype=torch.int64), *parts])
        row, start, end = table[table[:, 0].argsort(stable=True)].T.contiguous()
        return row, start, end

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor, Tensor]:
        """The blocks that see each column, the masks side by side: runs (column, first block, end)."""
        parts = [
            transpose(runs).table() + torch.tensor([i * self.width, 0, 0])
            for i, runs in enumerate(self.visible)
        ]
        column, first, last = torch.cat([torch.zeros(0, 3, dtype=torch.int64), *parts]).T.contiguous()
        return column, first, last


def loads(owner: Tensor, costs: Tensor, world_size: int) -> Tensor:
    """Sum the work of each rank's blocks: float64 [ranks]."""
    return torch.zeros(world_size, dtype=torch.float64).index_add_(0, owner, costs)


def even_counts(owner: Tensor, view: View) -> Tensor:
    """Move blocks, the cheapest first, from ranks with too many to ranks with too few and the least work,
    until ranks hold equal numbers to within one."""
    owner, ranks = owner.clone(), view.world_size
    counts = owner.bincount(minlength=ranks)
    share, longer = divmod(len(owner), ranks)
    quota = torch.full((ranks,), share)
    quota[counts.argsort(descending=True, stable=True)[:longer]] += 1
    load = loads(owner, view.costs, ranks)
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
