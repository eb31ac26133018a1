"""Backward: delta, then dQ and dK/dV from separate loops, so that no sum depends on timing.

With P = exp(S' - lse), S' the scores after score_mod, dP = dO V^T and delta = rowsum(O * dO) - dlse:
dS' = P * (dP - delta), dS = dS' * dS'/dS, dQ = scale * dS K, dK = scale * dS^T Q, dV = P^T dO
(FlashAttention-2, arXiv 2307.08691, algorithm 2; the lse cotangent folds into delta).
"""

import triton
import triton.language as tl

from tritoncp.kernels.tiles import (
    LOG2E,
    dot,
    head,
    load_rows,
    locate,
    row_runs,
    run_tiles,
    stat_rows,
    store_rows,
    to_log2,
    visible,
)


@triton.jit
def delta_kernel(
    out,  # Strided [B, Hq, S, E]
    dout,  # Strided [B, Hq, S, E]
    dlse,  # Stat [B, Hq, S] or None
    delta,  # Stat
    n_s,  # S
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,  # E up to the next power of two
    HAS_DLSE: tl.constexpr,
    ACC: tl.constexpr,
):
    """delta = rowsum(out * dout) - dlse."""
    row = tl.program_id(0) * BLOCK_M
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    o_m = tl.arange(0, BLOCK_M)
    b_o = load_rows(out, head(out, i_b, i_h), row, o_m, n_s - row, 0, BLOCK_E, E, True)  # [M, BLOCK_E]
    b_do = load_rows(dout, head(dout, i_b, i_h), row, o_m, n_s - row, 0, BLOCK_E, E, True)
    b_delta = tl.sum(b_o.to(ACC) * b_do.to(ACC), 1)  # [M]
    if HAS_DLSE:
        b_delta -= tl.load(stat_rows(dlse, i_b, i_h, row) + o_m, mask=row + o_m < n_s, other=0.0)
    tl.store(stat_rows(delta, i_b, i_h, row) + o_m, b_delta, mask=row + o_m < n_s)


@triton.jit
def log2_lse(p_lse, m_m):
    """lse in log2 units; 0 for a row that saw nothing, whose scores are all -inf anyway."""
    b_lse = tl.load(p_lse, mask=m_m, other=-float("inf"))
    return tl.where(b_lse == -float("inf"), 0.0, b_lse) * LOG2E


