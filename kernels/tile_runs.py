"""Tiles that a row of blocks visits: slots and runs of blocks as kernel arguments, and their tiles.

A slot is a piece of a sequence in a buffer, a run is a range of slots of one kind (see ``docs/glossary.md``).
A *tile* is a piece of a slot: ``cdiv(slot block, tile)`` tiles a slot, numbered through the buffer.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Slots(NamedTuple):
    """int32 [Bp, slots, 3] = (first row in the buffer, its global position, tokens), and the buffer's
    extent for the dense route, where row r of the buffer is global position ``first + r``."""

    ptr: Any
    stride_b: Any
    first: Any
    count: Any


class Rows(NamedTuple):
    """CSR rows of runs: ptr int32 [Bm, Hm, rows, 3], runs int32 [n, 3] = (start, end, kind)."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    runs: Any


@triton.jit
def locate_tile(
    slots,
    i_b,
    i_tile,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
    VOLATILE: tl.constexpr = False,
):
    """Row in the buffer, global position and number of tokens of tile ``i_tile``.  VOLATILE repeats the loads
    where the compiler would keep earlier ones in registers."""
    if DENSE:
        row = i_tile * TILE
        return row, slots.first + row, slots.count - row
    else:
        TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
        shift = (i_tile % TILES) * TILE
        p_slot = slots.ptr + i_b * slots.stride_b + (i_tile // TILES) * 3
        row = tl.load(p_slot, volatile=VOLATILE) + shift
        pos = tl.load(p_slot + 1, volatile=VOLATILE) + shift
        return row, pos, tl.load(p_slot + 2, volatile=VOLATILE) - shift


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
def run_tiles(
    rows,
    i_run,
    lo,
    hi,
    left,
    right,
    slots,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    FULL: tl.constexpr,
):
    """Tiles of a run and its kind, as (begin, end, kind, cut, skip); tile i stands for i + ``skip`` from
    ``cut`` on.

    With a table the run is three loads.  A closed-form window needs none: a position x in [lo, hi) of this
    side sees x - left <= y <= x + right of the other side, which is one masked run of both edges around one
    full run.
    """
    if WINDOW:
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
            return all_lo, all_hi, 0, all_lo, 0
        else:
            return see_lo, see_hi - (all_hi - all_lo), 0, all_lo, all_hi - all_lo
    else:
        TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
        p_run = rows.runs + i_run * 3
        return tl.load(p_run) * TILES, tl.load(p_run + 1) * TILES, tl.load(p_run + 2), 0, 0


@triton.jit
def count_row_tiles(
    rows,
    begin,
    end,
    lo,
    hi,
    left,
    right,
    slots,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Count the tiles of the runs [begin, end) of a row; arguments as in :func:`run_tiles`."""
    n_tiles = 0
    if WINDOW:
        for FULL in tl.static_range(2):
            t_lo, t_hi, _, _, _ = run_tiles(rows, 0, lo, hi, left, right, slots, BLOCK, TILE, WINDOW, FULL)
            n_tiles += t_hi - t_lo
    else:
        for i_run in range(begin, end):
            t_lo, t_hi, _, _, _ = run_tiles(
                rows, i_run, lo, hi, left, right, slots, BLOCK, TILE, WINDOW, False
            )
            n_tiles += t_hi - t_lo
    return n_tiles
