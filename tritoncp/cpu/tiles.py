"""Tiles of the CPU engine: a step's blocks as rectangles of packed rows and keys, batched by equal shape.

Rows that each see one key more than the row before, as in causal documents, become a triangle, which torch's
flash kernel computes without a mask, and a rectangle of the keys that all of them see. Other full blocks are
joined to large rectangles: the keys that all Q slots of a range see are one rectangle, if it saves more time
than merging its results takes; then each half of the range is treated the same way. The blocks of a few
neighbouring Q slots, for example of a window, become one masked tile (a band), if few of its pairs are
hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import NamedTuple

from torch import Tensor

from tritoncp.masks.runs.block_runs import Kind

TRIANGLE_ROWS = 128  # min rows of a triangle; with fewer, bands take less time
SHORT = 4  # max KV slots of a masked tile
BAND_ROWS = 256  # rows of a band; with fewer, torch's kernel uses smaller products
BAND_COLUMNS = 2048  # max columns of a band
BAND_WASTE = 1.35  # max ratio of a band's pairs to the pairs of listed blocks
MAX_COLUMNS = 1024  # max columns of a tile whose products have to fit in the cache
# (min rows of a tile, time of torch's flash kernel per pair relative to large tiles)
PAIR_TIMES = (768, 1.0), (192, 1.1), (0, 1.3)
MERGE_TIME = 55  # time to merge the results of a row, in units of a pair in a large tile

Range = tuple[int, int]
Covers = Callable[[Sequence["SlotRow"], Range], bool]
# (slots, keys) -> whether the window or intervals decide all their pairs


class KeyRanges(NamedTuple):
    """The packed keys [begin, end) that each packed row from ``first`` on sees, int64 [rows]."""

    first: int
    begin: Tensor
    end: Tensor


class PackedTile(NamedTuple):
    """A rectangle of packed rows [row, row + height) and packed keys [col, col + width) of one batch row.

    kind: "full"; "causal": a square, in which row i sees keys 0 to i; or "masked"
    """

    kind: str
    batch: int
    row: int
    height: int
    col: int
    width: int


@dataclass(frozen=True)
class TileBatch:
    """Tiles of one kind and shape with disjoint rows."""

    tiles: tuple[PackedTile, ...]

    @property
    def kind(self) -> str:
        return self.tiles[0].kind

    @property
    def height(self) -> int:
        return self.tiles[0].height

    @property
    def width(self) -> int:
        return self.tiles[0].width

    @property
    def rows(self) -> list[int]:
        return [tile.row for tile in self.tiles]

    @property
    def cols(self) -> list[int]:
        return [tile.col for tile in self.tiles]

    def split(self, count: int) -> Iterator[TileBatch]:
        """Split into batches of at most ``count`` tiles."""
        for i in range(0, len(self.tiles), count):
            yield TileBatch(self.tiles[i : i + count])

    def split_rows(self, height: int) -> Iterator[TileBatch]:
        """Split every tile into tiles of at most ``height`` rows."""
        for start in range(0, self.height, height):
            rows = min(height, self.height - start)
            tiles = [tile._replace(row=tile.row + start, height=rows) for tile in self.tiles]
            yield TileBatch(tuple(tiles))

    def take(self, index: Sequence[int]) -> TileBatch:
        """Select tiles."""
        return TileBatch(tuple(self.tiles[i] for i in index))


class SlotRow(NamedTuple):
    """A Q slot's packed rows, and its ranges of packed keys: full ones, and masked ones of up to SHORT KV
    slots."""

    rows: Range
    full: list[Range]
    masked: list[Range]

    def unlisted(self, keys: Range) -> list[Range]:
        """Return the parts of a range of keys that are in neither list."""
        parts = [keys]
        for listed in (*self.full, *self.masked):
            parts = _subtract(parts, listed)
        return parts


def slot_rows(
    ptr: Tensor, runs: Sequence[Sequence[int]], q_edges: Sequence[int], kv_edges: Sequence[int]
) -> list[SlotRow]:
    """List the non-empty Q slots of one batch row and head.

    ptr: int [slots, 3], see :class:`Runs`
    """
    listed = []
    for slot, (begin, _, end) in enumerate(ptr.tolist()):
        rows = q_edges[slot], q_edges[slot + 1]
        if rows[0] == rows[1]:
            continue
        full, masked = [], []
        for first, last, kind in runs[begin:end]:
            if kind == Kind.MASKED:
                ends = [(kv_edges[i], kv_edges[min(i + SHORT, last)]) for i in range(first, last, SHORT)]
                masked += [keys for keys in ends if keys[0] < keys[1]]
            elif kv_edges[first] < kv_edges[last]:
                full.append((kv_edges[first], kv_edges[last]))
        listed.append(SlotRow(rows, _merge(full), sorted(masked)))
    return listed


def tiles_of(
    slots: Sequence[SlotRow], batch: int, flash: bool, covers: Covers, ranges: KeyRanges | None = None
) -> list[PackedTile]:
    """Make the tiles of the slots of a batch row: large tiles for the flash kernel, else tiles whose scores
    fit in the cache. ranges: the keys of each row, where ``covers`` may say that they decide all pairs"""
    tiles: list[PackedTile] = []
    if flash:
        if ranges is not None:
            slots = _take_triangles(slots, batch, covers, ranges, tiles)
        slots = _take_bands(slots, batch, covers, tiles)
    for slot in slots:
        tiles += [_tile("masked", batch, slot.rows, keys) for keys in slot.masked]
    if flash:
        _stack(slots, batch, tiles)
    else:
        for slot in slots:
            for first, last in slot.full:
                for start in range(first, last, MAX_COLUMNS):
                    tiles.append(_tile("full", batch, slot.rows, (start, min(last, start + MAX_COLUMNS))))
    return tiles


def batches_of(tiles: Sequence[PackedTile]) -> list[TileBatch]:
    """Group tiles into batches of equal kind and shape with disjoint rows."""
    groups: dict[tuple[str, int, int, int], list[PackedTile]] = {}
    ends: dict[tuple[str, int, int, int], int] = {}
    for tile in sorted(tiles, key=lambda tile: (tile.row, tile.col)):
        level = 0
        while ends.get((key := (tile.kind, tile.height, tile.width, level)), 0) > tile.row:
            level += 1
        groups.setdefault(key, []).append(tile)
        ends[key] = tile.row + tile.height
    return [TileBatch(tuple(group)) for group in groups.values()]


def _tile(kind: str, batch: int, rows: Range, keys: Range) -> PackedTile:
    return PackedTile(kind, batch, rows[0], rows[1] - rows[0], keys[0], keys[1] - keys[0])


def _take_triangles(
    slots: Sequence[SlotRow], batch: int, covers: Covers, ranges: KeyRanges, tiles: list[PackedTile]
) -> list[SlotRow]:
    """Append triangles, and the keys before them, to ``tiles``; return the other rows of the slots. Rows of
    slots and of triangles ascend, so that each slot is looked at once."""
    waiting, rest = deque(slots), list[SlotRow]()
    for rows, keys in _triangles(ranges):
        while waiting and waiting[0].rows[1] <= rows[0]:
            rest.append(waiting.popleft())
        met = [*takewhile(lambda slot: slot.rows[0] < rows[1], waiting)]  # noqa: B023 - read at once
        parts = [slot._replace(rows=both) for slot in met for both in _intersect([slot.rows], [rows])]
        is_listed = sum(last - first for (first, last), *_ in parts) == rows[1] - rows[0]
        if not is_listed or not covers(parts, keys):
            continue
        corner = keys[1] - (rows[1] - rows[0])
        tiles.append(_tile("causal", batch, rows, (corner, keys[1])))
        if keys[0] < corner:
            tiles.append(_tile("full", batch, rows, (keys[0], corner)))
        others = [slot._replace(rows=part) for slot in met for part in _subtract([slot.rows], rows)]
        rest += [slot for slot in others if slot.rows[1] <= rows[0]]
        for _ in met:
            waiting.popleft()
        waiting.extendleft(slot for slot in others if slot.rows[0] >= rows[1])
    return [*rest, *waiting]


def _triangles(ranges: KeyRanges) -> Iterator[tuple[Range, Range]]:
    """Yield (rows, keys of the last row) where at least TRIANGLE_ROWS rows each see one key more than the row
    before."""
    first, begin, end = ranges
    grows = (begin[1:] == begin[:-1]) & (end[1:] == end[:-1] + 1) & (begin < end)[:-1]
    cuts = [0, *((~grows).nonzero()[:, 0] + 1).tolist(), len(begin)]
    for top, bottom in pairwise(cuts):
        if bottom - top >= TRIANGLE_ROWS:
            yield (first + top, first + bottom), (int(begin[top]), int(end[bottom - 1]))


def _take_bands(
    slots: Sequence[SlotRow], batch: int, covers: Covers, tiles: list[PackedTile]
) -> list[SlotRow]:
    """Append bands to ``tiles``; return the slots that are in no band."""
    rest, i = [], 0
    while i < len(slots):
        end, band = i + 1, None
        while end <= len(slots) and slots[end - 1].rows[1] - slots[i].rows[0] <= max(
            BAND_ROWS, slots[i].rows[1] - slots[i].rows[0]
        ):
            tile = _band(slots[i:end], batch, covers)
            if tile is not None:
                band = end, tile
            end += 1
        if band is None:
            rest.append(slots[i])
            i += 1
        else:
            i, tile = band
            tiles.append(tile)
    return rest


def _band(slots: Sequence[SlotRow], batch: int, covers: Covers) -> PackedTile | None:
    """Return one masked tile for all keys of these slots; None if too many of its pairs are hidden, it is too
    wide, or nothing is masked."""
    adjacent = all(a.rows[1] == b.rows[0] for a, b in pairwise(slots))
    merged = _merge([keys for slot in slots for keys in (*slot.full, *slot.masked)])
    if not adjacent or len(merged) != 1 or not any(slot.masked for slot in slots):
        return None
    rows, width = (slots[0].rows[0], slots[-1].rows[1]), merged[0][1] - merged[0][0]
    listed = sum(
        (slot.rows[1] - slot.rows[0]) * (last - first)
        for slot in slots for first, last in (*slot.full, *slot.masked)
    )  # fmt: skip
    if width > BAND_COLUMNS or (rows[1] - rows[0]) * width > BAND_WASTE * listed:
        return None
    return _tile("masked", batch, rows, merged[0]) if covers(slots, merged[0]) else None


def _stack(slots: Sequence[SlotRow], batch: int, tiles: list[PackedTile]) -> None:
    """Append full tiles: one for the keys that all slots see, if it saves more time than merging its rows
    takes; then, by recursion, tiles for the other keys of each half of the slots."""
    slots = [slot for slot in slots if slot.full]
    if not slots:
        return
    rows = slots[0].rows[0], slots[-1].rows[1]
    adjacent = all(a.rows[1] == b.rows[0] for a, b in pairwise(slots))
    shared: list[Range] = slots[0].full if adjacent else []
    for slot in slots[1:]:
        shared = _intersect(shared, slot.full) if shared else []
    if any(slot.full != slots[0].full for slot in slots):
        height = rows[1] - rows[0]
        saved = _pair_time(height // 2) - _pair_time(height)
        shared = [keys for keys in shared if saved * (keys[1] - keys[0]) > MERGE_TIME]
    for keys in shared:
        tiles.append(_tile("full", batch, rows, keys))
        slots = [SlotRow(slot.rows, _subtract(slot.full, keys), []) for slot in slots]
    if len(slots) > 1:
        half = len(slots) // 2
        _stack(slots[:half], batch, tiles)
        _stack(slots[half:], batch, tiles)


def _pair_time(rows: int) -> float:
    """Return the relative time per pair in a full tile with this many rows."""
    return next(time for least, time in PAIR_TIMES if rows >= least)


def _merge(ranges: Sequence[Range]) -> list[Range]:
    """Merge ranges that touch or overlap.

    >>> _merge([(4, 6), (0, 2), (2, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _subtract(ranges: Sequence[Range], hole: Range) -> list[Range]:
    """Remove a range from sorted ranges.

    >>> _subtract([(0, 4), (6, 9)], (2, 7))
    [(0, 2), (7, 9)]
    """
    pieces = [piece for a, b in ranges for piece in ((a, min(b, hole[0])), (max(a, hole[1]), b))]
    return _merge([(a, b) for a, b in pieces if a < b])


def _intersect(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
    """Intersect sorted disjoint ranges.

    >>> _intersect([(0, 4), (6, 9)], [(2, 7)])
    [(2, 4), (6, 7)]
    """
    both = [(max(a, c), min(b, d)) for a, b in left for c, d in right]
    return [(first, last) for first, last in both if first < last]
