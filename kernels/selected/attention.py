"""Attention to keys that are selected at run time: forward, dQ, and dK/dV of blocks of keys, of one step.

The query heads that share their keys lie in one tile. Keys that are selected one by one are gathered by their
rows in the buffer; of a selected block of keys, whole tiles are read. dK and dV of blocks are computed from
transposed lists, of the queries that selected a block, in fixed order; those of single keys in
`gradients.py`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritoncp.kernels.backward import load_lse, score_gradients
from tritoncp.kernels.forward import Results, start_state, store_results
from tritoncp.kernels.opaque_integers import integer
from tritoncp.kernels.scores import (
    LOG2E,
    Queries,
    add_dot,
    dot_nt,
    interval_mask,
    keep_pairs,
    modify_scores,
    online_softmax,
    probabilities,
    scale_pieces,
    to_log2,
    window_mask,
    zeros_pieces,
)
from tritoncp.kernels.tiles import (
    HeadRows,
    Stream,
    accumulator_dtype,
    load_pieces,
    load_stat,
    store_pieces,
    stream_pieces,
)

HIDDEN_KIND: tl.constexpr = tl.constexpr(3)  # `ABSENT` of tritoncp/masks/runs/block_runs.py
MASKED_KIND: tl.constexpr = tl.constexpr(0)


class SelectedLists(NamedTuple):
    """The selected keys of each row of a selection, which adjacent queries share.

    keys:  int32 [B, Hs, rows, width]: rows of the buffer, visible ones first; or numbers of blocks of keys,
           those that the mask shows in part before those that it shows whole
    count: int32 [B, Hs, rows], number of visible keys; or of blocks shown in part, and of all,
           [B, Hs, rows, 2]
    shown: uint8 [B, Hs, rows, queries, width], whether a query sees a key, or None: all do
    """

    keys: Any
    count: Any
    shown: Any
    stride_b: Any  # in rows of the selection
    stride_h: Any
    width: Any


class TransposedLists(NamedTuple):
    """The rows of a selection that selected a block of keys.

    ptr:  int32 [B, Hs, 2 * blocks + 1], first entry of the rows that see a block in part, and of those that
          see it whole
    rows: int32 [B, Hs, entries], ascending in each range
    """

    ptr: Any
    rows: Any
    stride_b: Any  # in heads
    blocks: Any
    entries: Any


class Places(NamedTuple):
    """Global positions, int32, of the queries [1 or B, S] and of the buffer's rows [1 or B, rows], -1 for
    padding.

    Where the keys of selected blocks lie, if row r is not position r:

    tiles: int32 [1 or B, tiles], first row of each tile of positions, which is whole, -1 if it is absent; or
    rows:  int32 [1 or B, positions], row of each position, -1 if it is absent
    """

    queries: Any
    query_stride: Any
    keys: Any
    key_stride: Any
    num_queries: Any
    num_keys: Any
    tiles: Any
    rows: Any
    rows_stride: Any  # or of tiles


class PairRule(NamedTuple):
    """Which pairs a mask shows in a selected block of keys, if not all: by a window, else by the kind of each
    block of the mask; in masked ones by the interval of the query, else by the mask_mod.

    kinds:    uint8 [Bm, Hm, rows, columns], or None with a window
    aligned:  None if a tile of keys may lie in several blocks of the mask
    interval: Interval, or None
    window:   (left, right), or None
    """

    kinds: Any
    stride_b: Any
    stride_h: Any
    columns: Any
    q_block: Any
    kv_block: Any
    aligned: Any
    interval: Any
    window: Any
    mask_mod: Any


class KeyTile(NamedTuple):
    """A tile of selected keys.

    rows:    where its rows lie
    present: which rows exist [N]
    pos:     positions as mods see them [N]
    first:   position of the first row, of a block of keys
    """

    rows: Any
    present: Any
    pos: Any
    first: Any


class QueryTiling(NamedTuple):
    """How a row of a selection is cut into tiles: constants of the kernel.

    A tile holds ``piece`` of the ``queries`` adjacent queries of the row, in ``parts`` tiles, for each of
    ``heads`` query heads.
    """

    heads: Any
    queries: Any
    piece: Any
    parts: Any


@triton.jit
def query_tile(i_b, i_h0, i_row, i_part, m_m, o_m, places, TILING: tl.constexpr):
    """Where the queries of part ``i_part`` of row ``i_row`` of the selection lie, of the heads from ``i_h0``
    on; those outside of ``m_m`` are absent."""
    o_p = i_part * TILING.piece + o_m % TILING.piece
    o_s = i_row * TILING.queries + o_p
    m_m = m_m & (o_p < TILING.queries) & (o_s < integer(places.num_queries))
    i_h = i_h0 + (o_m // TILING.piece) % TILING.heads
    offsets = tl.where(m_m, o_s, integer(places.num_queries))
    return HeadRows(
        i_b, i_h, i_h[:, None], tl.full([], 0, tl.int32), offsets, integer(places.num_queries)
    ), m_m


@triton.jit
def load_positions(ptr, stride, i_b, offsets, mask):
    """Global positions of rows."""
    return tl.load(ptr + i_b.to(tl.int64) * integer(stride) + offsets, mask=mask, other=0)


@triton.jit
def list_row(lists, i_b, i_hs, i_row):
    """The index of a row of the selection in the lists."""
    return i_b.to(tl.int64) * integer(lists.stride_b) + i_hs.to(tl.int64) * integer(lists.stride_h) + i_row


@triton.jit
def list_range(lists, o_row, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """The range of a row's keys: of those that the mask may hide, or FULL of the others."""
    if BLOCK == 1:
        return 0, tl.load(lists.count + o_row)
    elif FULL:
        p_count = lists.count + o_row * 2
        return tl.load(p_count) * BLOCK, tl.load(p_count + 1) * BLOCK
    else:
        return 0, tl.load(lists.count + o_row * 2) * BLOCK


