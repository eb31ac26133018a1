"""Forward: one step of attention, local Q slots against the slots of one KV buffer."""

import triton
import triton.language as tl

from tritoncp.kernels.tiles import (
    LN2,
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
def forward_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    out,  # Strided [B, Hq, S, E]
    acc,  # Strided [B, Hq, S, E], float32: the state's accumulator
    stat_m,  # Stat [B, Hq, S], float32: the state's running maximum, log2 units
    stat_l,  # Stat: the state's sum of exp2(score - m)
    lse,  # Stat, natural log
    max_scores,  # Stat, largest score after scale and score_mod
    q_slots,  # Slots
    kv_slots,  # Slots
    rows,  # Rows over Q slots
    interval,  # Interval
    mask_caps,
    score_caps,
    left,  # window, in positions
    right,
    i_b0,  # offsets that make b and h global for the mods
    i_h0,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
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
    MASK: tl.constexpr,  # "none" | "interval" | "mod"
    MASK_MOD: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    HAS_MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    STORE_MAX: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,  # float32, float64 for float64 inputs
):
    tl.static_assert(BLOCK_M >= 16 and BLOCK_N >= 16)
    # Later rows of a causal mask are the heaviest: start with them.
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    Q_TILES: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    EVEN: tl.constexpr = KV_BLOCK % BLOCK_N == 0
    # Without a score_mod, a positive scale folds into the exponent: exp2(s * c - m).
    FOLD: tl.constexpr = (SCORE_MOD is None) and (SCALE > 0)
    C: tl.constexpr = SCALE * LOG2E if FOLD else 1.0

    row, pos, n_m = locate(q_slots, i_b, i_tile, Q_BLOCK, BLOCK_M, DENSE_Q)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_q = (pos + o_m)[:, None]
    m_m = o_m < n_m

    p_q = head(q, i_b, i_h)
    p_k = head(k, i_b, i_h // GROUP)
    p_v = head(v, i_b, i_h // GROUP)
    if LOAD_STATE or STORE_STATE:
        p_acc = head(acc, i_b, i_h)

    b_q0 = load_rows(q, p_q, row, o_m, n_m, 0, D0, D, True)  # [M, D0]
    if D1 > 0:
        b_q1 = load_rows(q, p_q, row, o_m, n_m, D0, D1, D, True)  # [M, D1]
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

    b_acc1 = 0.0
    if LOAD_STATE:
        b_m = tl.load(stat_rows(stat_m, i_b, i_h, row) + o_m, mask=m_m, other=-float("inf"))
        b_l = tl.load(stat_rows(stat_l, i_b, i_h, row) + o_m, mask=m_m, other=0.0)
        b_acc0 = load_rows(acc, p_acc, row, o_m, n_m, 0, E0, E, True)
        if E1 > 0:
            b_acc1 = load_rows(acc, p_acc, row, o_m, n_m, E0, E1, E, True)
    else:
        b_m = tl.full([BLOCK_M], -float("inf"), ACC)
        b_l = tl.zeros([BLOCK_M], ACC)
        b_acc0 = tl.zeros([BLOCK_M, E0], ACC)
        if E1 > 0:
            b_acc1 = tl.zeros([BLOCK_M, E1], ACC)

    begin, mid, end = row_runs(rows, i_b, i_h + i_h0, i_tile // Q_TILES, WINDOW)
    for PHASE in tl.static_range(2):  # masked blocks, then full ones
        if HAS_MASKED or PHASE == 1:
            for i_run in range(begin if PHASE == 0 else mid, mid if PHASE == 0 else end):
                t_lo, t_hi, kind = run_tiles(rows, i_run, pos, pos + tl.minimum(n_m, BLOCK_M), left, right,
                                             kv_slots, KV_BLOCK, BLOCK_N, WINDOW)
                for i_kv in range(t_lo, t_hi):
                    kv_row, kv_pos, n_n = locate(kv_slots, i_b, i_kv, KV_BLOCK, BLOCK_N, DENSE_KV)
                    o_kv = (kv_pos + o_n)[None, :]
                    b_k = load_rows(k, p_k, kv_row, o_n, n_n, 0, D0, D, PHASE == 0 or not EVEN)  # [N, D0]
                    b_s = dot(b_q0, tl.trans(b_k), PRECISION)  # [M, N]
                    if D1 > 0:
                        b_k = load_rows(k, p_k, kv_row, o_n, n_n, D0, D1, D, PHASE == 0 or not EVEN)  # [N, D1]
                        b_s += dot(b_q1, tl.trans(b_k), PRECISION)
                    if not FOLD:
                        _, b_s = to_log2(b_s, i_b + i_b0, i_h + i_h0, o_q, o_kv, score_caps, SCALE, SCORE_MOD)
                    if PHASE == 0 or not EVEN:
                        m_in = (o_n < n_n)[None, :]
                        if PHASE == 0:
                            m_in = visible(i_b + i_b0, i_h + i_h0, o_q, o_kv, m_in, b_lo, b_hi, kind, mask_caps,
                                           MASK, MASK_MOD, BOUNDED)
                        b_s = tl.where(m_in, b_s, -float("inf"))
                    b_max = tl.maximum(b_m, tl.max(b_s, 1) * C)
                    if PHASE == 0 or SCORE_MOD is not None:  # a row may have seen only -inf
                        b_safe = tl.where(b_max == -float("inf"), 0.0, b_max)
                    else:
                        b_safe = b_max
                    b_p = tl.exp2(b_s * C - b_safe[:, None])  # [M, N]
                    b_r = tl.exp2(b_m - b_safe)
                    b_l = b_l * b_r + tl.sum(b_p, 1)
                    b_m = b_max
                    b_v = load_rows(v, p_v, kv_row, o_n, n_n, 0, E0, E, PHASE == 0 or not EVEN)  # [N, E0]
                    b_acc0 = b_acc0 * b_r[:, None] + dot(b_p.to(b_v.dtype), b_v, PRECISION)
                    if E1 > 0:
                        b_v = load_rows(v, p_v, kv_row, o_n, n_n, E0, E1, E, PHASE == 0 or not EVEN)  # [N, E1]
                        b_acc1 = b_acc1 * b_r[:, None] + dot(b_p.to(b_v.dtype), b_v, PRECISION)

    if STORE_STATE:
        tl.store(stat_rows(stat_m, i_b, i_h, row) + o_m, b_m, mask=m_m)
        tl.store(stat_rows(stat_l, i_b, i_h, row) + o_m, b_l, mask=m_m)
        store_rows(acc, p_acc, row, o_m, n_m, b_acc0, 0, E0, E, False)
        if E1 > 0:
            store_rows(acc, p_acc, row, o_m, n_m, b_acc1, E0, E1, E, False)
    else:
        m_seen = b_l > 0
        b_inv = tl.where(m_seen, 1.0 / tl.where(m_seen, b_l, 1.0), 0.0)[:, None]
        p_out = head(out, i_b, i_h)
        store_rows(out, p_out, row, o_m, n_m, b_acc0 * b_inv, 0, E0, E, False)
        if E1 > 0:
            store_rows(out, p_out, row, o_m, n_m, b_acc1 * b_inv, E0, E1, E, False)
        b_lse = tl.where(m_seen, b_m + tl.log2(tl.where(m_seen, b_l, 1.0)), -float("inf"))
        tl.store(stat_rows(lse, i_b, i_h, row) + o_m, b_lse * LN2, mask=m_m)
        if STORE_MAX:
            tl.store(stat_rows(max_scores, i_b, i_h, row) + o_m, b_m * LN2, mask=m_m)
