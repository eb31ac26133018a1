"""Shifts of rows within documents: where each row of a shifted tensor comes from, and the rows that ranks
send.

All ranks know the placement and the documents, so that no rank has to tell another which rows it sends.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import computed_once
from tritoncp.core.host_copy import on_host
from tritoncp.masks.runs.block_runs import content
from tritoncp.planning.placement import Placement


@dataclass(frozen=True, eq=False)
class ShiftMoves:
    """Rows that one rank keeps, sends and receives for a shift. A row is an index into the buffer, int64 [1,
    n]; if batch rows differ, a batch row and that index, int64 [2, n].

    kept:     rows whose values stay on the rank; ``kept_at``: the rows that get them
    sent:     rows for other ranks, by rank, then by batch row and position; no row twice for one rank
    counts:   number of rows sent to each rank
    sources:  number of rows received from each rank
    arrivals: received row, int64 [n], that each of the rows ``arrivals_at`` gets
    """

    kept: Tensor
    kept_at: Tensor
    sent: Tensor
    arrivals: Tensor
    arrivals_at: Tensor
    counts: list[int]
    sources: list[int]


@dataclass(frozen=True, eq=False)
class Shift:
    """A shift of the rows of a sequence.

    placement: placement of the tensor and of the result
    source:    for each position, the position of the row that it gets, -1 for none: int64 [B or 1, length]
    """

    placement: Placement
    source: Tensor

    @property
    def batch(self) -> int:
        """Number of batch rows if placements or documents differ between them, else 1."""
        return max(self.placement.batch, len(self.source))

    @cached_property
    def digest(self) -> bytes:
        """Digest of placement and sources: equal for equal shifts, on every rank."""
        return hashlib.sha256(self.placement.digest + content(self.source)).digest()

    @cached_property
    @on_host
    def is_injective(self) -> bool:
        """Whether all positions get different rows, so that the gradient of a row has one summand."""
        rows = [row[row >= 0] for row in self.source]
        return all(len(row.unique()) == len(row) for row in rows)

    @cached_property
    @on_host
    def is_local(self) -> bool:
        """Whether every rank already has the rows that it needs."""
        at, owner, _ = self._moved
        return bool((at == owner).all())

    @cached_property
    def _moved(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each position that gets a row: its rank, int64 [n]; the rank that has the row, int64 [n]; and
        (batch row, row of the result, row of the tensor, position in the tensor), int64 [4, n]."""
        batch = self.batch
        place = self.placement.inverse.expand(batch, -1)
        source = self.source.expand(batch, -1)
        origin = place.gather(1, source.clamp(min=0))
        held = (source >= 0) & (place >= 0) & (origin >= 0)
        b = held.nonzero(as_tuple=True)[0]
        rows = max(1, self.placement.s_max)
        index = torch.stack([b, place[held] % rows, origin[held] % rows, source[held]])
        return place[held] // rows, origin[held] // rows, index

    @computed_once
    @on_host
    def moves(self, rank: int) -> ShiftMoves:
        """Return the rows that a rank keeps, sends and receives."""
        at, owner, index = self._moved
        stays = (at == rank) & (owner == rank)
        comes, goes = (at == rank) & (owner != rank), (at != rank) & (owner == rank)
        order = index[0] * self.placement.length + index[3]  # by batch row and position of the source
        size = self.batch * self.placement.length
        arrived, arrivals = (owner * size + order)[comes].unique(return_inverse=True)
        sent, first = (at * size + order)[goes].unique(return_inverse=True)
        row = torch.empty((2, len(sent)), dtype=torch.int64)
        row[:, first] = index[[0, 2]][:, goes]
        world_size = self.placement.world_size
        counts, sources = (
            torch.bincount(keys.div(size, rounding_mode="floor"), minlength=world_size).tolist()
            for keys in (sent, arrived)
        )
        start = 0 if self.batch > 1 else 1  # only the row if there are no batch rows
        return ShiftMoves(
            index[[0, 2]][start:, stays],
            index[[0, 1]][start:, stays],
            row[start:],
            arrivals,
            index[[0, 1]][start:, comes],
            counts,
            sources,
        )


def shifted_documents(within: Tensor, shift: int) -> Tensor:
    """Return the source of each position, as in :class:`Shift`, for a shift within contiguous documents.

    within: position of each token in its document, int64 [B, N]

    >>> shifted_documents(torch.tensor([[0, 1, 2, 0, 1]]), 1).tolist()
    [[-1, 0, 1, -1, 3]]
    >>> shifted_documents(torch.tensor([[0, 1, 2, 0, 1]]), -1).tolist()
    [[1, 2, -1, 4, -1]]
    """
    length = within.shape[1]
    position = torch.arange(length)
    if shift >= 0:
        return torch.where(within >= shift, position - shift, -1)
    target = (position - shift).clamp(max=max(0, length - 1))
    inside = (position - shift < length) & (within[:, target] >= -shift)
    return torch.where(inside, position - shift, -1)


def shifted_tree(depth: Tensor, shift: int) -> Tensor:
    """Return the source of each position, as in :class:`Shift`, for a shift along the paths of a prefix tree
    in depth-first order. Raises ValueError for a negative shift if a token has several descendants at that
    distance.

    depth: number of tokens before each token on its path, int64 [B, N]

    >>> shifted_tree(torch.tensor([[0, 1, 2, 2, 3, 0]]), 2).tolist()
    [[-1, -1, 0, 0, 1, -1]]
    """
    earlier = torch.stack([token_ancestors(row, abs(shift)) for row in depth])
    if shift >= 0:
        return earlier
    source = torch.full_like(earlier, -1)
    for row, ancestor in zip(source, earlier):
        (token,) = (ancestor >= 0).nonzero(as_tuple=True)
        children = torch.bincount(ancestor[token], minlength=1)
        if bool((children > 1).any()):
            at = int((children > 1).nonzero()[0])
            raise ValueError(
                f"shift={shift}: token {at} of the tree has {int(children[at])} tokens {-shift} after it, "
                "one on each branch: shift the rows of earlier tokens to later ones, by a positive number, "
                "or take labels from tree_edges"
            )
        row[ancestor[token]] = token
    return source


def token_ancestors(depth: Tensor, distance: int) -> Tensor:
    """Return the token ``distance`` before each token on its path, -1 for none: int64 [N].

    depth: number of tokens before each token on its path, [N], in depth-first order: a token's ancestor at
        some depth is the last earlier token of that depth

    >>> token_ancestors(torch.tensor([0, 1, 2, 2, 3, 0]), 1).tolist()
    [-1, 0, 1, 1, 3, -1]
    """
    n, position = len(depth), torch.arange(len(depth))
    by_depth = (depth * n + position).sort().values
    at = torch.searchsorted(by_depth, (depth - distance) * n + position, right=True) - 1
    return torch.where(depth >= distance, by_depth[at.clamp(min=0)] % max(1, n), -1)
