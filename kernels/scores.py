"""Scores of a tile: products, masks, units of the softmax, and the statistics of its rows."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import current_target

from tritoncp.kernels.tile_runs import BOUNDED_KIND
from tritoncp.kernels.tiles import INTERPRETED, count_pieces, piece_width

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FAR: tl.constexpr = tl.constexpr(2**31 - 1)  # a position after all row intervals


class Closure(NamedTuple):
    """A user's function as a kernel argument, with the tensors and numbers that it captures; no constexpr,
    whose key in Triton's cache would have the name of the function, not its source."""

    fn: Any
    captured: tuple[Any, ...] = ()


class Origin(NamedTuple):
    """The indices of the tensors' first batch row and query head, as masks and mods count them."""

    batch: Any
    head: Any


class Queries(NamedTuple):
    """Queries of a tile as masks and mods see them."""

    batch: Any
    head: Any  # a scalar, or of each query [M, 1]
    pos: Any  # global positions, [M, 1] or [1, M]
    present: Any  # whether they lie in the slot [M]


@triton.jit
def zeros_pieces(N: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr):
    """Zero accumulators [N, width] for each piece of the channels."""
    b_x = ()
    for I in tl.static_range(count_pieces(DIM)):
        b_x = b_x + (tl.zeros([N, piece_width(DIM, I)], ACC),)  # noqa: RUF005 - Triton unpacks no tuple
    return b_x


@triton.jit
def scale_pieces(b_x, factor):
    """x * factor for each piece of channels."""
    b_y = ()
    for I in tl.static_range(len(b_x)):
        b_y = b_y + (b_x[I] * factor,)  # noqa: RUF005
    return b_y


@triton.jit
def select_pieces(b_x, DIM: tl.constexpr):
    """The pieces of a range of channels."""
    b_y = ()
    for I in tl.static_range(count_pieces(DIM)):
        b_y = b_y + (b_x[DIM.skip + I],)  # noqa: RUF005
    return b_y


@triton.jit
def _first(x, y):
    return x


@triton.jit
def dot(b_a, b_b, PRECISION: tl.constexpr):
    """a @ b in float32 (float64 for float64 operands)."""
    if INTERPRETED and b_a.dtype != tl.float64:
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    if b_a.dtype == tl.float64:
        if not INTERPRETED:
            # Triton lays out an operand by the narrowest load behind it, such as a mask's, and fails to
            # compile float64 where that has 8 or 16 bits (3.7.1; sm_80, sm_90).  A reduction ends its search.
            b_a = tl.reduce(tl.expand_dims(b_a, 2), 2, _first)
        return tl.dot(b_a, b_b, out_dtype=tl.float64)
    else:
        return tl.dot(b_a, b_b, input_precision=PRECISION)


@triton.jit
def dot_nt(b_a, b_b, PRECISION: tl.constexpr, FLIP: tl.constexpr = False):
    """a @ b^T over all pieces of channels; FLIP multiplies (b @ a^T)^T."""
    if FLIP:
        return tl.trans(dot_nt(b_b, b_a, PRECISION))
    else:
        b_s = dot(b_a[0], tl.trans(b_b[0]), PRECISION)
        for I in tl.static_range(1, len(b_a)):
            b_s += dot(b_a[I], tl.trans(b_b[I]), PRECISION)
        return b_s


@triton.jit
def add_dot(b_c, b_a, b_b, PRECISION: tl.constexpr):
    """c + a @ b for each piece of channels, a rounded to b's dtype first."""
    b_sum = ()
    for I in tl.static_range(len(b_c)):
        b_sum = b_sum + (b_c[I] + dot(b_a.to(b_b[I].dtype), b_b[I], PRECISION),)  # noqa: RUF005
    return b_sum


@triton.jit
def row_mask(o_s, n_s, CHECK: tl.constexpr):
    """Mask of a tile's first ``n_s`` rows; all rows without CHECK."""
    return o_s < n_s if CHECK else o_s >= 0


