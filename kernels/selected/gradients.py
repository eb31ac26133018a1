"""dK and dV of keys that are selected one by one: partial sums by query, then a sum for each key.

A key belongs to few queries, and its neighbours belong to others: most pairs of a tile of adjacent keys
would be computed for nothing, 15 of 16 for scattered keys. The keys of one query fill whole tiles. So a
kernel takes a row of the selection, as dQ does, and writes a row of dK and dV for each of its keys; another
kernel adds the rows of each key. The work of both is proportional to the selected pairs, wherever keys lie.
Partial sums lie in the order of keys, then of queries: sums have a fixed order, and need no atomics. Rows
of the selection are cut into chunks, so that the partial sums take as much memory as a few copies of the
keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritoncp.kernels.opaque_integers import integer
from tritoncp.kernels.scores import scale_pieces, zeros_pieces
from tritoncp.kernels.selected.attention import (
    add_key_gradients,
    key_queries,
    list_row,
    listed_keys,
    selected_tile,
)
from tritoncp.kernels.tiles import HeadRows, accumulator_dtype, load_pieces, store_pieces


class KeyOrder(NamedTuple):
    """The entries of the lists of each chunk of rows of a selection, in the order of their keys.

    slots: int32 [B, Hs, chunks, entries], place of an entry among those of its chunk
    ptr:   int32 [B, Hs, chunks, keys + 1], first place of each row of the buffer
    """

    slots: Any
    ptr: Any
    stride_b: Any  # in heads
    chunks: Any
    rows: Any  # of a chunk
    entries: Any
    keys: Any


@triton.jit
def order_row(order, i_b, i_hs, first):
    """The index of the chunk that begins with row ``first`` of the selection, in the tables of an order."""
    o_list = i_b.to(tl.int64) * integer(order.stride_b) + i_hs
    return o_list * integer(order.chunks) + first // integer(order.rows)


@triton.jit
def entry_rows(lists, order, i_b, i_part, o_chunk, i_entry, o_n, m_n):
    """Where the partial sums of entries lie. i_entry: the first of them, counted in the chunk"""
    b_slot = tl.load(order.slots + o_chunk * integer(order.entries) + i_entry + o_n, mask=m_n, other=0)
    # Times channels, offsets may exceed 31 bits.
    offsets = tl.where(m_n, b_slot, integer(order.entries)).to(tl.int64)
    return HeadRows(i_b, i_part, i_part, tl.full([], 0, tl.int32), offsets, integer(order.entries))


@triton.jit(do_not_specialize=["first"])
def partial_dkdv_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    dout,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dk_parts,  # Strided [B, Hq // OWN, entries, D], of a chunk
    dv_parts,  # Strided [B, Hq // OWN, entries, E]
    lists,  # SelectedLists
    order,  # KeyOrder
    places,
    score_mod,
    score_grad,
    origin,
    first,  # row of the selection at which the chunk begins
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    SHARE: tl.constexpr,  # query heads that share a head of the selection
    OWN: tl.constexpr,  # query heads that share both
    TILING: tl.constexpr,  # QueryTiling
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK: tl.constexpr,
    VO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The parts of dK and dV that come from the queries of one row of the selection, for BLOCK_N of its
    keys."""
    ACC: tl.constexpr = accumulator_dtype(q.ptr.dtype.element_ty)
    tiles = tl.cdiv(lists.width, BLOCK_N)
    i_row = first + tl.program_id(0) // tiles
    i_n = tl.program_id(0) % tiles * BLOCK_N
    i_part = tl.program_id(1)
    i_b = tl.program_id(2)
    i_h0 = i_part * OWN
    i_hs = i_h0 // SHARE
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_row = list_row(lists, i_b, i_hs, i_row)
    end = tl.load(lists.count + o_row)
    if i_n < end:
        listed = listed_keys(lists, o_row, i_n, end, BLOCK_N, 1)
        kv = selected_tile(listed, places, score_mod, i_b, i_h0 // GROUP, i_n, end, BLOCK_N, 1)
        o_kv = kv.pos[:, None]
        m_n = kv.present[:, None]
        b_k = load_pieces(k, kv.rows, QK)  # [N, D]
        b_v = load_pieces(v, kv.rows, VO)  # [N, E]
        b_dk = zeros_pieces(BLOCK_N, QK, ACC)  # [N, D]
        b_dv = zeros_pieces(BLOCK_N, VO, ACC)  # [N, E]
        HAS_PADDING: tl.constexpr = (score_mod.fn is not None) or (lists.shown is not None)
        for i_t in range(0, OWN // TILING.heads * TILING.parts):
            i_h = i_h0 + i_t // TILING.parts * TILING.heads
            i_p = i_t % TILING.parts
            m_m = o_m < TILING.heads * TILING.piece
            rows, queries = key_queries(i_b, i_h, i_row, i_p, m_m, o_m, places, origin, HAS_PADDING, TILING)
            m_in = m_n & queries.present[None, :]  # [N, M]
            if lists.shown is not None:
                o_q = o_row * TILING.queries + i_p * TILING.piece + o_m % TILING.piece
                p_shown = lists.shown + o_q[None, :] * lists.width + (i_n + o_n)[:, None]
                m_in = tl.load(p_shown, mask=m_in, other=0) != 0
            b_q = load_pieces(q, rows, QK)  # [M, D]
            b_do = load_pieces(dout, rows, VO)  # [M, E]
            b_dk, b_dv = add_key_gradients(
                b_dk, b_dv, b_k, b_v, b_q, b_do, lse, delta, rows, queries, o_kv, m_in, m_n,
                score_mod, score_grad, SCALE, PRECISION,
            )  # fmt: skip
        o_chunk = order_row(order, i_b, i_hs, first)
        i_entry = (i_row - first) * lists.width + i_n
        parts = entry_rows(lists, order, i_b, i_part, o_chunk, i_entry, o_n, kv.present)
        store_pieces(dk_parts, parts, scale_pieces(b_dk, SCALE), QK)
        store_pieces(dv_parts, parts, b_dv, VO)


@triton.jit
def add_row_sums(b_c, b_x):
    """c + the sum of the rows of x, for each piece of channels."""
    b_y = ()
    for I in tl.static_range(len(b_c)):
        b_y = b_y + (b_c[I] + tl.sum(b_x[I], 0)[None, :],)  # noqa: RUF005
    return b_y


@triton.jit(do_not_specialize=["first"])
def sum_dkdv_kernel(
    dk_parts,  # Strided [B, Hkv * PARTS, entries, D], of a chunk
    dv_parts,  # Strided [B, Hkv * PARTS, entries, E]
    dk_before,  # Strided [B, Hkv, rows, D], sums of earlier chunks, or None
    dv_before,  # Strided [B, Hkv, rows, E]
    dk,  # Strided [B, Hkv, rows, D]
    dv,  # Strided [B, Hkv, rows, E]
    order,  # KeyOrder
    places,
    first,  # row of the selection at which the chunk begins
    PARTS: tl.constexpr,  # partial sums of a KV head
    LISTS: tl.constexpr,  # heads of the partial sums that share a head of the selection
    BLOCK_N: tl.constexpr,  # partial sums that are added at a time
    QK: tl.constexpr,
    VO: tl.constexpr,
    ADD: tl.constexpr,  # dk += instead of dk =, also for dv
):
    """dK and dV of one key: the sum of its parts, by ascending heads and queries."""
    ACC: tl.constexpr = dk_parts.ptr.dtype.element_ty
    i_key = tl.program_id(0)
    i_hkv = tl.program_id(1)
    i_b = tl.program_id(2)
    # A row that holds no key of this batch row may hold one of another, and is neither read nor written.
    if tl.load(places.keys + i_b.to(tl.int64) * integer(places.key_stride) + i_key) >= 0:
        key = HeadRows(i_b, i_hkv, i_hkv, i_key, tl.arange(0, 1), 1)
        b_dk = zeros_pieces(1, QK, ACC)
        b_dv = zeros_pieces(1, VO, ACC)
        if dk_before.ptr is not None:
            b_dk = load_pieces(dk_before, key, QK)
            b_dv = load_pieces(dv_before, key, VO)
        for i_p in range(0, PARTS):
            i_part = i_hkv * PARTS + i_p
            p_ptr = (
                order.ptr + order_row(order, i_b, i_part // LISTS, first) * (integer(order.keys) + 1) + i_key
            )
            end = tl.load(p_ptr + 1)
            for i_e in tl.range(tl.load(p_ptr), end, BLOCK_N):
                parts = HeadRows(i_b, i_part, i_part, i_e, tl.arange(0, BLOCK_N), end - i_e)
                b_dk = add_row_sums(b_dk, load_pieces(dk_parts, parts, QK))
                b_dv = add_row_sums(b_dv, load_pieces(dv_parts, parts, VO))
        store_pieces(dk, key, b_dk, QK, ADD)
        store_pieces(dv, key, b_dv, VO, ADD)
