"""Moves of rows from one placement of a sequence to another: the rows that each rank keeps, sends, receives.

All ranks know both placements, so that no rank has to tell another which rows it sends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncp.planning.placement import Placement


@dataclass(frozen=True, eq=False)
class Moves:
    """Rows that one rank sends, keeps and receives. A row is an index into the buffer, int64 [1, n]; if batch
    rows are placed differently, a batch row and that index, int64 [2, n].

    sent:      rows of the source buffer for other ranks, by rank, then by batch row and position
    counts:    number of rows sent to each rank
    kept:      rows of the source buffer that stay on the rank; ``kept_at``: their rows in the target buffer
    arrivals:  rows of the target buffer that other ranks send, in the order in which they arrive
    sources:   number of rows received from each rank
    is_full:   whether kept rows and arrivals are all rows of the target buffer
    is_local:  whether every rank keeps all of its rows
    """

    sent: Tensor
    kept: Tensor
    kept_at: Tensor
    arrivals: Tensor
    counts: list[int]
    sources: list[int]
    is_full: bool
    is_local: bool


def moves_between(source: Placement, target: Placement, rank: int) -> Moves:
    """Compute the moves of one rank from the buffers of ``source`` to those of ``target``, two placements of
    a sequence on equally many ranks.

    >>> from tritoncp.planning.placement import by_blocks, in_order
    >>> moves = moves_between(by_blocks(4, 1, [[[0, 3], [1, 2]]]), in_order(4, 2), 0)
    >>> moves.sent.tolist(), moves.kept.tolist(), moves.arrivals.tolist(), moves.counts
    ([[1]], [[0]], [[1]], [0, 1])
    """
    sent, kept = _leaving_and_staying(source, target, rank)
    arrivals, kept_at = _leaving_and_staying(target, source, rank)
    remote = rows_between(source, target).fill_diagonal_(0)
    rows = max(source.batch, target.batch) * target.lengths[rank]
    is_full = kept_at.shape[1] + arrivals.shape[1] == rows
    counts, sources = remote[rank].tolist(), remote[:, rank].tolist()
    return Moves(sent, kept, kept_at, arrivals, counts, sources, is_full, not bool(remote.any()))


def _leaving_and_staying(placement: Placement, other: Placement, rank: int) -> tuple[Tensor, Tensor]:
    """Split a rank's rows into rows that another rank has in the other placement, and rows that it has
    itself. Both are indices as in :class:`Moves`, sorted by that rank, then by batch row and position."""
    position, owners = placement.positions(rank), _owners(other)
    batch = max(len(position), len(owners))
    position = position.expand(batch, -1)
    peer = owners.expand(batch, -1).gather(1, position.clamp(min=0))
    index = ((position >= 0) & (peer >= 0)).nonzero().T
    peer, position = peer[tuple(index)], position[tuple(index)]
    order = ((peer * batch + index[0]) * placement.length + position).argsort()
    index, is_own = (index if batch > 1 else index[1:])[:, order], peer[order] == rank
    return index[:, ~is_own], index[:, is_own]


def _owners(placement: Placement) -> Tensor:
    """Return the rank that has each position, -1 for padding: int64 [Bp, length]."""
    return placement.inverse.div(max(1, placement.s_max), rounding_mode="floor")


def rows_between(source: Placement, target: Placement) -> Tensor:
    """Count the rows that rank s has under ``source`` and rank t under ``target``, at [s, t]: int64 [W, W],
    summed over the batch rows if these are placed differently.

    >>> from tritoncp.planning.placement import by_blocks, in_order
    >>> rows_between(by_blocks(4, 1, [[[0, 3], [1, 2]]]), in_order(4, 2))
    tensor([[1, 1],
            [1, 1]])
    """
    before, after = torch.broadcast_tensors(_owners(source), _owners(target))
    held, world_size = (before >= 0) & (after >= 0), source.world_size
    codes = before[held] * world_size + after[held]
    return torch.bincount(codes, minlength=world_size**2).view(world_size, world_size)
