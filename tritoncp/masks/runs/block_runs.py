"""Runs: a block-sparse pattern stored as a short list of column ranges for each row of blocks.

Index lists and dense block maps of a million-token mask take hundreds of MiB; its runs take a few hundred
KiB, because the listed blocks of a row nearly always form a few ranges. In a prefix tree only the blocks of a
column form a few ranges: such a pattern is stored by column (`transposed_runs`).
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass

import torch
from torch import Tensor


class Kind(enum.IntEnum):
    """How a kernel treats a listed block."""

    MASKED = 0  # pairs are hidden by the row interval or the mask_mod
    FULL = 1  # every pair is visible
    BOUNDED = 2  # listed as full, but q_len or kv_len cuts the block: every pair in range is visible


ABSENT = 3  # an unlisted block; only in dense maps of kinds, never in a run
_CELLS = 1 << 20  # pairs of a run and a cell that are counted at a time


@dataclass(frozen=True, eq=False)
class Runs:
    """Block rows as column runs. Immutable, picklable, on the CPU, compared by value.

    Runs of a row do not touch unless their kinds differ, so equal patterns have equal tensors.

    >>> r = Runs.from_kinds(torch.tensor([[[[1, 1, 0, 3], [3, 0, 0, 1]]]], dtype=torch.uint8))
    >>> r.runs.tolist()     # (start, end, kind): masked runs of a row first, then its full ones
    [[2, 3, 0], [0, 2, 1], [1, 3, 0], [3, 4, 1]]
    >>> r.ptr.tolist()      # (first masked, first full, end) of each row
    [[[[0, 1, 2], [2, 3, 4]]]]
    """

    ptr: Tensor  # int32 [B, H, R, 3]: runs[begin:mid] are MASKED or BOUNDED, runs[mid:end] FULL
    runs: Tensor  # int32 [n, 3]: (start, end, kind), half open; sorted by start in either group
    n_cols: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, rows, columns)."""
        b, h, r, _ = self.ptr.shape
        return b, h, r, self.n_cols

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """ptr and runs as stored: of the rows, or of the columns in a TransposedRuns."""
        return self.ptr, self.runs

    @property
    def by_rows(self) -> Runs:
        """The same pattern, stored by row."""
        return self

    def has_kind(self, kind: Kind) -> bool:
        """Return whether any block is of this kind."""
        return bool((self.stored[1][:, 2] == kind).any())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Runs):
            return NotImplemented
        same = self.shape == other.shape and torch.equal(self.ptr, other.ptr)
        return same and torch.equal(self.runs, other.runs)

    __hash__ = None  # type: ignore[assignment]

    # -- to and from dense ------------------------------------------------------------------------

    @classmethod
    def from_kinds(cls, kinds: Tensor) -> Runs:
        """Make Runs from a dense map of block kinds, uint8 [B, H, R, C] of Kind or ABSENT."""
        b, h, r, c = kinds.shape
        flat = kinds.reshape(b * h * r, c)
        listed = flat != ABSENT
        edge = torch.ones(len(flat), c + 1, dtype=torch.bool)  # a run may start or end left of column c
        edge[:, 1:c] = flat[:, 1:] != flat[:, :-1]
        row, start = (listed & edge[:, :-1]).nonzero(as_tuple=True)
        last = (listed & edge[:, 1:]).nonzero()[:, 1]  # row-major like the starts
        return cls._pack((b, h, r), c, row, start, last + 1, flat[row, start])

    def to_kinds(self) -> Tensor:
        """Return the dense map of block kinds, uint8 [B, H, R, C] of Kind or ABSENT."""
        b, h, r, c = self.shape
        row, start, end, kind = self._flat()
        step = (kind - ABSENT).to(torch.uint8)  # uint8 wraps modulo 256, and sums of steps stay exact
        delta = torch.zeros(b * h * r * (c + 1), dtype=torch.uint8)
        delta.scatter_add_(0, row * (c + 1) + start, step)
        delta.scatter_add_(0, row * (c + 1) + end, torch.zeros_like(step) - step)
        delta = delta.view(b * h * r, c + 1)
        delta[:, 0] += ABSENT
        return delta[:, :c].cumsum(1, dtype=torch.uint8).view(b, h, r, c)

    @classmethod
    def from_table(cls, table: Tensor, rows: int, columns: int) -> Runs:
        """Make Runs of FULL blocks from disjoint runs, int64 [n, 3] rows (row, start, end)."""
        row, start, end = table.unbind(1)
        return cls._pack((1, 1, rows), columns, row, start, end, torch.full_like(row, int(Kind.FULL)))

    def table(self) -> Tensor:
        """List the runs of a pattern of one kind, batch row and head: int64 [n, 3] rows (row, start, end)."""
        return torch.stack(self._flat()[:3], 1)

    @classmethod
    def from_intervals(cls, lo: Tensor, hi: Tensor, q_block: int, kv_block: int, kv_len: int) -> Runs:
        """Make the Runs of the mask in which query row q sees exactly lo <= kv < hi.

        lo, hi: integers [B, H, q_len], 0 <= lo <= hi <= kv_len, or [m, B, H, q_len]: m intervals that neither
        overlap nor touch. A block is listed if any of its pairs is visible: FULL if all are and q_len and
        kv_len do not cut it, else MASKED. Neither the dense mask nor the dense map of blocks is allocated.
        """
        m = lo.shape[0] if lo.ndim == 4 else 1
        b, h, q_len = lo.shape[-3:]
        rows, cols = -(-q_len // q_block), -(-kv_len // kv_block)
        lo, hi = (x.reshape(m, b * h, q_len).int() for x in (lo, hi))
        seen = lo < hi
        # Neighbouring rows mostly see the same blocks: count such rows together.
        down = [floor_divide(x, kv_block) for x in (lo, hi)]
        up = [floor_divide(x + kv_block - 1, kv_block) for x in (lo, hi)]
        row, start, end, _ = _count_rows(down[0], up[1], seen, q_block, rows)
        table = merge_runs(row, start, end, cols)
        full = _covered(*_count_rows(up[0], down[1], seen, q_block, rows), q_block, cols)
        masked = _cut(table, full, cols)
        kind = torch.full((len(masked) + len(full),), int(Kind.MASKED))
        kind[len(masked) :] = int(Kind.FULL)
        row, start, end = torch.cat([masked, full]).unbind(1)
        return cls._pack((b, h, rows), cols, row, start, end, kind)

    # -- algebra ----------------------------------------------------------------------------------

    def take(self, rows: Tensor) -> Runs:
        """Select, reorder or repeat rows. rows: int64 [Bp, n], -1 = an empty row; batches broadcast."""
        batch = max(len(rows), self.shape[0])
        ptr = torch.nn.functional.pad(self.ptr.expand(batch, -1, -1, -1), (0, 0, 1, 0))  # first an empty row
        return self._gather(ptr[torch.arange(batch)[:, None], :, rows + 1].transpose(1, 2))  # [B, H, n, 3]

    def expand(self, B: int, H: int) -> Runs:
        """Repeat dimensions of size 1 for every batch row and head."""
        return self if self.shape[:2] == (B, H) else self._gather(self.ptr.expand(B, H, -1, -1))

    def select(self, batch: slice | list[int], heads: slice | list[int] = slice(None)) -> Runs:
        """Select batch rows and heads, in this order."""
        return self._gather(self.ptr[batch][:, heads])

    def remap(self, first: Tensor) -> Runs:
        """Column c becomes the columns [first[c], first[c+1]) of a new space; none, one or several.

        first: int64 [Bp, n_cols+1], non-decreasing; batches broadcast. The new space has
        max(first[:, -1]) columns. Where `keep` is a sorted subset of the columns and first counts
        the kept ones before c, the result is kinds[..., keep].
        """
        b, h, r, _ = self.shape
        batch = max(len(first), b)
        row, start, end, kind = self.expand(batch, h)._flat()
        start, end = (first.expand(batch, -1)[row // (h * r), edge] for edge in (start, end))
        return self._pack((batch, h, r), int(first[:, -1].max()), row, start, end, kind)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Listed blocks of each row: (masked and bounded, full), each int64 [B, H, R]."""
        total = torch.zeros(len(self.runs) + 1, dtype=torch.int64)
        torch.cumsum((self.runs[:, 1] - self.runs[:, 0]).long(), 0, out=total[1:])
        begin, mid, end = total[self.ptr.long()].unbind(-1)
        return mid - begin, end - mid

    def sum_readers(self, rows: Tensor, weight: Tensor, group: Tensor, groups: int) -> Tensor:
        """Sum, in groups, the weights of rows that list a column, over all heads: int64 [groups, B, columns].

        rows: int64 [Bp, n], -1 = none; weight: int64 [Bp, n]; group: int64 [n]; batches broadcast.
        """
        runs = self.take(rows)
        batch, heads, n, columns = runs.shape
        row, start, end, _ = runs._flat()
        b, at = row // max(1, heads * n), row % max(1, n)
        weights = weight.expand(batch, -1)[b, at]
        line = (group[at] * batch + b) * (columns + 1)
        edges = torch.zeros(groups * batch * (columns + 1), dtype=torch.int64)
        edges.index_add_(0, line + start, weights).index_add_(0, line + end, -weights)
        return edges.view(groups, batch, columns + 1).cumsum_(2)[..., :columns]

    def count_in_cells(self, row_edges: Tensor, column_edges: Tensor) -> Tensor:
        """Count the blocks in each cell of a coarse grid, over all batch rows and heads: int64 [2, rows of
        cells, columns of cells], MASKED blocks and other blocks.

        row_edges, column_edges: int64 [n + 1], ascending, the first block of each cell and the end.
        """
        row, start, end, kind = self._flat()
        height, width = len(row_edges) - 1, len(column_edges) - 1
        cell = torch.searchsorted(row_edges, row % max(1, self.shape[2]), right=True) - 1
        cell += torch.where(kind == Kind.MASKED, 0, height)
        total = torch.zeros(2 * height, width, dtype=torch.int64)
        for part in torch.arange(len(row)).split(max(1, _CELLS // max(1, width))):
            inside = end[part, None].clamp(max=column_edges[1:]) - start[part, None].clamp(
                min=column_edges[:-1]
            )
            total.index_add_(0, cell[part], inside.clamp(min=0))
        return total.view(2, height, width)

    def unite(self, size: int = 1) -> Runs:
        """Merge squares of ``size`` x ``size`` blocks: a square is FULL if any of its blocks is listed for
        any batch row and head. The result is Runs [1, 1, rows / size, columns / size], rounded up."""
        _, _, r, c = self.shape
        rows, columns = -(-r // size), -(-c // size)
        row, start, end, _ = self._flat()
        united = merge_runs(row % max(1, r) // size, start // size, (end + size - 1) // size, columns)
        return Runs.from_table(united, rows, columns)

    def with_full_bounded(self) -> Runs:
        """Return the pattern with every full block marked as BOUNDED, so that it is listed among the masked
        blocks."""
        row, start, end, kind = self._flat()
        kind = torch.where(kind == Kind.FULL, Kind.BOUNDED, kind)
        return Runs._pack(self.shape[:3], self.n_cols, row, start, end, kind)

    # -- how runs are stored ----------------------------------------------------------------------

    def _flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return every run as (row, start, end, kind), each int64 [n]; rows are numbered over (B, H, R)."""
        length = (self.ptr[..., 2] - self.ptr[..., 0]).flatten().long()
        row = torch.arange(len(length)).repeat_interleave(length)
        start, end, kind = self.runs.long().unbind(1)
        return row, start, end, kind

    def _gather(self, ptr: Tensor) -> Runs:
        """Return Runs with the rows that ptr [B, H, R, 3] refers to, copied in its order."""
        begin, mid, end = ptr.reshape(-1, 3).long().unbind(1)
        after = (end - begin).cumsum(0)
        first = after - (end - begin)
        new = torch.stack([first, first + mid - begin, after], 1).view(ptr.shape)
        return Runs(new.int(), self.runs[ramps(begin, end - begin)], self.n_cols)

    @classmethod
    def _pack(
        cls, shape: tuple[int, int, int], n_cols: int, row: Tensor, start: Tensor, end: Tensor, kind: Tensor
    ) -> Runs:
        """Make Runs from n runs in any order: sort them, drop empty ones, merge adjacent ones of a kind."""
        kind = kind.long()
        group = row * 2 + (kind == Kind.FULL)
        keep = (end > start).nonzero()[:, 0]
        order = keep[(group[keep] * (n_cols + 1) + start[keep]).argsort()]
        group, start, end, kind = group[order], start[order], end[order], kind[order]
        opens = torch.ones(len(order) + 1, dtype=torch.bool)
        opens[1:-1] = (group[1:] != group[:-1]) | (kind[1:] != kind[:-1]) | (start[1:] != end[:-1])
        opens, closes = opens[:-1], opens[1:]
        runs = torch.stack([start[opens], end[closes], kind[opens]], 1).int()
        size = torch.bincount(group[opens], minlength=2 * shape[0] * shape[1] * shape[2])
        after = size.cumsum(0).view(*shape, 2)
        ptr = torch.cat([after[..., :1] - size.view(*shape, 2)[..., :1], after], dim=-1)
        return cls(ptr.int(), runs, n_cols)


def merge_runs(row: Tensor, start: Tensor, end: Tensor, columns: int) -> Tensor:
    """Merge runs of columns that overlap or touch in a row: int64 [n, 3] rows (row, start, end)."""
    line = columns + 1  # a spare column, so that runs of different rows do not touch
    start, end = merge_ranges(row * line + start, row * line + end)
    row = start // line
    return torch.stack([row, start - row * line, end - row * line], 1)


def merge_ranges(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Merge ranges into disjoint ranges, ascending.

    >>> merge_ranges(torch.tensor([4, 0, 2]), torch.tensor([5, 3, 4]))
    (tensor([0]), tensor([5]))
    """
    start, order = start.sort()
    reach = end[order].cummax(0).values
    opens = torch.ones(len(start) + 1, dtype=torch.bool)
    opens[1:-1] = start[1:] > reach[:-1]
    return start[opens[:-1]], reach[opens[1:]]


def content(x: Tensor) -> bytes:
    """Return the bytes of a CPU tensor in the order of its elements, without NumPy."""
    plain = x.detach().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""


def floor_divide(x: Tensor, divisor: int) -> Tensor:
    """Return x // divisor, by a shift where it is a power of two: torch divides integers one by one."""
    shift = divisor.bit_length() - 1
    return x >> shift if divisor == 1 << shift else x // divisor


def _count_rows(
    start: Tensor, end: Tensor, seen: Tensor, q_block: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count how many neighbouring rows of tokens list the same range of blocks: (row of blocks, start, end,
    number of rows of tokens), int64 [n] each.

    start, end, seen: [m, B * H, rows of tokens]
    """
    first = torch.ones_like(seen)
    first[..., 1:] = (start[..., 1:] != start[..., :-1]) | (end[..., 1:] != end[..., :-1])
    first[..., 1:] |= seen[..., 1:] != seen[..., :-1]
    first[..., ::q_block] = True
    lines = seen.shape[1]
    line, token = first.flatten(0, 1).nonzero().unbind(1)
    ends = torch.cat([token[1:], token.new_zeros(1)])
    count = torch.where(ends > token, ends, seen.shape[-1]) - token
    start, end, seen = (x.flatten(0, 1)[line, token] for x in (start, end, seen))
    keep = (seen & (start < end)).nonzero()[:, 0]
    row = line % lines * rows + token // q_block
    return row[keep], start[keep].long(), end[keep].long(), count[keep]


def _covered(row: Tensor, start: Tensor, end: Tensor, count: Tensor, full: int, cols: int) -> Tensor:
    """Return the ranges that are counted ``full`` times: int64 [n, 3] rows (row, start, end)."""
    line = torch.cat([row * (cols + 1) + start, row * (cols + 1) + end])
    line, order = line.sort()
    total = torch.cat([count, -count])[order].cumsum(0)
    at = ((total[:-1] == full) & (line[:-1] < line[1:])).nonzero()[:, 0]
    start, end = line[at], line[at + 1]
    return merge_runs(start // (cols + 1), start % (cols + 1), start % (cols + 1) + end - start, cols)


def _cut(table: Tensor, full: Tensor, cols: int) -> Tensor:
    """Subtract the ranges of one table from the ranges of another that contain them."""
    row, start, end = torch.cat([table, full]).unbind(1)
    sign = torch.ones(len(row), dtype=torch.int64)
    sign[len(table) :] = -1
    return _covered(row, start, end, sign, 1, cols)


def ramps(first: Tensor, length: Tensor) -> Tensor:
    """Concatenate the ranges of ``length[i]`` integers from ``first[i]`` on: int64 [sum(length)].

    >>> ramps(torch.tensor([5, 0]), torch.tensor([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offset = first - (length.cumsum(0) - length)
    return offset.repeat_interleave(length) + torch.arange(int(length.sum()))
