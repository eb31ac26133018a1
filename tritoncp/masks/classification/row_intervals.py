"""Masks as intervals of each row: the keys that a query sees are a short sorted list of intervals.

An expression of a mask_mod (`expression`) becomes such lists without evaluating pairs. Each side of a
comparison is a vector over the queries or the keys. If the keys' side ascends, binary search finds the range
of keys that a query sees; if it repeats values, the visible keys are the runs that equal the query's value.
"And", "or" and "not" are intersection, union and complement of lists. A function that returns None found no
lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritoncp.masks.classification.expression import MIRRORED
from tritoncp.masks.runs.block_runs import Runs

MOST = 8  # intervals of a row


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """For each row, up to m intervals of keys, lo <= kv < hi, ascending, with a gap between any two.

    lo, hi: int32 [m, n, rows]; n batch rows and heads. Unused intervals are last, from ``keys`` to ``keys``.
    keys:   number of keys

    >>> both = RowIntervals.sorted(torch.tensor([[[4, 0]], [[1, 3]]]), torch.tensor([[[6, 2]], [[3, 3]]]), 8)
    >>> both, both.complement()
    (RowIntervals(1..3 4..6, 0..2), RowIntervals(0..1 3..4 6..8, 2..8))
    """

    lo: Tensor
    hi: Tensor
    keys: int

    @classmethod
    def all_keys(cls, n: int, rows: int, keys: int) -> RowIntervals:
        """Return the lists of rows that see every key."""
        lo, hi = (torch.tensor(end, dtype=torch.int32).expand(1, n, rows) for end in (0, keys))
        return cls(lo, hi, keys)

    @classmethod
    def sorted(cls, lo: Tensor, hi: Tensor, keys: int) -> RowIntervals:
        """Sort and merge intervals in any order, int [m, n, rows], which may be empty, overlap or touch."""
        seen = lo < hi
        lo, hi = (x.int().where(seen, keys) for x in (lo, hi))
        if len(lo) == 2:
            swap = lo[1] < lo[0]
            lo, hi = (torch.stack([x[1].where(swap, x[0]), x[0].where(swap, x[1])]) for x in (lo, hi))
        elif bool((lo[1:] < lo[:-1]).any()):
            lo, order = lo.sort(0)
            hi = hi.gather(0, order)
        if len(lo) > 1:
            hi = hi.cummax(0).values if bool((hi[1:] < hi[:-1]).any()) else hi
            joins = (lo[1:] <= hi[:-1]) & (lo[1:] < keys)
            if bool(joins.any()):  # merge intervals that touch
                starts = [lo[0]]
                for join, start in zip(joins, lo[1:]):
                    starts.append(starts[-1].where(join, start))
                ends = torch.cat([~joins, torch.ones_like(joins[:1])])
                return cls.sorted(torch.stack(starts).where(ends, keys), hi.where(ends, keys), keys)
        used = max(1, int((lo < keys).flatten(1).any(1).sum()))
        return cls(lo[:used], hi[:used], keys)

    @property
    def hull(self) -> tuple[Tensor, Tensor]:
        """The smallest interval that contains all intervals of a row: (lo, hi), int32 [n, rows]; (keys, 0)
        for an empty row."""
        return self.lo[0], self.hi.where(self.lo < self.hi, 0).amax(0)

    def intersect(self, other: RowIntervals) -> RowIntervals | None:
        """Return the keys that are in both; None if a row has more than MOST intervals of them."""
        lo = torch.maximum(self.lo[:, None], other.lo).flatten(0, 1)
        hi = torch.minimum(self.hi[:, None], other.hi).flatten(0, 1)
        return RowIntervals.sorted(lo, hi, self.keys)._limit()

    def unite(self, other: RowIntervals) -> RowIntervals | None:
        """Return the keys that are in either; None if a row has more than MOST intervals of them."""
        lo, hi = torch.cat([self.lo, other.lo]), torch.cat([self.hi, other.hi])
        return RowIntervals.sorted(lo, hi, self.keys)._limit()

    def complement(self) -> RowIntervals:
        """Return the keys that are in no interval."""
        first, last = torch.zeros_like(self.lo[:1]), torch.full_like(self.lo[:1], self.keys)
        return RowIntervals.sorted(torch.cat([first, self.hi]), torch.cat([self.lo, last]), self.keys)

    def _limit(self) -> RowIntervals | None:
        return self if len(self.lo) <= MOST else None

    def expand(self, lines: tuple[int, int], wanted: Sequence[int]) -> RowIntervals:
        """Repeat batch rows and heads. lines, wanted: (batch rows, heads) before and after"""
        lo, hi = (x.unflatten(1, lines).expand(-1, *wanted, -1).flatten(1, 2) for x in (self.lo, self.hi))
        return RowIntervals(lo, hi, self.keys)

    def to_runs(self, batch: int, q_block: int, kv_block: int) -> Runs:
        """Classify blocks as a mask does. batch: number of batch rows; n is a multiple of it"""
        lo, hi = (x.unflatten(1, (batch, -1)) for x in (self.lo, self.hi))
        return Runs.from_intervals(lo, hi, q_block, kv_block, self.keys)

    def in_masked_blocks(self, runs: Runs, q_block: int, kv_block: int) -> tuple[Tensor, Tensor] | None:
        """Return the interval of keys that each row sees in its masked blocks: int32 (lo, hi), each [B, H,
        rows]; None if some row sees other keys there than one interval. runs: the result of
        :meth:`to_runs`"""
        b, h, blocks, _ = runs.shape
        rows = self.lo.shape[2]
        if len(self.lo) == 1:
            lo, hi = (x[0].where(self.lo[0] < self.keys, 0).view(b, h, rows) for x in (self.lo, self.hi))
            return lo, hi
        cut = (0, blocks * q_block - rows)
        los, his = (
            pad(x, cut, value=self.keys).view(-1, b * h * blocks, q_block) for x in (self.lo, self.hi)
        )
        first = torch.full_like(los[0], self.keys)
        last, seen, between = (torch.zeros_like(first) for _ in range(3))
        for row, start, end in _masked_ranges(runs, kv_block):
            for lo, hi in zip(los, his):
                lo, hi = lo[row].maximum(start), hi[row].minimum(end)
                some = lo < hi
                first[row] = first[row].minimum(lo.where(some, self.keys))
                last[row] = last[row].maximum(hi.where(some, 0))
                seen[row] += (hi - lo).where(some, 0)
        for row, start, end in _masked_ranges(runs, kv_block):
            between[row] += (last[row].minimum(end) - first[row].maximum(start)).clamp(min=0)
        if not torch.equal(seen, between):
            return None
        lo, hi = (x.view(b, h, -1)[..., :rows] for x in (first.minimum(last), last))
        return lo, hi

    def __repr__(self) -> str:
        rows = [
            " ".join(f"{lo}..{hi}" for lo, hi in zip(los, his) if lo < hi) or "none"
            for los, his in zip(self.lo[:, 0].T.tolist(), self.hi[:, 0].T.tolist())
        ]
        return f"RowIntervals({', '.join(rows)})"


def _masked_ranges(runs: Runs, kv_block: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the first range of keys in masked blocks of all rows of blocks that have one, then the second,
    ...: (rows [n], start and end [n, 1])."""
    begin, mid, _ = runs.ptr.reshape(-1, 3).long().unbind(1)
    for place in range(int((mid - begin).max()) if len(begin) else 0):
        row = (mid - begin > place).nonzero()[:, 0]
        start, end, _ = (runs.runs[begin[row] + place] * kv_block).unbind(1)
        yield row, start[:, None], end[:, None]


