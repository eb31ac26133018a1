"""Attention to keys that are selected at run time: forward, dQ and dK/dV of one step.

The query heads that share their keys lie in one tile, and the keys are gathered by their rows in the buffer.
dK and dV are computed from transposed lists, of the queries that selected any key of a tile, in fixed order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritoncp.kernels.backward import load_lse, score_gradients
from tritoncp.kernels.forward import Results, start_state, store_results
from tritoncp.kernels.scores import (
    LOG2E,
    Queries,
    add_dot,
    dot_nt,
    modify_scores,
    online_softmax,
    probabilities,
    scale_pieces,
    to_log2,
    zeros_pieces,
)
from tritoncp.kernels.tiles import HeadRows, accumulator_dtype, load_pieces, load_stat, store_pieces

KEYS_OF_TILE: tl.constexpr = tl.constexpr(32)  # of dK/dV, a bit of an int32 for each


class SelectedLists(NamedTuple):
    """The selected keys of each row of a selection, which ``queries`` adjacent queries share.

    keys:   int32 [B, Hs, rows, width], rows of the buffer, visible ones first
    count:  int32 [B, Hs, rows], number of visible ones
    shown:  uint8 [B, Hs, rows, queries, width], whether a query sees a key, or None: all do
    """

    keys: Any
    count: Any
    shown: Any
    stride_b: Any  # in rows of the selection
    stride_h: Any
    width: Any


class TransposedLists(NamedTuple):
    """The rows of a selection that see any of the KEYS_OF_TILE keys of a tile of the buffer.

    ptr:  int32 [B, Hs, tiles + 1], first entry of each tile
    rows: int32 [B, Hs, entries], ascending in each tile
    bits: int32 [B, Hs, entries, queries], a bit for each key of the tile that the query sees
    """

    ptr: Any
    rows: Any
    bits: Any
    stride_b: Any  # in heads
    tiles: Any
    entries: Any


class Places(NamedTuple):
    """Global positions, int32, of the queries [1 or B, S] and of the buffer's rows [1 or B, rows], -1 for
    padding."""

    queries: Any
    query_stride: Any
    keys: Any
    key_stride: Any
    num_queries: Any
    num_keys: Any


@triton.jit
def query_tile(i_b, i_h0, i_row, o_e, o_m, places, HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """Where the queries of a tile lie: QUERIES adjacent ones of HEADS heads from ``i_h0`` on, of each row
    ``i_row`` of the selection; ``o_e`` < 0 marks absent ones."""
    o_h = (o_m // QUERIES) % HEADS
    o_s = i_row * QUERIES + o_m % QUERIES
    m_m = (o_e >= 0) & (o_s < places.num_queries)
    i_h = i_h0 + o_h
    offsets = tl.where(m_m, o_s, places.num_queries)
    return HeadRows(i_b, i_h, i_h[:, None], tl.full([], 0, tl.int32), offsets, places.num_queries), m_m


@triton.jit
def selected_tile(lists, places, i_b, i_hs, i_row, i_hkv, i_n, n_n, BLOCK_N: tl.constexpr):
    """Keys i_n : i_n + BLOCK_N of a row of the selection: (their rows in the buffer, mask)."""
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = o_n < n_n
    o_row = i_b.to(tl.int64) * lists.stride_b + i_hs.to(tl.int64) * lists.stride_h + i_row
    b_key = tl.load(lists.keys + o_row * lists.width + o_n, mask=m_n, other=0)
    offsets = tl.where(m_n, b_key, places.num_keys)
    return HeadRows(i_b, i_hkv, i_hkv, tl.full([], 0, tl.int32), offsets, places.num_keys), m_n


@triton.jit
def load_positions(ptr, stride, i_b, offsets, mask):
    """Global positions of rows."""
    return tl.load(ptr + i_b.to(tl.int64) * stride + offsets, mask=mask, other=0)


@triton.jit
def selected_queries(
    i_b, i_h0, i_row, o_m, places, score_mod, origin, HEADS: tl.constexpr, QUERIES: tl.constexpr
):
    """The queries of a row of the selection: (where they lie, as mods see them)."""
    present = tl.where(o_m < HEADS * QUERIES, 0, -1)
    rows, m_m = query_tile(i_b, i_h0, i_row, present, o_m, places, HEADS, QUERIES)
    o_q = rows.offsets[:, None]
    if score_mod.fn is not None:
        o_q = load_positions(places.queries, places.query_stride, i_b, rows.offsets, m_m)[:, None]
    return rows, Queries(i_b + origin.batch, rows.head_column + origin.head, o_q, m_m)


@triton.jit
def shown_pairs(lists, i_b, i_hs, i_row, o_m, m_n, i_n, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mask [M, N] of the visible pairs of a tile."""
    if lists.shown is None:
        return m_n[None, :]
    else:
        o_row = i_b.to(tl.int64) * lists.stride_b + i_hs.to(tl.int64) * lists.stride_h + i_row
        o_q = o_row * QUERIES + o_m % QUERIES
        o_n = i_n + tl.arange(0, BLOCK_N)
        p_shown = lists.shown + o_q[:, None] * lists.width + o_n[None, :]
        return tl.load(p_shown, mask=m_n[None, :], other=0) != 0


