"""Tile helpers shared by every kernel: where a tile lies, which tiles a row visits, how scores are made.

Naming grammar of kernel locals
    i_*  scalar index (program, loop, batch, head)      o_*  vector of offsets
    n_*  scalar count                                    b_*  block of values in registers
    p_*  pointer                                         m_*  boolean mask
    UPPER_CASE is a ``tl.constexpr``.  A shape comment stands behind each block: M query rows, N key
    rows, D head dim of q and k, E head dim of v, each cut in pieces 0 and 1.

A *tile* is a piece of a slot: ``cdiv(slot block, tile)`` tiles a slot, numbered through the buffer.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# The interpreter's tl.dot reads bf16 as raw uint16, so operands are widened there; products of two
# bf16 or fp16 values are exact in float32, which is what the tensor cores accumulate too.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Strided(NamedTuple):
    """A [batch, head, row, channel] tensor of any strides, as a kernel argument."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    stride_d: Any


class Stat(NamedTuple):
    """A [batch, head, row] tensor of row statistics, rows contiguous."""

    ptr: Any
    stride_b: Any
    stride_h: Any


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


class Interval(NamedTuple):
    """int32 [Bm, Hm, S_local]: inside masked blocks a row sees global positions lo <= kv < hi."""

    lo: Any
    hi: Any
    stride_b: Any
    stride_h: Any


def strided(x: torch.Tensor) -> Strided:
    """``x`` [B, H, S, D] as a kernel argument."""
    return Strided(x, *x.stride())


def stat(x: torch.Tensor) -> Stat:
    """``x`` [B, H, S], contiguous in its last dimension, as a kernel argument."""
    return Stat(x, x.stride(0), x.stride(1))


@triton.jit
def head(x, i_b, i_h):
    """Pointer to the first row of one head."""
    return x.ptr + i_b.to(tl.int64) * x.stride_b + i_h.to(tl.int64) * x.stride_h


@triton.jit
def stat_rows(x, i_b, i_h, row):
    """Pointer to the statistics of the tile that starts at ``row``."""
    return head(x, i_b, i_h) + row


@triton.jit
def locate(slots, i_b, i_tile, BLOCK: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr):
    """Row in the buffer, global position and number of tokens of tile ``i_tile``."""
    if DENSE:
        row = i_tile * TILE
        return row, slots.first + row, slots.count - row
    else:
        TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
        shift = (i_tile % TILES) * TILE
        p_slot = slots.ptr + i_b * slots.stride_b + (i_tile // TILES) * 3
        return tl.load(p_slot) + shift, tl.load(p_slot + 1) + shift, tl.load(p_slot + 2) - shift


@triton.jit
def row_runs(rows, i_b, i_h, i_slot, WINDOW: tl.constexpr):
    """Bounds (begin, mid, end) of a row's runs: masked ones first, then full ones."""
    if WINDOW:
        return 0, 2, 3
    else:
        p_row = rows.ptr + i_b * rows.stride_b + i_h * rows.stride_h + i_slot * 3
        return tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2)


@triton.jit
def run_tiles(rows, i_run, lo, hi, left, right, slots, BLOCK: tl.constexpr, TILE: tl.constexpr,
              WINDOW: tl.constexpr):
    """Tiles [begin, end) of a run and its kind.

    With a table the run is three loads.  A closed-form window needs none: positions [lo, hi) of this
    side see x - left <= y <= x + right of the other; run 0 is the left edge, 1 the right, 2 the inside.
    """
    if WINDOW:
        n_tiles = tl.cdiv(slots.count, TILE)
        see_lo = tl.maximum(lo - left - slots.first, 0) // TILE
        see_hi = tl.minimum(tl.cdiv(tl.maximum(hi + right - slots.first, 0), TILE), n_tiles)
        all_lo = tl.cdiv(tl.maximum(hi - 1 - left - slots.first, 0), TILE)
        all_hi = tl.minimum(tl.maximum(lo + right + 1 - slots.first, 0), slots.count) // TILE
        see_hi = tl.maximum(see_hi, see_lo)
        all_lo = tl.minimum(tl.maximum(all_lo, see_lo), see_hi)
        all_hi = tl.minimum(tl.maximum(all_hi, all_lo), see_hi)
        begin = tl.where(i_run == 0, see_lo, tl.where(i_run == 1, all_hi, all_lo))
        end = tl.where(i_run == 0, all_lo, tl.where(i_run == 1, see_hi, all_hi))
        return begin, end, 0
    else:
        TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
        p_run = rows.runs + i_run * 3
        return tl.load(p_run) * TILES, tl.load(p_run + 1) * TILES, tl.load(p_run + 2)