# -- the keys of one comparison or predicate -----------------------------------------------------------------


def compare(op: str, query: Tensor, key: Tensor, within: RowIntervals) -> RowIntervals | None:
    """Return the keys of ``within`` for which ``query op key`` holds.

    query: [n or 1, rows], key: [n or 1, keys], both int64 or both of one floating-point type
    op: "lt", "le", "gt", "ge", "eq" or "ne"
    """
    if query.is_floating_point() and bool(query.isnan().any() | key.isnan().any()):
        return None  # NaN has no place in an order
    if op in ("eq", "ne"):
        equal = _find_equal(query, key, within)
        return equal if op == "eq" or equal is None else within.intersect(equal.complement())
    step = key.diff()
    if not bool((step < 0).any()):
        return within.intersect(_compare_with_rising(op, query, key))
    if not bool((step > 0).any()):  # a side that falls rises when both are negated
        return within.intersect(_compare_with_rising(MIRRORED[op], -query, -key))
    found = _compare_in_pieces(op, query, key, within)
    return found or _compare_in_pieces(MIRRORED[op], -query, -key, within)


def _compare_with_rising(op: str, query: Tensor, key: Tensor) -> RowIntervals:
    """Return the keys for which ``query op key`` holds, for an ascending ``key``."""
    n, keys = max(len(query), len(key)), key.shape[1]
    if not key.is_floating_point() and bool((key.diff() == 1).all()):  # each key equals its index
        place = (query - key[:, :1] + int(op in ("ge", "lt"))).clamp(0, keys).int()
    else:
        sides = (x.expand(n, -1).contiguous() for x in (key, query))
        place = torch.searchsorted(*sides, right=op in ("ge", "lt"), out_int32=True)
    ends = torch.zeros_like(place), torch.full_like(place, keys)
    lo, hi = (ends[0], place) if op in ("ge", "gt") else (place, ends[1])
    return RowIntervals.sorted(lo[None], hi[None], keys)


