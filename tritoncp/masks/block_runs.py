"""Runs: a block-sparse pattern stored as a short list of column ranges for each row of blocks.

Index lists and dense block maps of a million-token mask take hundreds of MiB; its runs take a few
hundred KiB, because the listed blocks of a row nearly always form a few ranges. Where those of a column do
and those of a row do not, as in prefix trees, the pattern is stored by column (`TransposedRuns`).
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


class Kind(enum.IntEnum):
    """How a kernel treats a listed block."""

    MASKED = 0  # some pairs are hidden: the row interval or the mask_mod says which
    FULL = 1  # every pair is visible
    BOUNDED = 2  # listed as full, but q_len or kv_len cuts the block: every pair in range is visible


ABSENT = 3  # an unlisted block; only in dense maps of kinds, never in a run
_EVENTS = 1 << 20  # starts and ends of runs that are sorted at a time in a transposition


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

    def __post_init__(self) -> None:
        ptr, runs = self.ptr, self.runs
        if ptr.ndim != 4 or ptr.shape[3] != 3 or ptr.dtype != torch.int32:
            raise ValueError(f"Runs.ptr must be int32 [B, H, R, 3], got {ptr.dtype} {tuple(ptr.shape)}")
        if runs.ndim != 2 or runs.shape[1] != 3 or runs.dtype != torch.int32:
            raise ValueError(f"Runs.runs must be int32 [n, 3], got {runs.dtype} {tuple(runs.shape)}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, rows, columns)."""
        b, h, r, _ = self.ptr.shape
        return b, h, r, self.n_cols

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """ptr and runs of the lines that are stored: the rows, or the columns of a TransposedRuns."""
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

    def __repr__(self) -> str:
        b, h, r, c = self.shape
        return f"{type(self).__name__}(B={b}, H={h}, rows={r}, cols={c}, runs={len(self.stored[1])})"

    # -- to and from dense ------------------------------------------------------------------------

    @classmethod
    def from_kinds(cls, kinds: Tensor) -> Runs:
        """Make Runs from a dense map of block kinds, uint8 [B, H, R, C] of Kind or ABSENT."""
        if kinds.ndim != 4 or kinds.dtype != torch.uint8:
            raise ValueError(f"kinds must be uint8 [B, H, R, C], got {kinds.dtype} {tuple(kinds.shape)}")
        b, h, r, c = kinds.shape
        flat = kinds.reshape(b * h * r, c)
        listed = flat != ABSENT
        edge = torch.ones(len(flat), c + 1, dtype=torch.bool)  # a run may start or end left of column c
        if c:
            edge[:, 1:c] = flat[:, 1:] != flat[:, :-1]
        row, start = (listed & edge[:, :-1]).nonzero(as_tuple=True)
        last = (listed & edge[:, 1:]).nonzero()[:, 1]  # row-major, as the starts: they pair up
        return cls._pack((b, h, r), c, row, start, last + 1, flat[row, start])

    def to_kinds(self) -> Tensor:
        """Return the dense map of block kinds, uint8 [B, H, R, C] of Kind or ABSENT."""
        b, h, r, c = self.shape
        row, start, end, kind = self._flat()
        step = (kind - ABSENT).to(torch.uint8)  # modulo 256: sums of steps come out right
        delta = torch.zeros(b * h * r * (c + 1), dtype=torch.uint8)
        delta.scatter_add_(0, row * (c + 1) + start, step)
        delta.scatter_add_(0, row * (c + 1) + end, torch.zeros_like(step) - step)
        delta = delta.view(b * h * r, c + 1)
        delta[:, 0] += ABSENT
        return delta[:, :c].cumsum(1, dtype=torch.uint8).view(b, h, r, c)

    @classmethod
    def from_intervals(cls, lo: Tensor, hi: Tensor, q_block: int, kv_block: int, kv_len: int) -> Runs:
        """Make the Runs of the mask in which query row q sees exactly lo <= kv < hi.

        lo, hi: integers [B, H, q_len], 0 <= lo <= hi <= kv_len. A block is listed if any of its
        pairs is visible: FULL if all are and q_len and kv_len do not cut it, else MASKED. Neither the dense
        mask nor the dense map of blocks is allocated.
        """
        b, h, q_len = lo.shape
        rows, cols = -(-q_len // q_block), -(-kv_len // kv_block)
        pad = rows * q_block - q_len  # rows past q_len see nothing, so no ragged block is full
        lo, hi = (torch.nn.functional.pad(t, (0, pad)).view(b * h * rows, q_block) for t in (lo, hi))
        chunk = max(1, (1 << 18) // q_block)
        parts = [
            _interval_runs(lo[i : i + chunk], hi[i : i + chunk], kv_block, cols, i)
            for i in range(0, max(1, len(lo)), chunk)
        ]
        row, start, end, kind = (torch.cat(p) for p in zip(*parts, strict=True))
        return cls._pack((b, h, rows), cols, row, start, end, kind)

    # -- algebra ----------------------------------------------------------------------------------

    def take(self, rows: Tensor) -> Runs:
        """Select, reorder or repeat rows. rows: int64 [Bp, n], -1 = an empty row; batches broadcast."""
        _check_rows(rows, self.shape[2])
        batch = _broadcast("rows", len(rows), self.shape[0])
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
        b, h, r, c = self.shape
        _check_edges(first, c)
        batch = _broadcast("first", len(first), b)
        row, start, end, kind = self.expand(batch, h)._flat()
        start, end = (first.expand(batch, -1)[row // (h * r), edge] for edge in (start, end))
        return self._pack((batch, h, r), int(first[:, -1].max()), row, start, end, kind)

    def transpose(self) -> Runs:
        """Swap rows and columns. The rows of the result are listed when they are read."""
        return TransposedRuns(self)

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


class TransposedRuns(Runs):
    """Runs stored by column, for patterns whose columns list few ranges and whose rows may list thousands.

    ``columns`` has the columns as rows. All operations but ``ptr``, ``runs`` and ``_flat`` work on it.

    >>> upper = Runs.from_kinds(torch.tensor([[[[0, 1], [3, 0]]]], dtype=torch.uint8))
    >>> upper.transpose().counts()[0].tolist(), upper.transpose().runs.tolist()
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

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def by_rows(self) -> Runs:
        return _transpose(self.columns)

    @property
    def ptr(self) -> Tensor:  # type: ignore[override]
        return self.by_rows.ptr

    @property
    def runs(self) -> Tensor:  # type: ignore[override]
        return self.by_rows.runs

    @property
    def n_cols(self) -> int:  # type: ignore[override]
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

    def transpose(self) -> Runs:
        return self.columns

    def expand(self, B: int, H: int) -> Runs:
        return TransposedRuns(self.columns.expand(B, H))

    def select(self, batch: slice | list[int], heads: slice | list[int] = slice(None)) -> Runs:
        return TransposedRuns(self.columns.select(batch, heads))

    def take(self, rows: Tensor) -> Runs:
        _check_rows(rows, self.shape[2])
        listed = torch.where(rows >= 0, rows, self.shape[2])  # rows that list nothing come last
        if bool((listed.diff(dim=1) < 0).any()):
            return self.by_rows.take(rows)
        edges = torch.arange(self.shape[2] + 1).expand(len(rows), -1).contiguous()
        columns = self.columns.remap(torch.searchsorted(listed, edges))
        return TransposedRuns(replace(columns, n_cols=rows.shape[1]))

    def remap(self, first: Tensor) -> Runs:
        _check_edges(first, self.n_cols)
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
        batch = _broadcast("rows", len(rows), b)
        table = torch.zeros(groups, len(rows), r + 1, dtype=torch.int64)  # the last row lists nothing
        at, line = torch.where(rows >= 0, rows, r), torch.arange(len(rows))[:, None]
        table.index_put_((group.expand_as(rows), line, at), weight, accumulate=True)
        before = torch.nn.functional.pad(table[..., :r].cumsum(2), (1, 0)).expand(-1, batch, -1)
        column, start, end, _ = self.columns.expand(batch, h)._flat()
        b, column = column // max(1, h * c), column % max(1, c)
        total = torch.zeros(groups, batch * c, dtype=torch.int64)
        total.index_add_(1, b * c + column, before[:, b, end] - before[:, b, start])
        return total.view(groups, batch, c)

    def _flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _transpose(self.columns)._flat()


def _transpose(lines: Runs) -> Runs:
    """List the columns of a pattern as rows, in time and memory of the two lists of runs, not of rows times
    columns."""
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
    change = (width > 0) & (state % 4 != state // 4)
    line, at, width, state = line[change], at[change], width[change], (state % 4)[change]
    first = line // (r + 1) * c + at  # of the columns, numbered over (B, H, C), whose kind becomes `state`
    changes = first, first + width, line % (r + 1), state
    steps, ones = torch.zeros(b * h * c + 1, dtype=torch.int64), torch.ones_like(first)
    steps.index_add_(0, changes[0], ones).index_add_(0, changes[1], -ones)
    events = steps.cumsum(0)[:-1].cumsum(0)
    limits = torch.arange(0, int(events[-1]) if len(events) else 0, max(_EVENTS, len(first)))
    cuts = torch.searchsorted(events, limits, right=True).tolist() or [0]
    bands = [
        _list_columns(changes, begin, stop, r)
        for begin, stop in itertools.pairwise([0, *cuts[1:], b * h * c])
    ]
    before = itertools.accumulate((len(band.runs) for band in bands), initial=0)
    ptr = torch.cat([band.ptr + count for band, count in zip(bands, before)], 2)
    return Runs(ptr.view(b, h, c, 3), torch.cat([band.runs for band in bands]), r)


def _list_columns(changes: tuple[Tensor, ...], begin: int, stop: int, n_cols: int) -> Runs:
    """List columns begin .. stop-1 as rows of ``n_cols`` columns.

    changes: (first column, end, row from which on they have a state, the state), int64 [n] each, by row
    """
    first, end, line, state = changes
    inside = ((first < stop) & (end > begin)).nonzero()[:, 0]
    first, end, line, state = (
        first[inside].clamp(min=begin),
        end[inside].clamp(max=stop),
        line[inside],
        state[inside],
    )
    # One event for each column of each changed range: here the column's kind becomes `state`.
    key, order = ramps(first - begin, end - first).sort(stable=True)  # lines ascend already
    line, state = (x.repeat_interleave(end - first)[order] for x in (line, state))
    begins = (state[:-1] != 0).nonzero()[:, 0]  # never the last event, which ends a column
    shape = 1, 1, stop - begin
    return Runs._pack(shape, n_cols, key[begins], line[begins], line[begins + 1], state[begins] - 1)


def content(x: Tensor) -> bytes:
    """Return the bytes of a CPU tensor in the order of its elements, without NumPy."""
    plain = x.detach().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""


def _interval_runs(lo: Tensor, hi: Tensor, kv_block: int, cols: int, row0: int) -> tuple[Tensor, ...]:
    """Return the runs (row, start, end, kind), int64 [n] each, of block rows whose token rows see [lo, hi).

    lo, hi: [rows, q_block]. row0: number of the first row.
    """
    empty = hi <= lo
    full_from = -(-lo.amax(1) // kv_block)
    full_to = torch.where(empty.any(1), 0, hi.amin(1) // kv_block)
    begin = torch.where(empty, cols, lo // kv_block).int()  # empty rows sort last and touch nothing
    until = torch.where(empty, 0, -(-hi // kv_block)).int()
    if bool((begin.diff(dim=1) < 0).any()):
        begin, order = begin.sort(dim=1)
        until = until.gather(1, order)
    # The union of the token rows' block ranges: a range opens where it leaves a gap to all before.
    reach = until.cummax(1).values
    opens = torch.ones(len(begin), begin.shape[1] + 1, dtype=torch.bool)
    opens[:, 1:-1] = begin[:, 1:] > reach[:, :-1]
    row, i = opens[:, :-1].nonzero(as_tuple=True)
    j = opens[:, 1:].nonzero()[:, 1]
    start, end = begin[row, i].long(), reach[row, j].long()
    # Cut the full run out of it; where there is none, everything is left of the cut.
    has_full = full_to > full_from
    cut_from, cut_to = torch.where(has_full, full_from, cols)[row], torch.where(has_full, full_to, cols)[row]
    full = has_full.nonzero()[:, 0]
    masked = torch.full_like(row, int(Kind.MASKED))
    return (
        torch.cat([row, row, full]) + row0,
        torch.cat([start, torch.maximum(start, cut_to), full_from[full].long()]),
        torch.cat([torch.minimum(end, cut_from), end, full_to[full].long()]),
        torch.cat([masked, masked, torch.full_like(full, int(Kind.FULL))]),
    )


def ramps(first: Tensor, length: Tensor) -> Tensor:
    """first[0], first[0]+1, ... (length[0] of them), then first[1], ...: int64 [sum(length)].

    >>> ramps(torch.tensor([5, 0]), torch.tensor([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offset = first - (length.cumsum(0) - length)
    return offset.repeat_interleave(length) + torch.arange(int(length.sum()))


def _check_rows(rows: Tensor, r: int) -> None:
    """Raise ValueError unless rows are int64 [B, n] from -1 to r - 1."""
    if rows.ndim != 2 or rows.dtype != torch.int64:
        raise ValueError(f"rows must be int64 [B, n], got {rows.dtype} {tuple(rows.shape)}")
    if rows.numel() and not (int(rows.min()) >= -1 and int(rows.max()) < r):
        raise ValueError(f"rows must be in [-1, {r}), got {int(rows.min())} to {int(rows.max())}")


def _check_edges(first: Tensor, c: int) -> None:
    """Raise ValueError unless ``first`` is int64 [B, c + 1], non-negative and non-decreasing."""
    if first.ndim != 2 or first.shape[1] != c + 1 or first.dtype != torch.int64:
        raise ValueError(f"first must be int64 [B, {c + 1}], got {first.dtype} {tuple(first.shape)}")
    if bool((first.diff() < 0).any()) or bool((first[:, 0] < 0).any()):
        raise ValueError("first must be non-negative and non-decreasing in each row")


def _broadcast(name: str, rows: int, batch: int) -> int:
    """Return the common number of batch rows; raise ValueError unless they are equal or one of them is 1."""
    if rows != batch and 1 not in (rows, batch):
        raise ValueError(f"{name} has {rows} batch rows, the mask has {batch}: give 1 or {batch}")
    return max(rows, batch)
