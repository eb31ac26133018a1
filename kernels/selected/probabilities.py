"""Probabilities of the keys that are selected at run time, summed over the query heads that share them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritoncp.kernels.backward import load_lse
from tritoncp.kernels.opaque_integers import integer
from tritoncp.kernels.scores import dot_nt, probabilities, to_log2
from tritoncp.kernels.selected.attention import load_positions, selected_queries
from tritoncp.kernels.tiles import HeadRows, accumulator_dtype, load_pieces


class SelectedEntries(NamedTuple):
    """The selected keys of each query, in the order of the selection.

    keys: int32 [B, Hs, S, width], rows of the buffer, -1 for a key that the query does not see or that is not
          in the buffer
    """

    keys: Any
    shares: Any
    num_rows: Any
    width: Any


@triton.jit
def selected_probabilities_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    lse,  # Stat [B, Hq, S], natural log
    sums,  # like entries.keys, written where a key is visible
    entries,  # SelectedEntries
    places,  # Places
    score_mod,  # Closure
    origin,  # Origin
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    SHARE: tl.constexpr,  # query heads that share a head of the selection
    TILING: tl.constexpr,  # QueryTiling, of heads that share a KV head
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK: tl.constexpr,  # Channels of q and k
    PRECISION: tl.constexpr,
):
    """Sum the probabilities of the selected keys of a query over its heads, always in the same order."""
    i_s = tl.program_id(0)
    i_hs = tl.program_id(1)
    i_b = tl.program_id(2)
    o_m = tl.arange(0, BLOCK_M)
    o_list = (
        (i_b.to(tl.int64) * integer(entries.shares) + i_hs) * integer(entries.num_rows) + i_s
    ) * entries.width
    for i_n in tl.range(0, entries.width, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_row = tl.load(entries.keys + o_list + o_n, mask=o_n < entries.width, other=-1)
        m_n = b_row >= 0
        if tl.max(b_row, 0) >= 0:
            offsets = tl.where(m_n, b_row, integer(places.num_keys))
            o_kv = offsets[None, :]
            if score_mod.fn is not None:
                o_kv = load_positions(places.keys, places.key_stride, i_b, offsets, m_n)[None, :]
            b_sum = tl.zeros([BLOCK_N], accumulator_dtype(q.ptr.dtype.element_ty))
            for i_g in range(0, SHARE // TILING.heads):
                i_h0 = i_hs * SHARE + i_g * TILING.heads
                i_hkv = i_h0 // GROUP
                rows, queries = selected_queries(i_b, i_h0, i_s, 0, o_m, places, score_mod, origin, TILING, 1)
                kv_rows = HeadRows(
                    i_b, i_hkv, i_hkv, tl.full([], 0, tl.int32), offsets, integer(places.num_keys)
                )
                b_q = load_pieces(q, rows, QK)  # [M, D]
                b_k = load_pieces(k, kv_rows, QK)  # [N, D]
                b_lse = load_lse(lse, rows, queries.present, score_mod)[:, None]
                _, b_s = to_log2(dot_nt(b_q, b_k, PRECISION), queries, o_kv, score_mod, SCALE)  # [M, N]
                m_in = queries.present[:, None] & m_n[None, :]
                b_sum += tl.sum(tl.where(m_in, probabilities(b_s, b_lse), 0.0), 0)
            tl.store(sums + o_list + o_n, b_sum, mask=m_n)
