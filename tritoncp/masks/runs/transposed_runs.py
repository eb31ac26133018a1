"""Runs stored by column.

In a prefix tree each key is seen by one interval of queries, while a query may see thousands of intervals of
keys: the runs of a million tokens in 10,000 segments take up to 140 MiB by row and 200 KiB by column.
Placement and traffic are computed from columns; a rank lists its rows only, for its kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.masks.runs.block_runs import Kind, Runs, ramps


class TransposedRuns(Runs):
    """Runs stored by column, for patterns whose columns list few ranges and whose rows may list thousands.

    ``columns`` holds the transposed pattern. All operations but ``ptr``, ``runs`` and ``_flat`` work on it.

    >>> upper = Runs.from_kinds(torch.tensor([[[[0, 1], [3, 0]]]], dtype=torch.uint8))
    >>> transpose(upper).counts()[0].tolist(), transpose(upper).runs.tolist()
    ([[[1, 1]]], [[0, 1, 0], [1, 2, 0], [0, 1, 1]])
    """

    columns: Runs

    def __init__(self, columns: Runs) -> None:
        object.__setattr__(self, "columns", columns)

    def __getstate__(self) -> dict[str, Runs]:
        return {"columns": self.columns}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TransposedRuns):
            return self.columns == other.columns
        return super().__eq__(other)

    @cached_property
    def by_rows(self) -> Runs:
        return _transpose(self.columns)

    @property
    def ptr(self) -> Tensor:
        return self.by_rows.ptr

    @property
    def runs(self) -> Tensor:
        return self.by_rows.runs

    @property
    def n_cols(self) -> int:
        return self.columns.shape[2]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, c, r = self.columns.shape
        return b, h, r, c

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        return self.columns.stored

    def to_kinds(self) -> Tensor:
        return self.columns.to_kinds().transpose(2, 3).contiguous()

    def expand(self, B: int, H: int) -> Runs:
        return TransposedRuns(self.columns.expand(B, H))

    def select(self, batch: slice | list[int], heads: slice | list[int] = slice(None)) -> Runs:
        return TransposedRuns(self.columns.select(batch, heads))

    def take(self, rows: Tensor) -> Runs:
        listed = torch.where(rows >= 0, rows, self.shape[2])  # rows that list nothing come last
        if bool((listed.diff(dim=1) < 0).any()):
            return self.by_rows.take(rows)
        edges = torch.arange(self.shape[2] + 1).expand(len(rows), -1).contiguous()
        columns = self.columns.remap(torch.searchsorted(listed, edges))
        return TransposedRuns(replace(columns, n_cols=rows.shape[1]))

    def remap(self, first: Tensor) -> Runs:
        copied = torch.full((len(first), int(first[:, -1].max())), -1)
        for row, edges in zip(copied, first):
            row[edges[0] : edges[-1]] = torch.arange(self.n_cols).repeat_interleave(edges.diff())
        return TransposedRuns(self.columns.take(copied))

    def counts(self) -> tuple[Tensor, Tensor]:
        b, h, r, c = self.shape
        line, start, end, kind = self.columns._flat()
        line = ((kind == Kind.FULL) * (b * h) + line // max(c, 1)) * (r + 1)
        edges, ones = torch.zeros(2 * b * h * (r + 1), dtype=torch.int64), torch.ones_like(line)
        edges.index_add_(0, line + start, ones).index_add_(0, line + end, -ones)
        masked, full = edges.view(2, b, h, r + 1).cumsum(3)[..., :r]
        return masked, full

    def sum_readers(self, rows: Tensor, weight: Tensor, group: Tensor, groups: int) -> Tensor:
        b, h, r, c = self.shape
        batch = max(len(rows), b)
        table = torch.zeros(groups, len(rows), r + 1, dtype=torch.int64)  # the last row lists nothing
        at, line = torch.where(rows >= 0, rows, r), torch.arange(len(rows))[:, None]
        table.index_put_((group.expand_as(rows), line, at), weight, accumulate=True)
        before = torch.nn.functional.pad(table[..., :r].cumsum(2), (1, 0)).expand(-1, batch, -1)
        line, start, end, _ = self.columns.expand(batch, h)._flat()
        row, column = line // max(1, h * c), line % max(1, c)
        total = torch.zeros(groups, batch * c, dtype=torch.int64)
        total.index_add_(1, row * c + column, before[:, row, end] - before[:, row, start])
        return total.view(groups, batch, c)

    def count_in_cells(self, row_edges: Tensor, column_edges: Tensor) -> Tensor:
        return self.columns.count_in_cells(column_edges, row_edges).transpose(1, 2)

    def unite(self, size: int = 1) -> Runs:
        return TransposedRuns(self.columns.unite(size))

    def _flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _transpose(self.columns)._flat()


def transpose(runs: Runs) -> Runs:
    """Swap rows and columns. The rows of the result are listed when they are read."""
    return runs.columns if isinstance(runs, TransposedRuns) else TransposedRuns(runs)


def _transpose(lines: Runs) -> Runs:
    """List the columns of a pattern as rows. Time and memory grow with the number of runs, not with rows
    times columns."""
    b, h, r, c = lines.shape
    row, start, end, kind = lines._flat()
    # Compare each row with the row before it. The pattern of row r enters twice: as `now` at r and as
    # `before` at r + 1 (one row past the last, so that every column ends there).
    now = row // max(r, 1) * (r + 1) + row % max(r, 1)
    code = kind + 1  # 0 = absent
    line = torch.cat([now, now, now + 1, now + 1])
    at = torch.cat([start, end, start, end])
    step = torch.cat([code, -code, code * 4, -code * 4])  # now + 4 * before
    order = (line * (c + 1) + at).argsort()
    line, at, state = line[order], at[order], step[order].cumsum(0)
    width = torch.where(line[1:] == line[:-1], at.diff(), 0)
    line, at, state = line[:-1], at[:-1], state[:-1]
    change = state % 4 != state // 4  # includes empty ranges, which `ramps` drops
    line, at, width, state = line[change], at[change], width[change], (state % 4)[change]
    first = line // (r + 1) * c + at  # the column, numbered over (B, H, C), whose kind becomes `state`
    # One event for each column of each changed range: from this row on, its kind is `state`.
    column, order = ramps(first, width).sort(stable=True)  # rows ascend already
    row, state = (x.repeat_interleave(width)[order] for x in (line % (r + 1), state))
    begins = (state[:-1] != 0).nonzero()[:, 0]  # never the last event, which ends a column
    return Runs._pack((b, h, c), r, column[begins], row[begins], row[begins + 1], state[begins] - 1)
