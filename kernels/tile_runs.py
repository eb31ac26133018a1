"""Tiles that a row of blocks visits: slots and runs of blocks as kernel arguments, and their tiles.

A slot is a piece of a sequence in a buffer, a run is a range of slots of one kind (see ``docs/glossary.md``).
A *tile* is a piece of a slot: ``cdiv(slot block, tile)`` tiles a slot, numbered through the buffer.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# The kind of a run whose blocks are full except for pairs past the ends of the sequence, as
# `tritoncp.masks.Kind.BOUNDED` has it.  A row lists masked and bounded runs before full ones.
BOUNDED_KIND: tl.constexpr = tl.constexpr(2)


class Slots(NamedTuple):
    """int32 [Bp, slots, 3] = (first row in the buffer, its global position, tokens), and the buffer's
    extent for the dense route, where row r of the buffer is global position ``first + r``."""

    ptr: Any
    stride_b: Any
    first: Any
    count: Any


class SideLayout(NamedTuple):
    """How the slots of queries, or those of keys, are cut into tiles: constants of the kernel."""

    BLOCK: Any  # rows of the longest slot
    TILE: Any  # rows of a tile
    DENSE: Any  # one slot, whose tiles are counted from its first row


class Rows(NamedTuple):
    """What each row of blocks sees of the other side: CSR rows of runs, ptr int32 [Bm, Hm, rows, 3] and runs
    int32 [n, 3] = (start, end, kind); or the positions ``left`` and ``right`` of its own, None: unbounded."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    runs: Any
    left: Any
    right: Any


class Tile(NamedTuple):
    """A tile: its first row in the buffer, the global position of that row, and its number of tokens."""

    row: Any
    pos: Any
    n: Any


class RunTiles(NamedTuple):
    """The tiles [begin, end) of a run, and its kind; tile i stands for i + ``skip`` from ``cut`` on."""

    begin: Any
    end: Any
    kind: Any
    cut: Any
    skip: Any


class KeyShare(NamedTuple):
    """The part of a row's tiles that a program computes: it skips ``skip`` tiles, then takes ``take``."""

    skip: Any
    take: Any