@triton.jit
def position_tile(places, i_b, i_hkv, pos, TILE: tl.constexpr):
    """The tile of keys at the positions from ``pos`` on, a multiple of TILE."""
    o_n = tl.arange(0, TILE)
    if places.rows is not None:
        b_row = tl.load(places.rows + i_b.to(tl.int64) * integer(places.rows_stride) + pos + o_n)
        offsets = tl.where(b_row >= 0, b_row, integer(places.num_keys))
        rows = HeadRows(i_b, i_hkv, i_hkv, tl.full([], 0, tl.int32), offsets, integer(places.num_keys))
        return KeyTile(rows, b_row >= 0, pos + o_n, pos)
    else:
        row = pos
        n = integer(places.num_keys) - pos
        if places.tiles is not None:
            row = tl.load(places.tiles + i_b.to(tl.int64) * integer(places.rows_stride) + pos // TILE)
            n = tl.where(row >= 0, TILE, 0)
        return KeyTile(HeadRows(i_b, i_hkv, i_hkv, row, o_n, n), o_n < n, pos + o_n, pos)


@triton.jit
def listed_keys(lists, o_row, i_n, end, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """Entries of a row's list for keys i_n : i_n + BLOCK_N: rows of the buffer, or the block of keys.  A loop
    loads them one tile ahead, since the addresses of keys depend on them."""
    if BLOCK == 1:
        o_n = i_n + tl.arange(0, BLOCK_N)
        return tl.load(lists.keys + o_row * lists.width + o_n, mask=o_n < end, other=0)
    else:
        return tl.load(lists.keys + o_row * lists.width + i_n // BLOCK, mask=i_n < end, other=0)


@triton.jit
def selected_tile(
    listed, places, score_mod, i_b, i_hkv, i_n, end, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr
):
    """Keys i_n : i_n + BLOCK_N of a row of the selection. listed: of :func:`listed_keys`"""
    if BLOCK == 1:
        m_n = i_n + tl.arange(0, BLOCK_N) < end
        offsets = tl.where(m_n, listed, integer(places.num_keys))
        o_kv = offsets
        if score_mod.fn is not None:
            o_kv = load_positions(places.keys, places.key_stride, i_b, offsets, m_n)
        rows = HeadRows(i_b, i_hkv, i_hkv, tl.full([], 0, tl.int32), offsets, integer(places.num_keys))
        return KeyTile(rows, m_n, o_kv, i_n)
    else:
        return position_tile(places, i_b, i_hkv, listed * BLOCK + i_n % BLOCK, BLOCK_N)


@triton.jit
def selected_queries(
    i_b, i_h0, i_row, i_part, o_m, places, score_mod, origin, TILING: tl.constexpr, BLOCK: tl.constexpr
):
    """The queries of a part of a row of the selection: (where they lie, as mods see them)."""
    m_m = o_m < TILING.heads * TILING.piece
    rows, m_m = query_tile(i_b, i_h0, i_row, i_part, m_m, o_m, places, TILING)
    o_q = rows.offsets
    if score_mod.fn is not None or BLOCK > 1:
        o_q = load_positions(places.queries, places.query_stride, i_b, rows.offsets, m_m)
        m_m = m_m & (o_q >= 0)
    return rows, Queries(
        i_b + integer(origin.batch), rows.head_column + integer(origin.head), o_q[:, None], m_m
    )


@triton.jit
def key_queries(
    i_b, i_h0, i_row, i_part, m_m, o_m, places, origin, HAS_PADDING: tl.constexpr, TILING: tl.constexpr
):
    """The queries of parts of rows of the selection for a tile of keys, of which they are columns: (where
    they lie, as mods see them). Padding is absent, since a product with 0 would keep a NaN that it holds."""
    rows, m_m = query_tile(i_b, i_h0, i_row, i_part, m_m, o_m, places, TILING)
    o_q = rows.offsets
    if HAS_PADDING:
        o_q = load_positions(places.queries, places.query_stride, i_b, o_q, m_m)
        m_m = m_m & (o_q >= 0)
        offsets = tl.where(m_m, rows.offsets, rows.count)
        rows = HeadRows(i_b, rows.head, rows.head_column, rows.first, offsets, rows.count)
    return rows, Queries(
        i_b + integer(origin.batch), (rows.head + integer(origin.head))[None, :], o_q[None, :], m_m
    )


@triton.jit
def query_intervals(rule, rows, queries, BLOCK: tl.constexpr):
    """Positions (begin, end) that queries see inside masked blocks, shaped as ``queries.pos``."""
    if BLOCK == 1:  # without a rule
        return queries.pos, queries.pos  # not read
    elif rule.interval is not None:
        o_row = rows.batch.to(tl.int64) * integer(rule.interval.stride_b) + rows.offsets
        o_row += (queries.head * integer(rule.interval.stride_h)).to(tl.int64).reshape(rows.offsets.shape)
        b_begin = tl.load(rule.interval.begin + o_row, mask=queries.present, other=0)
        b_end = tl.load(rule.interval.end + o_row, mask=queries.present, other=0)
        return b_begin.reshape(queries.pos.shape), b_end.reshape(queries.pos.shape)
    else:
        return queries.pos, queries.pos  # not read


@triton.jit
def shown_pairs(rule, rows, queries, b_bounds, first, o_kv):
    """Mask of the pairs that the mask shows in a tile of keys from position ``first`` on."""
    m_q = queries.present.reshape(queries.pos.shape)
    if rule.kinds is None:  # Triton 3.6 compares no tuple with a None in it
        return m_q & window_mask(o_kv, queries.pos, integer(rule.window[0]), integer(rule.window[1]), None)
    else:
        o_column = first if rule.aligned is not None else o_kv
        o_b = rows.batch.to(tl.int64) * integer(rule.stride_b) + o_column // rule.kv_block
        o_kind = (
            o_b
            + queries.head.to(tl.int64) * integer(rule.stride_h)
            + queries.pos // rule.q_block * integer(rule.columns)
        )
        b_kind = tl.load(rule.kinds + o_kind, mask=m_q, other=HIDDEN_KIND)
        if rule.interval is not None:
            m_in = interval_mask(o_kv, b_bounds[0], b_bounds[1], m_q, None, b_kind, False)
        elif rule.mask_mod.fn is not None:
            m_in = keep_pairs(rule.mask_mod, queries, o_kv)
        else:
            m_in = o_kv >= 0
        return ((b_kind == MASKED_KIND) & m_in) | ((b_kind != MASKED_KIND) & (b_kind != HIDDEN_KIND))


@triton.jit
def visible_keys(
    lists, rule, rows, queries, b_bounds, keys, o_row, o_p, i_n,
    TILING: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Mask [M, N] of the visible pairs of a tile of keys. o_p: place of each query in its row of the
    selection"""
    m_in = keys.present[None, :]
    if BLOCK > 1 and not FULL:
        m_in = m_in & shown_pairs(rule, rows, queries, b_bounds, keys.first, keys.pos[None, :])
    elif lists.shown is not None:
        o_q = o_row * TILING.queries + o_p
        p_shown = lists.shown + o_q[:, None] * lists.width + (i_n + tl.arange(0, BLOCK_N))[None, :]
        m_in = tl.load(p_shown, mask=m_in & queries.present[:, None], other=0) != 0
    return m_in


@triton.jit
def selected_forward_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    k_desc0,  # tensor descriptors of k and v, tiles of [BLOCK_N, piece of channels], or None
    k_desc1,
    v_desc0,
    v_desc1,
    out,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    max_scores,  # Stat
    state,  # State
    lists,  # SelectedLists
    places,  # Places
    rule,  # PairRule, of blocks
    score_mod,  # Closure
    origin,  # Origin
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    SHARE: tl.constexpr,  # query heads that share a head of the selection
    FIRST: tl.constexpr,  # index of the first query head in the layer
    TILING: tl.constexpr,  # QueryTiling
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,  # keys of a selected block, a multiple of BLOCK_N, or 1
    EVEN: tl.constexpr,  # whether all rows of a tile of a block are present
    QK: tl.constexpr,  # Channels of q and k
    VO: tl.constexpr,  # Channels of v and out
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend the queries of a row of the selection to its keys."""
    FOLD: tl.constexpr = (score_mod.fn is None) and (SCALE > 0)
    C: tl.constexpr = SCALE * LOG2E if FOLD else LOG2E
    keys = Stream(k, k_desc0, k_desc1)
    values = Stream(v, v_desc0, v_desc1)
    i_row = tl.program_id(0) // TILING.parts
    i_part = tl.program_id(0) % TILING.parts
    i_h0 = tl.program_id(1) * TILING.heads
    i_b = tl.program_id(2)
    i_hs = (i_h0 + FIRST) // SHARE
    i_hkv = i_h0 // GROUP
    o_m = tl.arange(0, BLOCK_M)
    rows, queries = selected_queries(i_b, i_h0, i_row, i_part, o_m, places, score_mod, origin, TILING, BLOCK)
    b_bounds = query_intervals(rule, rows, queries, BLOCK)
    b_q = load_pieces(q, rows, QK)  # [M, D]
    b_m, b_l, b_acc = start_state(state, rows, VO, accumulator_dtype(q.ptr.dtype.element_ty), LOAD_STATE)
    o_row = list_row(lists, i_b, i_hs, i_row)
    o_p = i_part * TILING.piece + o_m % TILING.piece
    for FULL in tl.static_range(0, 1 if BLOCK == 1 else 2):  # blocks that the mask shows in part, then whole
        begin, end = list_range(lists, o_row, FULL, BLOCK)
        listed = listed_keys(lists, o_row, begin, end, BLOCK_N, BLOCK)
        for i_n in tl.range(begin, end, BLOCK_N):
            kv = selected_tile(listed, places, score_mod, i_b, i_hkv, i_n, end, BLOCK_N, BLOCK)
            listed = listed_keys(lists, o_row, i_n + BLOCK_N, end, BLOCK_N, BLOCK)
            b_k = stream_pieces(keys, kv.rows, QK, not EVEN)  # [N, D]
            b_s = dot_nt(b_q, b_k, PRECISION)  # S = Q K^T [M, N]
            if score_mod.fn is not None:
                b_s = modify_scores(b_s, queries, kv.pos[None, :], score_mod, SCALE)
            elif not FOLD:
                b_s = b_s * SCALE
            if not (FULL and EVEN):
                m_in = visible_keys(
                    lists, rule, rows, queries, b_bounds, kv, o_row, o_p, i_n, TILING, BLOCK_N, BLOCK, FULL
                )
                b_s = tl.where(m_in, b_s, -float("inf"))
            b_p, b_r, b_m, b_l = online_softmax(b_s, b_m, b_l, C, True)
            b_v = stream_pieces(values, kv.rows, VO, not EVEN)  # [N, E]
            b_acc = add_dot(scale_pieces(b_acc, b_r[:, None]), b_p, b_v, PRECISION)
    store_results(Results(out, lse, max_scores, state), rows, b_m, b_l, b_acc, VO, STORE_STATE)


@triton.jit
def selected_dq_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    k_desc0,
    k_desc1,
    v_desc0,
    v_desc1,
    dout,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dq,  # Strided [B, Hq, S, D]
    lists,  # from here on as in selected_forward_kernel
    places,
    rule,
    score_mod,
    score_grad,  # Closure of the gradient of score_mod, with the gradients of its captures
    origin,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    FIRST: tl.constexpr,
    TILING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    QK: tl.constexpr,
    VO: tl.constexpr,
    ADD: tl.constexpr,  # dq += instead of dq =
    PRECISION: tl.constexpr,
):
    """dQ of the queries of a row of the selection, and the gradients of the captures of score_mod."""
    keys = Stream(k, k_desc0, k_desc1)
    values = Stream(v, v_desc0, v_desc1)
    i_row = tl.program_id(0) // TILING.parts
    i_part = tl.program_id(0) % TILING.parts
    i_h0 = tl.program_id(1) * TILING.heads
    i_b = tl.program_id(2)
    i_hs = (i_h0 + FIRST) // SHARE
    i_hkv = i_h0 // GROUP
    o_m = tl.arange(0, BLOCK_M)
    rows, queries = selected_queries(i_b, i_h0, i_row, i_part, o_m, places, score_mod, origin, TILING, BLOCK)
    b_bounds = query_intervals(rule, rows, queries, BLOCK)
    m_m = queries.present
    b_q = load_pieces(q, rows, QK)  # [M, D]
    b_do = load_pieces(dout, rows, VO)  # [M, E]
    b_lse = load_lse(lse, rows, m_m, score_mod)[:, None]
    b_delta = load_stat(delta, rows, m_m)[:, None]
    b_dq = zeros_pieces(BLOCK_M, QK, accumulator_dtype(q.ptr.dtype.element_ty))  # [M, D]
    o_row = list_row(lists, i_b, i_hs, i_row)
    o_p = i_part * TILING.piece + o_m % TILING.piece
    for FULL in tl.static_range(0, 1 if BLOCK == 1 else 2):
        begin, end = list_range(lists, o_row, FULL, BLOCK)
        listed = listed_keys(lists, o_row, begin, end, BLOCK_N, BLOCK)
        for i_n in tl.range(begin, end, BLOCK_N):
            kv = selected_tile(listed, places, score_mod, i_b, i_hkv, i_n, end, BLOCK_N, BLOCK)
            listed = listed_keys(lists, o_row, i_n + BLOCK_N, end, BLOCK_N, BLOCK)
            b_k = stream_pieces(keys, kv.rows, QK, not EVEN)  # [N, D]
            o_kv = kv.pos[None, :]
            b_pre, b_s = to_log2(dot_nt(b_q, b_k, PRECISION), queries, o_kv, score_mod, SCALE)  # [M, N]
            m_in = visible_keys(
                lists, rule, rows, queries, b_bounds, kv, o_row, o_p, i_n, TILING, BLOCK_N, BLOCK, FULL
            )
            b_p = tl.where(m_in, probabilities(b_s, b_lse), 0.0)  # P = exp(S' - lse) [M, N]
            b_v = stream_pieces(values, kv.rows, VO, not EVEN)  # [N, E]
            b_ds = tl.where(m_in, b_p * (dot_nt(b_do, b_v, PRECISION) - b_delta), 0.0)  # dS' [M, N]
            m_q = m_m[:, None]
            b_ds = score_gradients(b_ds, b_pre, queries, o_kv, m_in, m_q, score_mod, score_grad)
            b_dq = add_dot(b_dq, b_ds, b_k, PRECISION)  # dQ += dS K [M, D]
    store_pieces(dq, rows, scale_pieces(b_dq, SCALE), QK, ADD)


@triton.jit
def listed_queries(
    lists, places, origin, i_b, i_h0, o_list, i_e, end, o_m, TILING: tl.constexpr, ENTRIES: tl.constexpr
):
    """The queries of parts i_e : i_e + ENTRIES of the rows of a transposed list: (where they lie, as mods see
    them)."""
    o_e = o_m // (TILING.heads * TILING.piece)
    m_e = (o_e < ENTRIES) & (i_e + o_e < end)
    o_entry = o_list * integer(lists.entries) + (i_e + o_e) // TILING.parts
    i_part = (i_e + o_e) % TILING.parts
    i_row = tl.load(lists.rows + o_entry, mask=m_e, other=0)
    return key_queries(i_b, i_h0, i_row, i_part, m_e, o_m, places, origin, True, TILING)


@triton.jit
def add_key_gradients(
    b_dk, b_dv, b_k, b_v, b_q, b_do, lse, delta, rows, queries, o_kv, m_in, m_n,
    score_mod, score_grad, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the part of a tile of queries to dK / SCALE and dV of a tile of keys. m_in: visible pairs
    [N, M]"""
    m_m = queries.present
    b_lse = load_lse(lse, rows, m_m, score_mod)[None, :]
    b_pre, b_s = to_log2(dot_nt(b_k, b_q, PRECISION), queries, o_kv, score_mod, SCALE)  # [N, M]
    b_p = tl.where(m_in, probabilities(b_s, b_lse), 0.0)  # P^T = exp(S'^T - lse) [N, M]
    b_dv = add_dot(b_dv, b_p, b_do, PRECISION)  # dV += P^T dO [N, E]
    b_delta = load_stat(delta, rows, m_m)[None, :]
    b_ds = tl.where(m_in, b_p * (dot_nt(b_v, b_do, PRECISION) - b_delta), 0.0)  # dS'^T [N, M]
    b_ds = score_gradients(b_ds, b_pre, queries, o_kv, m_in, m_n, score_mod, score_grad)
    return add_dot(b_dk, b_ds, b_q, PRECISION), b_dv  # dK += dS^T Q [N, D]


@triton.jit
def selected_dkdv_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    dout,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dk,  # Strided [B, Hkv, rows, D]
    dv,  # Strided [B, Hkv, rows, E]
    lists,  # TransposedLists
    places,
    rule,
    score_mod,
    score_grad,
    origin,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    FIRST: tl.constexpr,
    TILING: tl.constexpr,  # QueryTiling, of heads that share a head of the selection and a KV head
    ENTRIES: tl.constexpr,  # parts of rows of the selection in a tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # keys of a tile of a block
    BLOCK: tl.constexpr,  # keys of a selected block
    QK: tl.constexpr,
    VO: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV of a tile of keys of a KV head, where blocks of keys are selected."""
    ACC: tl.constexpr = accumulator_dtype(q.ptr.dtype.element_ty)
    i_tile = tl.program_id(0)
    i_hkv = tl.program_id(1)
    i_b = tl.program_id(2)
    o_m = tl.arange(0, BLOCK_M)
    kv = position_tile(places, i_b, i_hkv, i_tile * BLOCK_N, BLOCK_N)
    o_kv = kv.pos[:, None]
    m_n = kv.present[:, None]
    b_k = load_pieces(k, kv.rows, QK)  # [N, D]
    b_v = load_pieces(v, kv.rows, VO)  # [N, E]
    b_dk = zeros_pieces(BLOCK_N, QK, ACC)  # [N, D]
    b_dv = zeros_pieces(BLOCK_N, VO, ACC)  # [N, E]
    for i_g in range(0, GROUP // TILING.heads):
        i_h0 = i_hkv * GROUP + i_g * TILING.heads
        o_list = i_b.to(tl.int64) * integer(lists.stride_b) + (i_h0 + FIRST) // SHARE
        p_ptr = lists.ptr + o_list * (integer(lists.blocks) * 2 + 1) + i_tile * BLOCK_N // BLOCK * 2
        for FULL in tl.static_range(0, 2):  # rows that see the block in part, then whole
            end = tl.load(p_ptr + FULL + 1) * TILING.parts
            for i_e in tl.range(tl.load(p_ptr + FULL) * TILING.parts, end, ENTRIES):
                rows, queries = listed_queries(
                    lists, places, origin, i_b, i_h0, o_list, i_e, end, o_m, TILING, ENTRIES
                )
                m_m = queries.present
                m_in = m_n & m_m[None, :]  # [N, M]
                if not FULL:
                    b_bounds = query_intervals(rule, rows, queries, BLOCK)
                    m_in = m_in & shown_pairs(rule, rows, queries, b_bounds, kv.first, o_kv)
                b_q = load_pieces(q, rows, QK)  # [M, D]
                b_do = load_pieces(dout, rows, VO)  # [M, E]
                b_dk, b_dv = add_key_gradients(
                    b_dk, b_dv, b_k, b_v, b_q, b_do, lse, delta, rows, queries, o_kv, m_in, m_n,
                    score_mod, score_grad, SCALE, PRECISION,
                )  # fmt: skip
    store_pieces(dk, kv.rows, scale_pieces(b_dk, SCALE), QK, ADD)
    store_pieces(dv, kv.rows, b_dv, VO, ADD)
