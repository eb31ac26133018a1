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
from triton.language.target_info import current_target
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FAR: tl.constexpr = tl.constexpr(2**31 - 1)  # a position past every row interval
# The interpreter's tl.dot reads bf16 as raw uint16, so operands are widened there; products of two
# bf16 or fp16 values are exact in float32, which is what the tensor cores accumulate too.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Tiles are at most 256 rows by 256 channels: below this stride, offsets inside one fit 31 bits.
WIDE_STRIDE = 1 << 22


class Strided(NamedTuple):
    """A [batch, head, row, channel] tensor of any strides, as a kernel argument.

    ``wide`` is None where offsets inside a tile fit 32 bits.
    """

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    stride_d: Any
    wide: Any


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


def strided(x: torch.Tensor | None) -> Strided:
    """``x`` [B, H, S, D] as a kernel argument."""
    return _NO_TENSOR if x is None else Strided(x, *layout(x))


def layout(x: torch.Tensor) -> tuple[Any, ...]:
    """What Strided says of x besides its address."""
    return *x.stride(), 1 if max(x.stride()[2:]) >= WIDE_STRIDE else None


_NO_TENSOR = Strided(None, 0, 0, 0, 0, None)


def copyable(x: torch.Tensor) -> bool:
    """Whether tiles of x [B, H, S, D] can be copied by tensor descriptor (TMA): channels side by side,
    address and strides multiples of 16 bytes, batch rows and heads apart."""
    unit = 16 // x.element_size()
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
    return (
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and all(step > 0 and step % unit == 0 for step in steps)
        and x.numel() > 0
    )


def descriptors(x: torch.Tensor, rows: int, widths: tuple[int, int]) -> list[TensorDescriptor | None]:
    """Descriptors of x [B, H, S, D] for tiles of ``rows`` rows by each piece of channels."""
    unit = 16 // x.element_size()
    strides = [stride if size > 1 else unit for size, stride in zip(x.shape[:3], x.stride())]
    shape, strides = list(x.shape), [*strides, 1]
    return [TensorDescriptor(x, shape, strides, [1, 1, rows, width]) if width else None for width in widths]


def with_base(fields: dict[str, Any], x: torch.Tensor) -> TensorDescriptor:
    """The descriptor of ``x`` whose other fields are these, as one had that was checked when it was made."""
    made = object.__new__(TensorDescriptor)
    made.__dict__ = fields | {"base": x}
    return made


def stat(x: torch.Tensor | None) -> Stat:
    """``x`` [B, H, S], contiguous in its last dimension, as a kernel argument."""
    return _NO_STAT if x is None else Stat(x, *x.stride()[:2])


_NO_STAT = Stat(None, 0, 0)


@triton.constexpr_function
def beside(element):
    """Whether products of tiles of this type run beside other instructions of the same warps, with which the
    assembler fills the time: wgmma, which only sm_90 has."""
    target = current_target()
    here = target is not None and target.backend == "cuda" and 90 <= target.arch < 100
    return here and element.primitive_bitwidth == 16


@triton.jit
def head(x, i_b, i_h):
    """Pointer to the first row of one head."""
    return x.ptr + i_b.to(tl.int64) * x.stride_b + i_h.to(tl.int64) * x.stride_h


@triton.jit
def stat_rows(x, i_b, i_h, row):
    """Pointer to the statistics of the tile that starts at ``row``."""
    return head(x, i_b, i_h) + row


@triton.jit
def one_row(x, i_b, i_h, row, o_d):
    """Pointers to channels of one row."""
    return head(x, i_b, i_h) + row.to(tl.int64) * x.stride_s + o_d.to(tl.int64) * x.stride_d


