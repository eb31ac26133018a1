"""Pieces of neighbouring blocks, which the balancer "locality" places, and equal numbers of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.planning.work import Work


def join_blocks(work: Work, size: int) -> Work:
    """Return the work of pieces of ``size`` blocks; a piece sees the columns that any of its blocks sees."""
    piece = torch.arange(len(work.costs)) // size
    costs = torch.zeros(-(-len(piece) // size), dtype=torch.float64).index_add_(0, piece, work.costs)
    return Work(costs, work.world_size, tuple(runs.unite(size) for runs in work.visible), work.together)


def loads(owner: Tensor, costs: Tensor, world_size: int) -> Tensor:
    """Sum the work of each rank's blocks: float64 [ranks]."""
    return torch.zeros(world_size, dtype=torch.float64).index_add_(0, owner, costs)


def even_counts(owner: Tensor, work: Work) -> Tensor:
    """Even out the numbers of blocks, to within one: take the cheapest blocks from ranks with too many, then
    assign these and blocks without an owner (-1), the costliest first, to ranks with too few blocks and the
    min work."""
    owner, ranks = owner.clone(), work.world_size
    counts = owner[owner >= 0].bincount(minlength=ranks)
    share, longer = divmod(len(owner), ranks)
    quota = torch.full((ranks,), share)
    quota[counts.argsort(descending=True, stable=True)[:longer]] += 1
    for rank in (counts > quota).nonzero()[:, 0].tolist():
        blocks = (owner == rank).nonzero()[:, 0]
        extra = int(counts[rank] - quota[rank])
        owner[blocks[work.costs[blocks].argsort(stable=True)[:extra]]] = -1
    room, held, free = (quota - counts).clamp(min=0), owner >= 0, (owner < 0).nonzero()[:, 0]
    load = loads(owner[held], work.costs[held], ranks)
    for block in free[work.costs[free].argsort(descending=True, stable=True)].tolist():
        to = int(load.masked_fill(room == 0, torch.inf).argmin())
        owner[block] = to
        room[to] -= 1
        load[to] += work.costs[block]
    return owner