@triton.jit
def selected_forward_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    out,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    max_scores,  # Stat
    state,  # State
    lists,  # SelectedLists
    places,  # Places
    score_mod,  # Closure
    origin,  # Origin
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    SHARE: tl.constexpr,  # query heads that share a head of the selection
    FIRST: tl.constexpr,  # index of the first query head in the layer
    HEADS: tl.constexpr,  # query heads in a tile
    QUERIES: tl.constexpr,  # queries that share a row of the selection
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK: tl.constexpr,  # Channels of q and k
    VO: tl.constexpr,  # Channels of v and out
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend the queries of a row of the selection to its keys."""
    FOLD: tl.constexpr = (score_mod.fn is None) and (SCALE > 0)
    C: tl.constexpr = SCALE * LOG2E if FOLD else LOG2E
    i_row = tl.program_id(0)
    i_h0 = tl.program_id(1) * HEADS
    i_b = tl.program_id(2)
    i_hs = (i_h0 + FIRST) // SHARE
    i_hkv = i_h0 // GROUP
    o_m = tl.arange(0, BLOCK_M)
    rows, queries = selected_queries(i_b, i_h0, i_row, o_m, places, score_mod, origin, HEADS, QUERIES)
    b_q = load_pieces(q, rows, QK)  # [M, D]
    b_m, b_l, b_acc = start_state(state, rows, VO, accumulator_dtype(q.ptr.dtype.element_ty), LOAD_STATE)
    o_row = i_b.to(tl.int64) * lists.stride_b + i_hs.to(tl.int64) * lists.stride_h + i_row
    n_n = tl.load(lists.count + o_row)
    for i_n in tl.range(0, n_n, BLOCK_N):
        kv_rows, m_n = selected_tile(lists, places, i_b, i_hs, i_row, i_hkv, i_n, n_n, BLOCK_N)
        b_k = load_pieces(k, kv_rows, QK)  # [N, D]
        b_s = dot_nt(b_q, b_k, PRECISION)  # S = Q K^T [M, N]
        if score_mod.fn is not None:
            o_kv = load_positions(places.keys, places.key_stride, i_b, kv_rows.offsets, m_n)
            b_s = modify_scores(b_s, queries, o_kv[None, :], score_mod, SCALE)
        elif not FOLD:
            b_s = b_s * SCALE
        m_in = shown_pairs(lists, i_b, i_hs, i_row, o_m, m_n, i_n, QUERIES, BLOCK_N)
        b_s = tl.where(m_in, b_s, -float("inf"))
        b_p, b_r, b_m, b_l = online_softmax(b_s, b_m, b_l, C, True)
        b_v = load_pieces(v, kv_rows, VO)  # [N, E]
        b_acc = add_dot(scale_pieces(b_acc, b_r[:, None]), b_p, b_v, PRECISION)
    store_results(Results(out, lse, max_scores, state), rows, b_m, b_l, b_acc, VO, STORE_STATE)


@triton.jit
def selected_dq_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    dout,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dq,  # Strided [B, Hq, S, D]
    lists,  # from here on as in selected_forward_kernel
    places,
    score_mod,
    score_grad,  # Closure of the gradient of score_mod, with the gradients of its captures
    origin,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK: tl.constexpr,
    VO: tl.constexpr,
    ADD: tl.constexpr,  # dq += instead of dq =
    PRECISION: tl.constexpr,
):
    """dQ of the queries of a row of the selection, and the gradients of the captures of score_mod."""
    i_row = tl.program_id(0)
    i_h0 = tl.program_id(1) * HEADS
    i_b = tl.program_id(2)
    i_hs = (i_h0 + FIRST) // SHARE
    i_hkv = i_h0 // GROUP
    o_m = tl.arange(0, BLOCK_M)
    rows, queries = selected_queries(i_b, i_h0, i_row, o_m, places, score_mod, origin, HEADS, QUERIES)
    m_m = queries.present
    b_q = load_pieces(q, rows, QK)  # [M, D]
    b_do = load_pieces(dout, rows, VO)  # [M, E]
    b_lse = load_lse(lse, rows, m_m, score_mod)[:, None]
    b_delta = load_stat(delta, rows, m_m)[:, None]
    b_dq = zeros_pieces(BLOCK_M, QK, accumulator_dtype(q.ptr.dtype.element_ty))  # [M, D]
    o_row = i_b.to(tl.int64) * lists.stride_b + i_hs.to(tl.int64) * lists.stride_h + i_row
    n_n = tl.load(lists.count + o_row)
    for i_n in tl.range(0, n_n, BLOCK_N):
        kv_rows, m_n = selected_tile(lists, places, i_b, i_hs, i_row, i_hkv, i_n, n_n, BLOCK_N)
        b_k = load_pieces(k, kv_rows, QK)  # [N, D]
        o_kv = kv_rows.offsets[None, :]
        if score_mod.fn is not None:
            o_kv = load_positions(places.keys, places.key_stride, i_b, kv_rows.offsets, m_n)[None, :]
        b_pre, b_s = to_log2(dot_nt(b_q, b_k, PRECISION), queries, o_kv, score_mod, SCALE)  # [M, N]
        m_in = shown_pairs(lists, i_b, i_hs, i_row, o_m, m_n, i_n, QUERIES, BLOCK_N)
        b_p = tl.where(m_in, probabilities(b_s, b_lse), 0.0)  # P = exp(S' - lse) [M, N]
        b_v = load_pieces(v, kv_rows, VO)  # [N, E]
        b_ds = tl.where(m_in, b_p * (dot_nt(b_do, b_v, PRECISION) - b_delta), 0.0)  # dS' [M, N]
        m_q = m_m[:, None]
        b_ds = score_gradients(b_ds, b_pre, queries, o_kv, m_in, m_q, score_mod, score_grad)
        b_dq = add_dot(b_dq, b_ds, b_k, PRECISION)  # dQ += dS K [M, D]
    store_pieces(dq, rows, scale_pieces(b_dq, SCALE), QK, ADD)


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
    score_mod,
    score_grad,
    origin,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of a tile, which share a head of the selection and a KV head
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,  # rows of the selection in a tile
    BLOCK_M: tl.constexpr,
    QK: tl.constexpr,
    VO: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV of KEYS_OF_TILE keys of a KV head."""
    ACC: tl.constexpr = accumulator_dtype(q.ptr.dtype.element_ty)
    BLOCK_N: tl.constexpr = KEYS_OF_TILE
    i_tile = tl.program_id(0)
    i_hkv = tl.program_id(1)
    i_b = tl.program_id(2)
    o_n = tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_key = i_tile * BLOCK_N + o_n
    p_pos = places.keys + i_b.to(tl.int64) * places.key_stride + o_key
    o_kv = tl.load(p_pos, mask=o_key < places.num_keys, other=-1)[:, None]
    m_n = o_kv >= 0
    # Rows that hold no key of this batch row may hold one of another, and are neither read nor written.
    offsets = tl.where(tl.reshape(m_n, [BLOCK_N]), o_n, BLOCK_N)
    kv_rows = HeadRows(i_b, i_hkv, i_hkv, i_tile * BLOCK_N, offsets, BLOCK_N)
    b_k = load_pieces(k, kv_rows, QK)  # [N, D]
    b_v = load_pieces(v, kv_rows, VO)  # [N, E]
    b_dk = zeros_pieces(BLOCK_N, QK, ACC)  # [N, D]
    b_dv = zeros_pieces(BLOCK_N, VO, ACC)  # [N, E]
    for i_g in range(0, GROUP // HEADS):
        i_h0 = i_hkv * GROUP + i_g * HEADS
        o_list = i_b.to(tl.int64) * lists.stride_b + (i_h0 + FIRST) // SHARE
        p_ptr = lists.ptr + o_list * (lists.tiles + 1) + i_tile
        end = tl.load(p_ptr + 1)
        for i_e in tl.range(tl.load(p_ptr), end, ENTRIES):
            o_e = o_m // (HEADS * QUERIES)
            m_e = (o_e < ENTRIES) & (i_e + o_e < end)
            o_entry = o_list * lists.entries + i_e + o_e
            i_row = tl.load(lists.rows + o_entry, mask=m_e, other=0)
            b_bits = tl.load(lists.bits + o_entry * QUERIES + o_m % QUERIES, mask=m_e, other=0)
            # Queries that see no key may be padding, which is not initialised.
            present = tl.where(b_bits != 0, 0, -1)
            rows, m_m = query_tile(i_b, i_h0, i_row, present, o_m, places, HEADS, QUERIES)
            m_in = ((b_bits[None, :] >> o_n[:, None]) & 1) != 0  # [N, M]
            o_q = rows.offsets[None, :]
            if score_mod.fn is not None:
                o_q = load_positions(places.queries, places.query_stride, i_b, rows.offsets, m_m)[None, :]
            head = (rows.head + origin.head)[None, :]
            queries = Queries(i_b + origin.batch, head, o_q, m_m)
            b_q = load_pieces(q, rows, QK)  # [M, D]
            b_do = load_pieces(dout, rows, VO)  # [M, E]
            b_lse = load_lse(lse, rows, m_m, score_mod)[None, :]
            b_pre, b_s = to_log2(dot_nt(b_k, b_q, PRECISION), queries, o_kv, score_mod, SCALE)  # [N, M]
            b_p = tl.where(m_in, probabilities(b_s, b_lse), 0.0)  # P^T = exp(S'^T - lse) [N, M]
            b_dv = add_dot(b_dv, b_p, b_do, PRECISION)  # dV += P^T dO [N, E]
            b_delta = load_stat(delta, rows, m_m)[None, :]
            b_ds = tl.where(m_in, b_p * (dot_nt(b_v, b_do, PRECISION) - b_delta), 0.0)  # dS'^T [N, M]
            b_ds = score_gradients(b_ds, b_pre, queries, o_kv, m_in, m_n, score_mod, score_grad)
            b_dk = add_dot(b_dk, b_ds, b_q, PRECISION)  # dK += dS^T Q [N, D]
    store_pieces(dk, kv_rows, scale_pieces(b_dk, SCALE), QK, ADD)
    store_pieces(dv, kv_rows, b_dv, VO, ADD)