def _compare_in_pieces(op: str, query: Tensor, key: Tensor, within: RowIntervals) -> RowIntervals | None:
    """Return the keys of :func:`compare` if ``key`` ascends within each interval of ``within``. For example,
    positions that restart in every document ascend within each document."""
    n, keys = within.lo.shape[1], within.keys
    left, right = within.lo.long(), within.hi.long()
    piece = pad((key.diff() < 0).cumsum(1), (1, 0)).expand(n, -1)
    first, last = (piece.expand(len(x), -1, -1).gather(2, x.clamp(0, keys - 1)) for x in (left, right - 1))
    if bool(((first != last) & (left < right)).any()):
        return None
    if key.is_floating_point() or int(key.max()) - int(key.min()) > 1 << 32:
        # ranks: odd numbers for the values of keys, even ones between them
        values = key.unique()
        query = torch.searchsorted(values, query) + torch.searchsorted(values, query, right=True)
        key = 2 * torch.searchsorted(values, key) + 1
    low, high = int(key.min()), int(key.max())
    width = high - low + 3
    line = (piece * width + key - low).contiguous()  # ascends over all pieces
    asked = first * width + query.clamp(low - 1, high + 1) - low
    places = [torch.searchsorted(line, x, right=op in ("ge", "lt")) for x in asked]
    place = torch.stack(places).maximum(left).minimum(right)
    lo, hi = (left, place) if op in ("ge", "gt") else (place, right)
    return RowIntervals.sorted(lo, hi, keys)


def _find_equal(query: Tensor, key: Tensor, within: RowIntervals) -> RowIntervals | None:
    """Return the keys of ``within`` that equal the query: the runs of its value."""
    n, rows = within.lo.shape[1:]
    runs = EqualRuns.of(key)
    values, rank = key[runs.line, runs.start].unique(return_inverse=True)
    group, order = (runs.line * len(values) + rank).sort(stable=True)
    asked = EqualRuns.of(query)  # neighbouring rows of one value ask for one group
    value = query[asked.line, asked.start]
    rank = torch.searchsorted(values, value).clamp(max=len(values) - 1)
    known, length = values[rank] == value, asked.end - asked.start
    if len(key) > 1 and len(query) == 1:  # every row of keys is looked up
        rank, known, length = rank.repeat(n), known.repeat(n), length.repeat(n)
        rank = rank + torch.arange(n).repeat_interleave(len(asked.line)) * len(values)
    elif len(key) > 1:
        rank = rank + asked.line * len(values)
    table = _Groups(group, runs.start[order], runs.end[order])

    def expand(x: Tensor) -> Tensor:
        return x.repeat_interleave(length, -1).unflatten(-1, (-1, rows)).expand(*x.shape[:-1], n, rows)

    return table.look_up(rank.where(known, -1), expand, within)


