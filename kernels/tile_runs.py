"""Tiles that a row of blocks visits: slots and runs of blocks as kernel arguments, and their tiles.

A slot is a piece of a sequence in a buffer, a run is a range of slots of one kind (see ``docs/glossary.md``).
A *tile* is a piece of a slot: ``cdiv(slot block, tile)`` tiles a slot, numbered through the buffer.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import current_target

from tritoncp.kernels.opaque_integers import integer
from tritoncp.kernels.toolchain import version_numbers

MOVES_PAST_COPIES: tl.constexpr = tl.constexpr(version_numbers(triton.__version__) < (3, 9))
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
    TILE: Any  # rows of a tile, of one head
    TILES: Any  # tiles of a slot
    DENSE: Any  # one slot, whose tiles are counted from its first row


class Rows(NamedTuple):
    """Blocks of the other side that each row of blocks sees: CSR, ptr int32 [Bm, Hm, rows, 3] and
    runs int32 [n, 3] = (start, end, kind); or, without ``runs``, a closed-form window: positions ``left`` and
    ``right`` of its own, None: unbounded."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    runs: Any
    left: Any
    right: Any


class Interval(NamedTuple):
    """int32 [Bm, Hm, S_local]: inside masked blocks a row sees global positions begin <= kv < end."""

    begin: Any
    end: Any
    stride_b: Any
    stride_h: Any


class StepTables(NamedTuple):
    """Visible pairs of a step and places of its tiles, as a kernel argument.  In masked blocks a closed-form
    window decides which pairs are visible, else the mask_mod, else the row intervals."""

    q_slots: Any  # Slots
    kv_slots: Any  # Slots
    rows: Any  # Rows over Q slots, or over KV slots where programs are tiles of keys
    interval: Any  # Interval
    mask_mod: Any  # Closure


class MaskRule(NamedTuple):
    """Which kinds of blocks and tiles a launch has: constants of the kernel."""

    MASKED: Any  # some blocks are not full
    BOUNDED: Any  # some blocks are of BOUNDED_KIND
    RAGGED: Any  # tiles of masked blocks may have fewer tokens than rows


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


@triton.constexpr_function
def multiplies_from_registers():
    """Whether all operands of products lie in registers, which are then short: those of mma.sync (sm_80,
    sm_120)."""
    target = current_target()
    return target is not None and target.backend == "cuda" and not 90 <= target.arch < 120


@triton.jit
def locate_tile(slots, i_b, i_tile, LAYOUT: tl.constexpr, VOLATILE: tl.constexpr = False):
    """Tile ``i_tile`` of the buffer.  VOLATILE computes it again where the compiler would keep the first
    result, and the mask of its rows, in registers."""
    TILE: tl.constexpr = LAYOUT.TILE
    if LAYOUT.DENSE:
        row = i_tile * TILE
        if VOLATILE and multiplies_from_registers():
            row += tl.load(slots.ptr + i_b * integer(slots.stride_b), volatile=True)  # 0, the first row
        return Tile(row, slots.first + row, slots.count - row)
    else:
        TILES: tl.constexpr = LAYOUT.TILES
        shift = (i_tile % TILES) * TILE
        p_slot = slots.ptr + i_b * integer(slots.stride_b) + (i_tile // TILES) * 3
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
def row_runs(rows, i_b, i_h, i_slot):
    """Bounds (begin, mid, end) of a row's runs: masked ones first, then full ones."""
    if rows.runs is None:
        if multiplies_from_registers() and not MOVES_PAST_COPIES:
            # Triton stores what all tiles share, such as Q, to shared memory in the loop over tiles, and
            # moves the store ahead of the loop. From 3.9 on it moves none past copies, and the first copies
            # of the loop are ahead of it, unless another loop is around (without: dQ spills 1792 bytes,
            # sm_80, 128 channels).
            one = tl.minimum(tl.num_programs(0), 1)  # 1, as only the assembler knows
            return 0, one, one + 1
        else:
            return 0, 1, 2
    else:
        p_row = rows.ptr + i_b * integer(rows.stride_b) + i_h * integer(rows.stride_h) + i_slot * 3
        return tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2)


@triton.jit
def run_tiles(rows, i_run, tile, slots, TILE: tl.constexpr, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    """The tiles of a run in the ``slots`` of the other side, and its kind.

    With a table the run is three loads.  A closed-form window needs none: a position x of this ``tile``, of
    at most TILE rows, sees x - left <= y <= x + right of the other side, which is one masked run of both
    edges around one full run.
    """
    STEP: tl.constexpr = LAYOUT.TILE
    if rows.runs is None:
        first = slots.first
        begin = tile.pos
        end = tile.pos + tl.minimum(tile.n, TILE)
        see_begin = 0
        all_begin = 0
        see_end = tl.cdiv(slots.count, STEP)
        all_end = slots.count // STEP
        if rows.left is not None:
            see_begin = tl.maximum(begin - rows.left - first, 0) // STEP
            all_begin = tl.cdiv(tl.maximum(end - 1 - rows.left - first, 0), STEP)
        if rows.right is not None:
            see_end = tl.minimum(tl.cdiv(tl.maximum(end + rows.right - first, 0), STEP), see_end)
            all_end = tl.minimum(tl.maximum(begin + rows.right + 1 - first, 0) // STEP, all_end)
        see_end = tl.maximum(see_end, see_begin)
        all_begin = tl.minimum(tl.maximum(all_begin, see_begin), see_end)
        all_end = tl.minimum(tl.maximum(all_end, all_begin), see_end)
        if FULL:
            return RunTiles(all_begin, all_end, 0, all_begin, 0)
        else:
            return RunTiles(see_begin, see_end - (all_end - all_begin), 0, all_begin, all_end - all_begin)
    else:
        TILES: tl.constexpr = LAYOUT.TILES
        p_run = rows.runs + i_run * 3
        return RunTiles(tl.load(p_run) * TILES, tl.load(p_run + 1) * TILES, tl.load(p_run + 2), 0, 0)


@triton.jit
def skip_cut(tiles, i_t):
    """Index in the buffer of tile ``i_t`` of a run."""
    return i_t + tl.where(i_t >= tiles.cut, tiles.skip, 0)


@triton.jit
def share_row(rows, begin, end, tile, slots, i_split, splits, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """The share of program ``i_split`` of ``splits`` in the tiles of the runs [begin, end) of a row; other
    arguments as in :func:`run_tiles`."""
    if splits is None:
        return KeyShare(0, 0)  # not read
    else:
        n_tiles = 0
        if rows.runs is None:
            for FULL in tl.static_range(2):
                tiles = run_tiles(rows, 0, tile, slots, TILE, LAYOUT, FULL)
                n_tiles += tiles.end - tiles.begin
        else:
            for i_run in range(begin, end):
                tiles = run_tiles(rows, i_run, tile, slots, TILE, LAYOUT, False)
                n_tiles += tiles.end - tiles.begin
        n_take = tl.cdiv(n_tiles, splits)
        return KeyShare(i_split * n_take, n_take)


@triton.jit
def share_run(tiles, share, splits):
    """The tiles of a run that belong to a program's share, and the rest of the share for the next runs; all
    tiles without ``splits``."""
    if splits is None:
        return tiles, share
    else:
        n_passed = tl.minimum(share.skip, tiles.end - tiles.begin)
        begin = tiles.begin + n_passed
        end = tl.minimum(tiles.end, begin + share.take)
        rest = KeyShare(share.skip - n_passed, share.take - (end - begin))
        return RunTiles(begin, end, tiles.kind, tiles.cut, tiles.skip), rest