@triton.jit
def window_mask(o_far, o_near, left, right, end):
    """Mask of near - left <= far <= near + right and far < end; None is unbounded."""
    if right is not None:
        b_end = o_near + right + 1
        if end is not None:
            b_end = tl.minimum(b_end, end)
        m_in = o_far < b_end
    elif end is not None:
        m_in = o_far < end
    else:
        m_in = o_far >= 0
    if left is not None:
        m_in = m_in & (o_far >= o_near - left)
    return m_in


@triton.jit
def row_intervals(interval, rows, i_h, m_m):
    """Positions (begin, end) that a tile's rows see inside masked blocks, by head ``i_h`` of the table;
    end = 0 where not ``m_m``."""
    if interval.begin is not None:
        o_b = rows.batch.to(tl.int64) * interval.stride_b
        o_row = o_b + i_h.to(tl.int64) * interval.stride_h + rows.first
        b_begin = tl.load(interval.begin + o_row + rows.offsets, mask=m_m, other=0)
        return b_begin, tl.load(interval.end + o_row + rows.offsets, mask=m_m, other=0)
    else:
        return rows.offsets, rows.offsets  # not read


@triton.jit
def interval_mask(o_at, b_begin, b_end, m_q, end, kind, BOUNDED: tl.constexpr):
    """Mask of begin <= at < end and at < ``end``, all counted from the same position; None: no end.

    The interval of a query outside ``m_q`` is empty.  A block of BOUNDED_KIND has no interval.
    """
    if BOUNDED:
        b_begin = tl.where(kind == BOUNDED_KIND, -FAR, b_begin)
        b_end = tl.where((kind == BOUNDED_KIND) & m_q, FAR, b_end)
    if end is not None:
        b_end = tl.minimum(b_end, end)
    return (o_at >= b_begin) & (o_at < b_end)


@triton.jit
def keep_pairs(mask_mod, queries, o_kv):
    """Mask of the pairs that mask_mod admits."""
    return mask_mod.fn(queries.batch, queries.head, queries.pos, o_kv, mask_mod.captured)


@triton.jit
def mod_mask(mask_mod, queries, o_kv, m_in, kind, BOUNDED: tl.constexpr):
    """Mask of the pairs within ``m_in`` that mask_mod admits, all of them in a block of BOUNDED_KIND or
    without a mask_mod."""
    if mask_mod.fn is not None:
        m_keep = keep_pairs(mask_mod, queries, o_kv)
        if BOUNDED:
            m_keep = m_keep | (kind == BOUNDED_KIND)
        return m_keep & m_in
    else:
        return m_in


@triton.jit
def visible_keys(tables, queries, b_bounds, kv, o_n, kind, RULE: tl.constexpr, RELATIVE: tl.constexpr = True):
    """Mask [M, N] of the pairs that a tile ``kv`` of a masked block admits.

    queries.pos: [M, 1]; b_bounds: the result of row_intervals

    RELATIVE counts positions from the tile's first key: they are the same in each tile and stay in registers
    (without: a tenth more instructions of forward, sm_90; with: dQ of 128 channels spills 16 bytes, sm_80).
    """
    o_kv = (kv.pos + o_n)[None, :]
    first = kv.pos if RELATIVE else 0
    o_at = o_n[None, :] if RELATIVE else o_kv
    end = kv.n + (kv.pos - first) if RULE.RAGGED else None
    if tables.rows.runs is None:
        return window_mask(o_at, queries.pos - first, tables.rows.left, tables.rows.right, end)
    elif tables.interval.begin is not None:
        b_begin = (b_bounds[0] - first)[:, None]
        b_end = (b_bounds[1] - first)[:, None]
        return interval_mask(o_at, b_begin, b_end, queries.present[:, None], end, kind, RULE.BOUNDED)
    else:
        m_n = row_mask(o_n, kv.n, RULE.RAGGED)[None, :]
        return mod_mask(tables.mask_mod, queries, o_kv, m_n, kind, RULE.BOUNDED)