def find_true(shown: Tensor, within: RowIntervals) -> RowIntervals | None:
    """Return the keys of ``within`` for which ``shown``, bool [n or 1, keys], is true."""
    return _find_true(shown, within, None)


def find_true_distances(shown: Tensor, within: RowIntervals) -> RowIntervals | None:
    """Return the keys of ``within`` for which ``shown[:, q - kv + keys - 1]`` is true. shown: bool [n or 1,
    rows + keys - 1]"""
    end = torch.arange(within.keys, within.keys + within.lo.shape[2], dtype=torch.int32)
    return _find_true(shown, within, end)  # key kv is at place end - 1 - kv


def _find_true(shown: Tensor, within: RowIntervals, mirror: Tensor | None) -> RowIntervals | None:
    n, rows = within.lo.shape[1:]
    runs = EqualRuns.of(shown)
    true = shown[runs.line, runs.start]
    table = _Groups(*(x[true] for x in runs))
    return table.look_up(
        torch.arange(len(shown)), lambda x: x[..., None].expand(*x.shape[:-1], n, rows), within, mirror
    )


def keep_rows(shown: Tensor, within: RowIntervals) -> RowIntervals:
    """Return ``within`` in the rows for which ``shown``, bool [n or 1, rows or 1], is true."""
    lo, hi = (x.where(shown, within.keys) for x in (within.lo, within.hi))
    return RowIntervals(lo, hi, within.keys)


class EqualRuns(NamedTuple):
    """Maximal ranges of equal neighbours in the lines of a matrix: int64 [r] each, in order."""

    line: Tensor
    start: Tensor
    end: Tensor

    @classmethod
    def of(cls, x: Tensor) -> EqualRuns:
        opens = torch.ones(x.shape[0], x.shape[1] + 1, dtype=torch.bool)
        opens[:, 1:-1] = x[:, 1:] != x[:, :-1]
        line, start = opens[:, :-1].nonzero().unbind(1)
        return cls(line, start, opens[:, 1:].nonzero()[:, 1] + 1)


class _Groups(NamedTuple):
    """Runs of places in groups: int64 [r] each, ascending by group, then by start."""

    group: Tensor
    start: Tensor
    end: Tensor

    def look_up(
        self,
        asked: Tensor,
        expand: Callable[[Tensor], Tensor],
        within: RowIntervals,
        mirror: Tensor | None = None,
    ) -> RowIntervals | None:
        """Return the keys of ``within`` in the runs of the group that each row asks for.

        asked:  group to look up, int64 [a]; -1 for none
        expand: repeats results for rows, [..., a] to [..., n, rows]
        mirror: int32 [rows], if runs count places ``mirror - 1 - kv`` instead of keys
        """
        first, last = (torch.searchsorted(self.group, asked, right=right) for right in (False, True))
        if int((last - first).max()) > 2:  # only the runs that overlap what a row sees
            lo, hi = (x.long() for x in within.hull)
            if mirror is not None:
                lo, hi = mirror - hi, mirror - lo
            width = 1 + int(self.end.max())
            line = expand(asked) * width
            first = torch.searchsorted(
                self.group * width + self.end, line + lo.clamp(0, width - 1), right=True
            )
            last = torch.searchsorted(self.group * width + self.start, line + hi.clamp(0, width - 1))
            last = last.where(within.lo[0] < within.keys, first)
            expand = _same
        most = max(0, int((last - first).max())) if first.numel() else 0
        if most > MOST:
            return None
        ends = []
        for table in (self.start, self.end):
            table = pad(table.int(), (0, most + 1))
            ends.append(torch.stack([table[first + i] for i in range(max(most, 1))]))
        number = torch.arange(max(most, 1)).view(-1, *[1] * first.ndim)
        ends[1] = ends[1].where(number < last - first, ends[0])
        lo, hi = map(expand, ends)
        if mirror is not None:
            lo, hi = (mirror - hi).clamp(min=0), mirror - lo
        return within.intersect(RowIntervals.sorted(lo, hi.clamp(max=within.keys), within.keys))


def _same(x: Tensor) -> Tensor:
    return x
