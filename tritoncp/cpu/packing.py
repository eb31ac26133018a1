"""Packed rows: the tokens of a buffer in the order of its slots, concatenated over batch rows: [H, T, D].

In packed rows a run of slots is one range; there is no padding and no batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tritoncp.masks.runs.block_runs import ramps

ALIGNMENT = 64  # bytes, the alignment of torch's allocations


@dataclass(frozen=True, eq=False)
class Packing:
    """The map between a buffer [B, H, S, D] and its packed rows.

    rows:      for each batch row, the buffer's rows in packed order; None: all rows in order
    positions: global position of each packed row, int64 [T]
    edges:     for each batch row, the first packed row of each slot, then the end of the last slot
    """

    rows: tuple[Tensor | None, ...]
    positions: Tensor
    edges: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, slots: Tensor, batch: int, length: int) -> Packing:
        """Pack the slots int32 [1 or B, n, 3] of a buffer with ``length`` rows."""
        rows, positions, edges, first = [], [], [], 0
        tables = slots.long().expand(batch, -1, -1)
        for table in tables:
            row, position, tokens = table.unbind(1)
            index = ramps(row, tokens)
            whole = len(index) == length and bool((index == torch.arange(length)).all())
            rows.append(None if whole else index)
            positions.append(ramps(position, tokens))
            ends = [0, *tokens.cumsum(0).tolist()]
            edges.append(tuple(first + end for end in ends))
            first += ends[-1]
        empty = torch.zeros(0, dtype=torch.int64)
        return cls(tuple(rows), torch.cat([empty, *positions]), tuple(edges))

    def pack(self, x: Tensor, dtype: torch.dtype, width: int | None = None) -> Tensor:
        """Return the packed rows [H, T, width] of x [B, H, S, D], with zeros in channels from D on. The
        memory layout is always the same, since BLAS may round differently for other layouts."""
        parts = [y if rows is None else y.index_select(1, rows) for y, rows in zip(x, self.rows)]
        empty = x.new_zeros(x.shape[1], 0, x.shape[3])  # if the batch is empty
        packed = (parts[0] if len(parts) == 1 else torch.cat([empty, *parts], 1)).to(dtype)
        if width is not None and width > packed.shape[2]:
            packed = torch.nn.functional.pad(packed, (0, width - packed.shape[2]))
        aligned = packed.is_contiguous() and packed.data_ptr() % ALIGNMENT == 0
        return packed if aligned else packed.clone(memory_format=torch.contiguous_format)

    def unpack(self, packed: Tensor, into: Tensor, add: bool = False) -> None:
        """Write packed rows [H, T, D] to ``into`` [B, H, S, D], or add them. If batch rows of ``into`` share
        memory (stride 0), the sum over the batch is written."""
        shared = into.stride(0) == 0 and into.shape[0] > 1
        if shared and not add:
            into[0].zero_()
        for target, rows, edges in zip(into, self.rows, self.edges, strict=True):
            part = packed[:, edges[0] : edges[-1]]
            if rows is None:
                target.add_(part) if add or shared else target.copy_(part)
            elif add or shared:
                target.index_add_(1, rows, part.to(target.dtype))
            else:
                target.index_copy_(1, rows, part.to(target.dtype))


def gather(x: Tensor, starts: Sequence[int], length: int) -> Tensor:
    """Gather the rows [start, start + length) of x [H, T, D] for each start: [n, H, length, D]; a view if the
    starts are evenly spaced."""
    step = even_step(starts)
    if step is not None:
        (heads, rows, inner), shape = x.stride(), (len(starts), x.shape[0], length, x.shape[2])
        return x.as_strided(shape, (step * rows, heads, rows, inner), x.storage_offset() + starts[0] * rows)
    return x[:, row_index(starts, length)].transpose(0, 1)


def row_index(starts: Sequence[int], length: int) -> Tensor:
    """Return the row indices of ranges of equal length: int64 [n, length]."""
    return torch.tensor(starts)[:, None] + torch.arange(length)


def even_step(starts: Sequence[int]) -> int | None:
    """Return the step of an evenly spaced ascending list; 0 for one item, None if not evenly spaced.

    >>> even_step([3, 5, 7]), even_step([3]), even_step([0, 1, 5])
    (2, 0, None)
    """
    if len(starts) == 1:
        return 0
    step = starts[1] - starts[0]
    even = step > 0 and all(b - a == step for a, b in pairwise(starts))
    return step if even else None


def scatter(x: Tensor, starts: Sequence[int], parts: Tensor) -> None:
    """Write parts [n, H, length, D] to disjoint ranges of rows of x [H, T, D] that begin at ``starts``.

    All parts are written by one operation, since threads synchronise after each operation.
    """
    if even_step(starts) is not None:
        gather(x, starts, parts.shape[2]).copy_(parts)
    else:
        x[:, row_index(starts, parts.shape[2])] = parts.transpose(0, 1)


def scatter_add(x: Tensor, starts: Sequence[int], parts: Tensor) -> None:
    """Add parts [n, H, length, D] to ranges of rows of x [H, T, D] that begin at ``starts``, by one operation
    for each group of :func:`disjoint`."""
    length = parts.shape[2]
    for index in disjoint(starts, length):
        subset = [starts[i] for i in index]
        rows = gather(x, subset, length)
        if even_step(subset) is not None:
            in_order = index == list(range(len(starts)))
            rows.add_(parts if in_order else parts[index])
        else:
            scatter(x, subset, rows + parts[index])


def disjoint(starts: Sequence[int], length: int) -> list[list[int]]:
    """Split ranges of equal length into groups of disjoint ranges; return the indices of each group.

    >>> disjoint([0, 2, 4, 0], 4)
    [[0, 2], [3], [1]]
    """
    groups: list[list[int]] = []
    ends: list[int] = []
    for i in sorted(range(len(starts)), key=starts.__getitem__):
        level = next((g for g, end in enumerate(ends) if end <= starts[i]), len(ends))
        if level == len(ends):
            groups.append([])
            ends.append(0)
        groups[level].append(i)
        ends[level] = starts[i] + length
    return groups