@triton.jit
def locate_tile(slots, i_b, i_tile, LAYOUT: tl.constexpr, VOLATILE: tl.constexpr = False):
    """Tile ``i_tile`` of the buffer.  VOLATILE repeats the loads where the compiler would keep the first
    ones in registers."""
    TILE: tl.constexpr = LAYOUT.TILE
    if LAYOUT.DENSE:
        row = i_tile * TILE
        return Tile(row, slots.first + row, slots.count - row)
    else:
        TILES: tl.constexpr = (LAYOUT.BLOCK + TILE - 1) // TILE
        shift = (i_tile % TILES) * TILE
        p_slot = slots.ptr + i_b * slots.stride_b + (i_tile // TILES) * 3
        row = tl.load(p_slot, volatile=VOLATILE) + shift
        pos = tl.load(p_slot + 1, volatile=VOLATILE) + shift
        return Tile(row, pos, tl.load(p_slot + 2, volatile=VOLATILE) - shift)


@triton.jit
def tile_rows(i_y, n_m, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr):
    """KV head, query head and row within the slot of each row of a tile, which has ``n_m`` rows of a head.

    PACK query heads of a KV head lie in one tile, all heads of a row side by side.  ``i_y`` counts the tiles
    of heads.  The remaining rows of the tile lie past the last row.
    """
    o_m = tl.arange(0, BLOCK_M)
    if PACK == 1:
        return i_y // GROUP, i_y, o_m
    else:
        TILES: tl.constexpr = (GROUP + PACK - 1) // PACK
        i_hkv = i_y // TILES
        o_h = (i_y % TILES) * PACK + o_m % PACK
        o_m = o_m // PACK
        if BLOCK_M % PACK != 0 or GROUP % PACK != 0:
            o_m = tl.where((o_m < BLOCK_M // PACK) & (o_h < GROUP), o_m, n_m)
            o_h = tl.minimum(o_h, GROUP - 1)
        return i_hkv, i_hkv * GROUP + o_h, o_m


@triton.jit
def row_runs(rows, i_b, i_h, i_slot, WINDOW: tl.constexpr):
    """Bounds (begin, mid, end) of a row's runs: masked ones first, then full ones."""
    if WINDOW:
        return 0, 1, 2
    else:
        p_row = rows.ptr + i_b * rows.stride_b + i_h * rows.stride_h + i_slot * 3
        return tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2)


@triton.jit
def run_tiles(rows, i_run, lo, hi, slots, LAYOUT: tl.constexpr, WINDOW: tl.constexpr, FULL: tl.constexpr):
    """The tiles of a run in the ``slots`` of the other side, and its kind.

    With a table the run is three loads.  A closed-form window needs none: a position x in [lo, hi) of this
    side sees x - left <= y <= x + right of the other side, which is one masked run of both edges around one
    full run.
    """
    TILE: tl.constexpr = LAYOUT.TILE
    if WINDOW:
        left = rows.left
        right = rows.right
        see_lo = 0
        all_lo = 0
        see_hi = tl.cdiv(slots.count, TILE)
        all_hi = slots.count // TILE
        if left is not None:
            see_lo = tl.maximum(lo - left - slots.first, 0) // TILE
            all_lo = tl.cdiv(tl.maximum(hi - 1 - left - slots.first, 0), TILE)
        if right is not None:
            see_hi = tl.minimum(tl.cdiv(tl.maximum(hi + right - slots.first, 0), TILE), see_hi)
            all_hi = tl.minimum(tl.maximum(lo + right + 1 - slots.first, 0) // TILE, all_hi)
        see_hi = tl.maximum(see_hi, see_lo)
        all_lo = tl.minimum(tl.maximum(all_lo, see_lo), see_hi)
        all_hi = tl.minimum(tl.maximum(all_hi, all_lo), see_hi)
        if FULL:
            return RunTiles(all_lo, all_hi, 0, all_lo, 0)
        else:
            return RunTiles(see_lo, see_hi - (all_hi - all_lo), 0, all_lo, all_hi - all_lo)
    else:
        TILES: tl.constexpr = (LAYOUT.BLOCK + TILE - 1) // TILE
        p_run = rows.runs + i_run * 3
        return RunTiles(tl.load(p_run) * TILES, tl.load(p_run + 1) * TILES, tl.load(p_run + 2), 0, 0)


@triton.jit
def skip_cut(tiles, i_t):
    """Index in the buffer of tile ``i_t`` of a run."""
    return i_t + tl.where(i_t >= tiles.cut, tiles.skip, 0)


@triton.jit
def share_row(rows, begin, end, lo, hi, slots, splits, i_split, LAYOUT: tl.constexpr, WINDOW: tl.constexpr):
    """The share of program ``i_split`` of ``splits`` in the tiles of the runs [begin, end) of a row; other
    arguments as in :func:`run_tiles`."""
    n_tiles = 0
    if WINDOW:
        for FULL in tl.static_range(2):
            tiles = run_tiles(rows, 0, lo, hi, slots, LAYOUT, WINDOW, FULL)
            n_tiles += tiles.end - tiles.begin
    else:
        for i_run in range(begin, end):
            tiles = run_tiles(rows, i_run, lo, hi, slots, LAYOUT, WINDOW, False)
            n_tiles += tiles.end - tiles.begin
    n_take = tl.cdiv(n_tiles, splits)
    return KeyShare(i_split * n_take, n_take)


@triton.jit
def share_run(tiles, share):
    """The tiles of a run that belong to a program's share, and the rest of the share for the next runs."""
    n_passed = tl.minimum(share.skip, tiles.end - tiles.begin)
    begin = tiles.begin + n_passed
    end = tl.minimum(tiles.end, begin + share.take)
    rest = KeyShare(share.skip - n_passed, share.take - (end - begin))
    return RunTiles(begin, end, tiles.kind, tiles.cut, tiles.skip), rest