@triton.jit
def visible_queries(tables, queries, b_bounds, tile, o_m, o_kv, kind, RULE: tl.constexpr):
    """Mask [N, M] of the pairs that a ``tile`` of queries of a masked block admits; queries.pos: [1, M]."""
    if tables.rows.runs is None:
        n_m = tile.n if RULE.RAGGED else None
        return window_mask(o_m[None, :], o_kv - tile.pos, tables.rows.left, tables.rows.right, n_m)
    elif tables.interval.begin is not None:
        b_begin = b_bounds[0][None, :]
        b_end = b_bounds[1][None, :]
        m_q = queries.present[None, :]
        return interval_mask(o_kv, b_begin, b_end, m_q, None, kind, RULE.BOUNDED)
    else:
        return mod_mask(tables.mask_mod, queries, o_kv, queries.present[None, :], kind, RULE.BOUNDED)


@triton.jit
def online_softmax(b_s, b_m, b_l, C: tl.constexpr, GUARD: tl.constexpr):
    """One step of the online softmax over scores of a tile: probabilities, the factor that rescales earlier
    sums, and the new maximum and sum of each row.  C scales the scores to log2 units; GUARD: all scores of a
    row may be -inf."""
    b_max = tl.maximum(b_m, tl.max(b_s, 1) * C)
    b_safe = tl.where(b_max == -float("inf"), 0.0, b_max) if GUARD else b_max
    b_p = tl.exp2(b_s * C - b_safe[:, None])
    b_r = tl.exp2(b_m - b_safe)
    return b_p, b_r, b_max, b_l * b_r + tl.sum(b_p, 1)


@triton.constexpr_function
def minimum_drops_nan():
    """Whether a minimum that propagates NaN takes several instructions: on AMD, whose instruction returns NaN
    only if both operands are NaN."""
    target = current_target()
    return target is not None and target.backend == "hip"


@triton.jit
def probabilities(b_s, b_lse):
    """exp2(s - lse), at most 1: where scores are so large that lse has no fractional digits left, the
    difference may come out positive.  A row whose lse is NaN stays NaN."""
    if minimum_drops_nan():
        return tl.exp2(tl.minimum(b_s - b_lse, b_lse * 0.0))
    else:
        return tl.exp2(tl.minimum(b_s - b_lse, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.constexpr_function
def takes_scale(score_mod):
    """Whether a score_mod multiplies dot products by the scale itself, together with a factor of its own."""
    return "scale" in score_mod.arg_names


@triton.jit
def modify_scores(b_s, queries, o_kv, score_mod, SCALE: tl.constexpr):
    """score_mod(s * SCALE) of raw dot products s."""
    i_b, i_h, o_q, _ = queries
    if takes_scale(score_mod.fn):
        return score_mod.fn(b_s, i_b, i_h, o_q, o_kv, score_mod.captured, SCALE).to(b_s.dtype)
    else:
        return score_mod.fn(b_s * SCALE, i_b, i_h, o_q, o_kv, score_mod.captured).to(b_s.dtype)


@triton.jit
def to_log2(b_s, queries, o_kv, score_mod, SCALE: tl.constexpr):
    """Convert raw dot products to (scores before score_mod, final scores in log2 units)."""
    if score_mod.fn is None:
        return b_s, b_s * (SCALE * LOG2E)
    else:
        b_s = b_s * SCALE
        return b_s, modify_scores(b_s, queries, o_kv, score_mod, 1.0) * LOG2E


@triton.jit
def inverse_sum(b_l):
    """1 / l, 0 for rows without a visible key; propagates NaN."""
    m_nonzero = b_l != 0
    return tl.where(m_nonzero, 1.0 / tl.where(m_nonzero, b_l, 1.0), 0.0)


@triton.jit
def row_max(b_m, b_l):
    """The largest score of each row in natural units, NaN if a score is NaN: the running maximum on a GPU
    drops NaN, the sum keeps it.  With a score of +inf the sum is NaN in any case, and the maximum decides."""
    m_nan = (b_l != b_l) & (b_m < float("inf"))
    return tl.where(m_nan, b_l, b_m * LN2)


@triton.jit
def row_lse(b_m, b_l):
    """Logsumexp of each row in natural units, -inf for rows without a visible key."""
    m_nonzero = b_l != 0
    return tl.where(m_nonzero, b_m + tl.log2(tl.where(m_nonzero, b_l, 1.0)), -float("inf")) * LN2