@triton.jit
def dq_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    dout,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dq,  # Strided [B, Hq, S, D]
    q_slots,  # Slots
    kv_slots,  # Slots
    rows,  # Rows over Q slots
    interval,  # Interval
    mask_caps,
    score_caps,
    score_dcaps,  # gradients of what score_mod captures
    left,
    right,
    i_b0,
    i_h0,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    E: tl.constexpr,
    E0: tl.constexpr,
    E1: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DENSE_Q: tl.constexpr,
    DENSE_KV: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    MASK_MOD: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    SCORE_GRAD: tl.constexpr,
    HAS_MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    ADD: tl.constexpr,  # dq += instead of dq =
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    Q_TILES: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    EVEN: tl.constexpr = KV_BLOCK % BLOCK_N == 0

    row, pos, n_m = locate(q_slots, i_b, i_tile, Q_BLOCK, BLOCK_M, DENSE_Q)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_q = (pos + o_m)[:, None]
    m_m = o_m < n_m

    p_k = head(k, i_b, i_h // GROUP)
    p_v = head(v, i_b, i_h // GROUP)
    b_q0 = load_rows(q, head(q, i_b, i_h), row, o_m, n_m, 0, D0, D, True)  # [M, D0]
    b_do0 = load_rows(dout, head(dout, i_b, i_h), row, o_m, n_m, 0, E0, E, True)  # [M, E0]
    b_dq0 = tl.zeros([BLOCK_M, D0], ACC)
    b_dq1 = 0.0
    if D1 > 0:
        b_q1 = load_rows(q, head(q, i_b, i_h), row, o_m, n_m, D0, D1, D, True)  # [M, D1]
        b_dq1 = tl.zeros([BLOCK_M, D1], ACC)
    if E1 > 0:
        b_do1 = load_rows(dout, head(dout, i_b, i_h), row, o_m, n_m, E0, E1, E, True)  # [M, E1]
    b_lse = log2_lse(stat_rows(lse, i_b, i_h, row) + o_m, m_m)[:, None]
    b_delta = tl.load(stat_rows(delta, i_b, i_h, row) + o_m, mask=m_m, other=0.0)[:, None]
    if MASK == "interval":
        if WINDOW:
            b_lo = o_q - left
            b_hi = o_q + right + 1
        else:
            o_lo = i_b * interval.stride_b + (i_h + i_h0) * interval.stride_h + row + o_m
            b_lo = tl.load(interval.lo + o_lo, mask=m_m, other=0)[:, None]
            b_hi = tl.load(interval.hi + o_lo, mask=m_m, other=0)[:, None]
    else:
        b_lo = 0
        b_hi = 0

    begin, mid, end = row_runs(rows, i_b, i_h + i_h0, i_tile // Q_TILES, WINDOW)
    for PHASE in tl.static_range(2):  # masked blocks, then full ones
        if HAS_MASKED or PHASE == 1:
            for i_run in range(begin if PHASE == 0 else mid, mid if PHASE == 0 else end):
                t_lo, t_hi, kind = run_tiles(rows, i_run, pos, pos + tl.minimum(n_m, BLOCK_M), left, right,
                                             kv_slots, KV_BLOCK, BLOCK_N, WINDOW)
                for i_kv in range(t_lo, t_hi):
                    kv_row, kv_pos, n_n = locate(kv_slots, i_b, i_kv, KV_BLOCK, BLOCK_N, DENSE_KV)
                    o_kv = (kv_pos + o_n)[None, :]
                    b_k0 = load_rows(k, p_k, kv_row, o_n, n_n, 0, D0, D, PHASE == 0 or not EVEN)  # [N, D0]
                    b_s = dot(b_q0, tl.trans(b_k0), PRECISION)  # [M, N]
                    if D1 > 0:
                        b_k1 = load_rows(k, p_k, kv_row, o_n, n_n, D0, D1, D, PHASE == 0 or not EVEN)  # [N, D1]
                        b_s += dot(b_q1, tl.trans(b_k1), PRECISION)
                    b_pre, b_s = to_log2(b_s, i_b + i_b0, i_h + i_h0, o_q, o_kv, score_caps, SCALE, SCORE_MOD)
                    m_in = m_m[:, None] & (o_n < n_n)[None, :]
                    if PHASE == 0:
                        m_in = visible(i_b + i_b0, i_h + i_h0, o_q, o_kv, m_in, b_lo, b_hi, kind, mask_caps,
                                       MASK, MASK_MOD, BOUNDED)
                    b_p = tl.exp2(b_s - b_lse)  # [M, N]
                    if PHASE == 0 or not EVEN:
                        b_p = tl.where(m_in, b_p, 0.0)
                    b_v = load_rows(v, p_v, kv_row, o_n, n_n, 0, E0, E, PHASE == 0 or not EVEN)  # [N, E0]
                    b_dp = dot(b_do0, tl.trans(b_v), PRECISION)  # [M, N]
                    if E1 > 0:
                        b_v = load_rows(v, p_v, kv_row, o_n, n_n, E0, E1, E, PHASE == 0 or not EVEN)  # [N, E1]
                        b_dp += dot(b_do1, tl.trans(b_v), PRECISION)
                    b_ds = b_p * (b_dp - b_delta)  # [M, N]
                    if SCORE_GRAD is not None:
                        b_ds = SCORE_GRAD(b_ds, b_pre, i_b + i_b0, i_h + i_h0, o_q, o_kv, m_in, score_caps,
                                          score_dcaps)
                        b_ds = tl.where(m_in, b_ds, 0.0)
                    b_dq0 += dot(b_ds.to(b_k0.dtype), b_k0, PRECISION)
                    if D1 > 0:
                        b_dq1 += dot(b_ds.to(b_k1.dtype), b_k1, PRECISION)

    store_rows(dq, head(dq, i_b, i_h), row, o_m, n_m, b_dq0 * SCALE, 0, D0, D, ADD)
    if D1 > 0:
        store_rows(dq, head(dq, i_b, i_h), row, o_m, n_m, b_dq1 * SCALE, D0, D1, D, ADD)


@triton.jit
def dkdv_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    dout,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dk,  # Strided [B, Hkv * SPLIT, rows, D]
    dv,  # Strided [B, Hkv * SPLIT, rows, E]
    q_slots,  # Slots
    kv_slots,  # Slots
    cols,  # Rows over KV slots: runs of Q slots
    interval,  # Interval
    mask_caps,
    score_caps,
    left,  # window seen from a key: right of the query is left of the key
    right,
    i_b0,
    i_h0,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,  # programs that share the query heads of a KV head
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    E: tl.constexpr,
    E0: tl.constexpr,
    E1: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DENSE_Q: tl.constexpr,
    DENSE_KV: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    MASK_MOD: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    SCORE_GRAD: tl.constexpr,
    HAS_MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_part = tl.program_id(1)  # KV head * SPLIT + part of its query heads
    i_b = tl.program_id(2)
    KV_TILES: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    EVEN: tl.constexpr = Q_BLOCK % BLOCK_M == 0

    row, pos, n_n = locate(kv_slots, i_b, i_tile, KV_BLOCK, BLOCK_N, DENSE_KV)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_kv = (pos + o_n)[:, None]
    m_n = (o_n < n_n)[:, None]

    p_k = head(k, i_b, i_part // SPLIT)
    p_v = head(v, i_b, i_part // SPLIT)
    b_k0 = load_rows(k, p_k, row, o_n, n_n, 0, D0, D, True)  # [N, D0]
    b_v0 = load_rows(v, p_v, row, o_n, n_n, 0, E0, E, True)  # [N, E0]
    b_dk0 = tl.zeros([BLOCK_N, D0], ACC)
    b_dv0 = tl.zeros([BLOCK_N, E0], ACC)
    b_dk1 = 0.0
    b_dv1 = 0.0
    if D1 > 0:
        b_k1 = load_rows(k, p_k, row, o_n, n_n, D0, D1, D, True)  # [N, D1]
        b_dk1 = tl.zeros([BLOCK_N, D1], ACC)
    if E1 > 0:
        b_v1 = load_rows(v, p_v, row, o_n, n_n, E0, E1, E, True)  # [N, E1]
        b_dv1 = tl.zeros([BLOCK_N, E1], ACC)

    for i_g in range(GROUP // SPLIT):
        i_h = i_part * (GROUP // SPLIT) + i_g
        p_q = head(q, i_b, i_h)
        p_do = head(dout, i_b, i_h)
        begin, mid, end = row_runs(cols, i_b, i_h + i_h0, i_tile // KV_TILES, WINDOW)
        for PHASE in tl.static_range(2):  # masked blocks, then full ones
            if HAS_MASKED or PHASE == 1:
                for i_run in range(begin if PHASE == 0 else mid, mid if PHASE == 0 else end):
                    t_lo, t_hi, kind = run_tiles(cols, i_run, pos, pos + tl.minimum(n_n, BLOCK_N), left, right,
                                                 q_slots, Q_BLOCK, BLOCK_M, WINDOW)
                    for i_q in range(t_lo, t_hi):
                        q_row, q_pos, n_m = locate(q_slots, i_b, i_q, Q_BLOCK, BLOCK_M, DENSE_Q)
                        o_q = (q_pos + o_m)[None, :]
                        m_m = o_m < n_m
                        b_q0 = load_rows(q, p_q, q_row, o_m, n_m, 0, D0, D, PHASE == 0 or not EVEN)  # [M, D0]
                        b_s = dot(b_k0, tl.trans(b_q0), PRECISION)  # [N, M]
                        if D1 > 0:
                            b_q1 = load_rows(q, p_q, q_row, o_m, n_m, D0, D1, D, PHASE == 0 or not EVEN)  # [M, D1]
                            b_s += dot(b_k1, tl.trans(b_q1), PRECISION)
                        b_lse = log2_lse(stat_rows(lse, i_b, i_h, q_row) + o_m, m_m)[None, :]
                        b_delta = tl.load(stat_rows(delta, i_b, i_h, q_row) + o_m, mask=m_m, other=0.0)[None, :]
                        b_pre, b_s = to_log2(b_s, i_b + i_b0, i_h + i_h0, o_q, o_kv, score_caps, SCALE, SCORE_MOD)
                        b_p = tl.exp2(b_s - b_lse)  # [N, M]
                        m_in = m_n & m_m[None, :]
                        if PHASE == 0:
                            b_lo = 0
                            b_hi = 0
                            if MASK == "interval":
                                if WINDOW:
                                    b_lo = o_q - right
                                    b_hi = o_q + left + 1
                                else:
                                    o_lo = i_b * interval.stride_b + (i_h + i_h0) * interval.stride_h + q_row + o_m
                                    b_lo = tl.load(interval.lo + o_lo, mask=m_m, other=0)[None, :]
                                    b_hi = tl.load(interval.hi + o_lo, mask=m_m, other=0)[None, :]
                            m_in = visible(i_b + i_b0, i_h + i_h0, o_q, o_kv, m_in, b_lo, b_hi, kind, mask_caps,
                                           MASK, MASK_MOD, BOUNDED)
                        if PHASE == 0 or not EVEN:
                            b_p = tl.where(m_in, b_p, 0.0)
                        b_do = load_rows(dout, p_do, q_row, o_m, n_m, 0, E0, E, PHASE == 0 or not EVEN)  # [M, E0]
                        b_dv0 += dot(b_p.to(b_do.dtype), b_do, PRECISION)
                        b_dp = dot(b_v0, tl.trans(b_do), PRECISION)  # [N, M]
                        if E1 > 0:
                            b_do = load_rows(dout, p_do, q_row, o_m, n_m, E0, E1, E, PHASE == 0 or not EVEN)  # [M, E1]
                            b_dv1 += dot(b_p.to(b_do.dtype), b_do, PRECISION)
                            b_dp += dot(b_v1, tl.trans(b_do), PRECISION)
                        b_ds = b_p * (b_dp - b_delta)  # [N, M]
                        if SCORE_GRAD is not None:
                            b_ds = SCORE_GRAD(b_ds, b_pre, i_b + i_b0, i_h + i_h0, o_q, o_kv, m_in, score_caps, ())
                            b_ds = tl.where(m_in, b_ds, 0.0)
                        b_dk0 += dot(b_ds.to(b_q0.dtype), b_q0, PRECISION)
                        if D1 > 0:
                            b_dk1 += dot(b_ds.to(b_q1.dtype), b_q1, PRECISION)

    store_rows(dk, head(dk, i_b, i_part), row, o_n, n_n, b_dk0 * SCALE, 0, D0, D, ADD)
    store_rows(dv, head(dv, i_b, i_part), row, o_n, n_n, b_dv0, 0, E0, E, ADD)
    if D1 > 0:
        store_rows(dk, head(dk, i_b, i_part), row, o_n, n_n, b_dk1 * SCALE, D0, D1, D, ADD)
    if E1 > 0:
        store_rows(dv, head(dv, i_b, i_part), row, o_n, n_n, b_dv1, E0, E1, E, ADD)