@triton.jit
def load_rows(x, p_x, row, o_s, n_s, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
              CHECK: tl.constexpr):
    """x[row + o_s, START : START + WIDTH] as [len(o_s), WIDTH]; zero past ``n_s`` rows or DIM channels."""
    o_d = START + tl.arange(0, WIDTH)
    p = p_x + row.to(tl.int64) * x.stride_s + (o_s[:, None].to(tl.int64) * x.stride_s + o_d[None, :] * x.stride_d)
    if CHECK:
        if START + WIDTH > DIM:
            return tl.load(p, mask=(o_s[:, None] < n_s) & (o_d[None, :] < DIM), other=0.0)
        else:
            return tl.load(p, mask=o_s[:, None] < n_s, other=0.0)
    else:
        if START + WIDTH > DIM:
            return tl.load(p, mask=o_d[None, :] < DIM, other=0.0)
        else:
            return tl.load(p)


@triton.jit
def store_rows(x, p_x, row, o_s, n_s, b_x, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
               ADD: tl.constexpr):
    """x[row + o_s, START : START + WIDTH] = b_x (or += b_x), within ``n_s`` rows and DIM channels."""
    o_d = START + tl.arange(0, WIDTH)
    p = p_x + row.to(tl.int64) * x.stride_s + (o_s[:, None].to(tl.int64) * x.stride_s + o_d[None, :] * x.stride_d)
    m = (o_s[:, None] < n_s) & (o_d[None, :] < DIM)
    if ADD:
        b_x += tl.load(p, mask=m, other=0.0)
    tl.store(p, b_x.to(x.ptr.dtype.element_ty), mask=m)


@triton.jit
def dot(b_a, b_b, PRECISION: tl.constexpr):
    """a @ b in float32 (float64 for float64 operands)."""
    if INTERPRETED:
        if b_a.dtype != tl.float64:
            b_a = b_a.to(tl.float32)
            b_b = b_b.to(tl.float32)
    if b_a.dtype == tl.float64:
        return tl.dot(b_a, b_b, out_dtype=tl.float64)
    else:
        return tl.dot(b_a, b_b, input_precision=PRECISION)


@triton.jit
def visible(i_b, i_h, o_q, o_kv, m_in, b_lo, b_hi, kind, mask_caps, MASK: tl.constexpr, MASK_MOD: tl.constexpr,
            BOUNDED: tl.constexpr):
    """What a masked block lets through: in-range pairs, by row interval or by mask_mod.

    A BOUNDED block (kind 2) was listed as full and is cut only by the ends of the sequence.
    """
    if MASK == "interval":
        m_keep = (o_kv >= b_lo) & (o_kv < b_hi)
    elif MASK == "mod":
        m_keep = MASK_MOD(i_b, i_h, o_q, o_kv, mask_caps)
    if MASK == "none":
        return m_in
    elif BOUNDED:
        return (m_keep | (kind == 2)) & m_in
    else:
        return m_keep & m_in


@triton.jit
def to_log2(b_s, i_b, i_h, o_q, o_kv, score_caps, SCALE: tl.constexpr, SCORE_MOD: tl.constexpr):
    """Raw dot products -> (scaled scores, scores after score_mod in log2 units)."""
    b_s = b_s * SCALE
    if SCORE_MOD is None:
        return b_s, b_s * LOG2E
    else:
        b_t = SCORE_MOD(b_s, i_b, i_h, o_q, o_kv, score_caps)
        return b_s, b_t.to(b_s.dtype) * LOG2E