@triton.jit
def load_stat(x, i_b, i_h, row, o_m, m_m, CHECK: tl.constexpr):
    """Statistics of rows ``row + o_m``, 0 where ``m_m`` is false."""
    p = stat_rows(x, i_b, i_h, row) + o_m
    if CHECK:
        return tl.load(p, mask=m_m, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def locate(
    slots,
    i_b,
    i_tile,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
    AGAIN: tl.constexpr = False,
):
    """Row in the buffer, global position and number of tokens of tile ``i_tile``.  AGAIN reads them anew,
    whoever has read them before."""
    if DENSE:
        row = i_tile * TILE
        return row, slots.first + row, slots.count - row
    else:
        TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
        shift = (i_tile % TILES) * TILE
        p_slot = slots.ptr + i_b * slots.stride_b + (i_tile // TILES) * 3
        row = tl.load(p_slot, volatile=AGAIN) + shift
        pos = tl.load(p_slot + 1, volatile=AGAIN) + shift
        return row, pos, tl.load(p_slot + 2, volatile=AGAIN) - shift


@triton.jit
def tile_rows(i_y, n_m, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr):
    """KV head, query head and row within the slot of each row of a tile, which has ``n_m`` rows of a head.

    PACK query heads of a KV head lie in one tile, all heads of a row side by side.  ``i_y`` counts the tiles
    of heads.  What is left over in the tile is past the last row.
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
    """Tiles of a run and its kind, as (begin, end, kind, cut, skip): from ``cut`` on, ``skip`` tiles further.

    With a table the run is three loads.  A closed-form window needs none: positions [lo, hi) of this side
    see x - left <= y <= x + right of the other: one masked run, both edges, and one full run in between.
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
def row_tiles(
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
    """How many tiles the runs [begin, end) of a row have; arguments as in :func:`run_tiles`."""
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


@triton.jit
def tile_pointers(x, p_x, row, o_s, o_d, HOIST: tl.constexpr):
    """Pointers to x[row + o_s, o_d].

    HOIST leaves offsets inside the tile in registers throughout a loop, one a row; otherwise they are a
    wide multiply a row, every time, which also is right for any stride.
    """
    if HOIST and x.wide is None:
        return p_x + row.to(tl.int64) * x.stride_s + (o_s[:, None] * x.stride_s + o_d[None, :] * x.stride_d)
    else:
        return p_x + (row + o_s).to(tl.int64)[:, None] * x.stride_s + o_d.to(tl.int64)[None, :] * x.stride_d


@triton.jit
def inside(o_s, n_s, o_d, DIM: tl.constexpr, PAD: tl.constexpr):
    """Mask of a tile's first ``n_s`` rows and, where its channels are padded, first DIM channels."""
    if PAD:
        return (o_s[:, None] < n_s) & (o_d[None, :] < DIM)
    else:
        return o_s[:, None] < n_s


@triton.jit
def load_rows(
    x,
    p_x,
    row,
    o_s,
    n_s,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    CHECK: tl.constexpr,
    HOIST: tl.constexpr = False,
):
    """x[row + o_s, START : START + WIDTH] as [len(o_s), WIDTH]; zero past ``n_s`` rows or DIM channels."""
    o_d = START + tl.arange(0, WIDTH)
    p = tile_pointers(x, p_x, row, o_s, o_d, HOIST and not CHECK)
    m = inside(o_s, n_s, o_d, DIM, START + WIDTH > DIM)
    if CHECK:
        return tl.load(p, mask=m, other=0.0)
    elif START + WIDTH > DIM:
        return tl.load(p, mask=o_d[None, :] < DIM, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def store_rows(
    x, p_x, row, o_s, n_s, b_x, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ADD: tl.constexpr
):
    """x[row + o_s, START : START + WIDTH] = b_x (or += b_x), within ``n_s`` rows and DIM channels."""
    o_d = START + tl.arange(0, WIDTH)
    p = tile_pointers(x, p_x, row, o_s, o_d, True)
    m = inside(o_s, n_s, o_d, DIM, START + WIDTH > DIM)
    if ADD:  # where nobody else adds to these elements, a plain sum without the registers of a load
        tl.atomic_add(p, b_x.to(x.ptr.dtype.element_ty), mask=m, sem="relaxed")
    else:
        tl.store(p, b_x.to(x.ptr.dtype.element_ty), mask=m)


@triton.jit
def load_pair(x, i_b, i_h, row, o_s, n_s, W0: tl.constexpr, W1: tl.constexpr, DIM: tl.constexpr):
    """Rows of one head in two pieces of channels, [len(o_s), W0] and [len(o_s), W1] (0.0 where W1 is 0)."""
    p_x = head(x, i_b, i_h)
    b_0 = load_rows(x, p_x, row, o_s, n_s, 0, W0, DIM, True)
    if W1 > 0:
        return b_0, load_rows(x, p_x, row, o_s, n_s, W0, W1, DIM, True)
    else:
        return b_0, 0.0


@triton.jit
def stream_rows(
    x,
    desc,
    i_b,
    i_h,
    row,
    o_s,
    n_s,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    CHECK: tl.constexpr,
    HOIST: tl.constexpr,
):
    """load_rows, by tensor descriptor where there is one: it finds zeros behind the tensor's last row."""
    if desc is None:
        return load_rows(x, head(x, i_b, i_h), row, o_s, n_s, START, WIDTH, DIM, CHECK, HOIST)
    else:
        return desc.load([i_b, i_h, row, START]).reshape([o_s.shape[0], WIDTH])


@triton.jit
def stream_pair(
    x,
    desc0,
    desc1,
    i_b,
    i_h,
    row,
    o_s,
    n_s,
    W0: tl.constexpr,
    W1: tl.constexpr,
    DIM: tl.constexpr,
    CHECK: tl.constexpr,
    HOIST: tl.constexpr,
):
    """load_pair inside a loop, from a descriptor for each piece or None; ``n_s`` matters only where CHECK."""
    b_0 = stream_rows(x, desc0, i_b, i_h, row, o_s, n_s, 0, W0, DIM, CHECK, HOIST)
    if W1 > 0:
        return b_0, stream_rows(x, desc1, i_b, i_h, row, o_s, n_s, W0, W1, DIM, CHECK, HOIST)
    else:
        return b_0, 0.0


@triton.jit
def store_pair(
    x, p_x, row, o_s, n_s, b_0, b_1, W0: tl.constexpr, W1: tl.constexpr, DIM: tl.constexpr, ADD: tl.constexpr
):
    """The counterpart of load_pair."""
    store_rows(x, p_x, row, o_s, n_s, b_0, 0, W0, DIM, ADD)
    if W1 > 0:
        store_rows(x, p_x, row, o_s, n_s, b_1, W0, W1, DIM, ADD)


@triton.jit
def add_rows(
    x, desc, i_b, i_h, row, o_s, n_s, b_x, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr
):
    """x[row + o_s, START : START + WIDTH] += b_x of one head, whoever else adds there.  A descriptor adds the
    rows from ``n_s`` on too, where b_x is 0."""
    if desc is None:
        store_rows(x, head(x, i_b, i_h), row, o_s, n_s, b_x, START, WIDTH, DIM, True)
    else:
        desc.atomic_add([i_b, i_h, row, START], b_x.reshape([1, 1, o_s.shape[0], WIDTH]))


@triton.jit
def zeros_pair(N: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, ACC: tl.constexpr):
    """Accumulators for two pieces of channels."""
    if W1 > 0:
        return tl.zeros([N, W0], ACC), tl.zeros([N, W1], ACC)
    else:
        return tl.zeros([N, W0], ACC), 0.0


@triton.jit
def dot(b_a, b_b, PRECISION: tl.constexpr):
    """a @ b in float32 (float64 for float64 operands)."""
    if INTERPRETED and b_a.dtype != tl.float64:
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    if b_a.dtype == tl.float64:
        return tl.dot(b_a, b_b, out_dtype=tl.float64)
    else:
        return tl.dot(b_a, b_b, input_precision=PRECISION)


@triton.jit
def inner(b_a0, b_a1, b_b0, b_b1, W1: tl.constexpr, PRECISION: tl.constexpr, FLIP: tl.constexpr = False):
    """a @ b^T over both pieces of channels; FLIP multiplies (b @ a^T)^T."""
    if FLIP:
        b_s = dot(b_b0, tl.trans(b_a0), PRECISION)
        if W1 > 0:
            b_s += dot(b_b1, tl.trans(b_a1), PRECISION)
        return tl.trans(b_s)
    else:
        b_s = dot(b_a0, tl.trans(b_b0), PRECISION)
        if W1 > 0:
            b_s += dot(b_a1, tl.trans(b_b1), PRECISION)
        return b_s


@triton.jit
def outer(b_c0, b_c1, b_a, b_b0, b_b1, W1: tl.constexpr, PRECISION: tl.constexpr):
    """c + a @ b for both pieces of channels, a rounded to b's dtype first."""
    b_c0 += dot(b_a.to(b_b0.dtype), b_b0, PRECISION)
    if W1 > 0:
        b_c1 += dot(b_a.to(b_b1.dtype), b_b1, PRECISION)
    return b_c0, b_c1


@triton.jit
def within(o_s, n_s, CHECK: tl.constexpr):
    """Which rows of a tile are its own: all of them, unless CHECK."""
    return o_s < n_s if CHECK else o_s >= 0


@triton.jit
def in_window(o_far, o_near, left, right, end):
    """near - left <= far <= near + right, and far < end; None is unbounded."""
    if right is not None:
        b_hi = o_near + right + 1
        if end is not None:
            b_hi = tl.minimum(b_hi, end)
        m = o_far < b_hi
    elif end is not None:
        m = o_far < end
    else:
        m = o_far >= 0
    if left is not None:
        m = m & (o_far >= o_near - left)
    return m


@triton.jit
def row_intervals(interval, i_b, i_h, row, o_m, m_m, MASK: tl.constexpr):
    """Positions [lo, hi) that queries ``row + o_m`` see inside masked blocks; hi = 0 where not ``m_m``."""
    if MASK == "interval" and interval.lo is not None:
        o = i_b.to(tl.int64) * interval.stride_b + i_h.to(tl.int64) * interval.stride_h + row
        b_lo = tl.load(interval.lo + o + o_m, mask=m_m, other=0)
        return b_lo, tl.load(interval.hi + o + o_m, mask=m_m, other=0)
    else:
        return o_m, o_m  # not read


@triton.jit
def visible(
    i_b,
    i_h,
    o_q,
    o_kv,
    m_q,
    m_in,
    o_at,
    b_lo,
    b_hi,
    end,
    kind,
    mask_caps,
    MASK: tl.constexpr,
    MASK_MOD: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """What a masked block lets through, by row interval or by mask_mod.

    Intervals of queries are lo <= at < hi in whatever frame keys have in ``o_at``.  Queries that are not in
    ``m_q`` have empty ones, keys out of range start at ``end`` (None: there are none).  A mask_mod decides
    within ``m_in``.  A BOUNDED block (kind 2) was listed as full and is cut only by the ends of the sequence.
    """
    if MASK == "interval":
        if BOUNDED:
            b_lo = tl.where(kind == 2, -FAR, b_lo)
            b_hi = tl.where((kind == 2) & m_q, FAR, b_hi)
        if end is not None:
            b_hi = tl.minimum(b_hi, end)
        return (o_at >= b_lo) & (o_at < b_hi)
    elif MASK == "mod":
        m_keep = MASK_MOD(i_b, i_h, o_q, o_kv, mask_caps)
        if BOUNDED:
            m_keep = m_keep | (kind == 2)
        return m_keep & m_in
    else:
        return m_in


@triton.jit
def to_log2(b_s, i_b, i_h, o_q, o_kv, score_caps, SCALE: tl.constexpr, SCORE_MOD: tl.constexpr):
    """Raw dot products -> (what score_mod was given, final scores in log2 units)."""
    if SCORE_MOD is None:
        return b_s, b_s * (SCALE * LOG2E)
    else:
        b_s = b_s * SCALE
        b_t = SCORE_MOD(b_s, i_b, i_h, o_q, o_kv, score_caps)
        return b_s, b_t.to(b_s.dtype) * LOG2E


@triton.jit
def inverse(b_l):
    """1 / l, and 0 for rows that have seen nothing; a NaN is passed on."""
    m_seen = b_l != 0
    return tl.where(m_seen, 1.0 / tl.where(m_seen, b_l, 1.0), 0.0)


@triton.jit
def largest(b_m, b_l):
    """The largest score in natural units.  A running maximum on a GPU drops NaN scores, the sum keeps them;
    a sum that a score of +inf made NaN says nothing about others."""
    m_nan = (b_l != b_l) & (b_m < float("inf"))
    return tl.where(m_nan, b_l, b_m * LN2)


@triton.jit
def log_sum(b_m, b_l):
    """lse in natural log."""
    m_seen = b_l != 0
    return tl.where(m_seen, b_m + tl.log2(tl.where(m_seen, b_l, 1.0)), -float("inf")) * LN2
