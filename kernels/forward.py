"""Forward: one step of attention, local Q slots against the slots of one KV buffer."""

import triton
import triton.language as tl

from tritoncp.kernels.tiles import (
    LN2,
    LOG2E,
    head,
    in_window,
    inner,
    load_pair,
    locate,
    outer,
    row_intervals,
    row_runs,
    run_tiles,
    stat_rows,
    store_pair,
    stream_pair,
    to_log2,
    visible,
    within,
    zeros_pair,
)


@triton.jit
def leave(
    out,
    acc,
    stat_m,
    stat_l,
    lse,
    max_scores,
    i_b,
    i_h,
    row,
    o_m,
    n_m,
    b_acc0,
    b_acc1,
    b_m,
    b_l,
    E0: tl.constexpr,
    E1: tl.constexpr,
    E: tl.constexpr,
    STORE_STATE: tl.constexpr,
    STORE_MAX: tl.constexpr,
):
    """What a step leaves of a tile's rows: its state, or out, lse and the largest scores."""
    m_m = o_m < n_m
    if STORE_STATE:
        tl.store(stat_rows(stat_m, i_b, i_h, row) + o_m, b_m, mask=m_m)
        tl.store(stat_rows(stat_l, i_b, i_h, row) + o_m, b_l, mask=m_m)
        store_pair(acc, head(acc, i_b, i_h), row, o_m, n_m, b_acc0, b_acc1, E0, E1, E, False)
    else:
        m_seen = b_l != 0  # a NaN is passed on
        b_sum = tl.where(m_seen, b_l, 1.0)
        b_inv = tl.where(m_seen, 1.0 / b_sum, 0.0)[:, None]
        store_pair(out, head(out, i_b, i_h), row, o_m, n_m, b_acc0 * b_inv, b_acc1 * b_inv, E0, E1, E, False)
        b_lse = tl.where(m_seen, b_m + tl.log2(b_sum), -float("inf"))
        tl.store(stat_rows(lse, i_b, i_h, row) + o_m, b_lse * LN2, mask=m_m)
        if STORE_MAX:
            tl.store(stat_rows(max_scores, i_b, i_h, row) + o_m, b_m * LN2, mask=m_m)


@triton.jit
def forward_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    k_desc0,  # tensor descriptors of k and v, tiles of [BLOCK_N, piece of channels], or None
    k_desc1,
    v_desc0,
    v_desc1,
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
    HOIST: tl.constexpr,
    DENSE_Q: tl.constexpr,
    DENSE_KV: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,  # "none" | "interval" | "mod"
    MASK_MOD: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    HAS_MASKED: tl.constexpr,
    HAS_FULL: tl.constexpr,  # False: full runs are another launch's
    RAGGED: tl.constexpr,  # masked blocks may have fewer keys in a tile than BLOCK_N
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
    i_hm = i_h + i_h0  # as masks and mods see them
    i_bm = i_b + i_b0
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

    i_hkv = i_h // GROUP
    b_q0, b_q1 = load_pair(q, i_b, i_h, row, o_m, n_m, D0, D1, D)  # [M, D0], [M, D1]
    b_lo, b_hi = row_intervals(interval, i_b, i_hm, row, o_m, m_m, MASK)
    if LOAD_STATE:
        b_m = tl.load(stat_rows(stat_m, i_b, i_h, row) + o_m, mask=m_m, other=-float("inf"))
        b_l = tl.load(stat_rows(stat_l, i_b, i_h, row) + o_m, mask=m_m, other=0.0)
        b_acc0, b_acc1 = load_pair(acc, i_b, i_h, row, o_m, n_m, E0, E1, E)
    else:
        b_m = tl.full([BLOCK_M], -float("inf"), ACC)
        b_l = tl.zeros([BLOCK_M], ACC)
        b_acc0, b_acc1 = zeros_pair(BLOCK_M, E0, E1, ACC)  # [M, E0], [M, E1]

    begin, mid, end = row_runs(rows, i_b, i_hm, i_tile // Q_TILES, WINDOW)
    for FULL in tl.static_range(2):  # masked blocks, then full ones
        if HAS_FULL if FULL else HAS_MASKED:
            for i_run in range(mid if FULL else begin, end if FULL else mid):
                pos_end = pos + tl.minimum(n_m, BLOCK_M)
                t_lo, t_hi, kind, cut, skip = run_tiles(
                    rows, i_run, pos, pos_end, left, right, kv_slots, KV_BLOCK, BLOCK_N, WINDOW, FULL
                )
                for i_t in range(t_lo, t_hi):
                    i_kv = i_t + tl.where(i_t >= cut, skip, 0)
                    kv_row, kv_pos, n_n = locate(kv_slots, i_b, i_kv, KV_BLOCK, BLOCK_N, DENSE_KV)
                    o_kv = (kv_pos + o_n)[None, :]
                    m_n = within(o_n, n_n, not EVEN if FULL else RAGGED)[None, :]
                    b_k0, b_k1 = stream_pair(
                        k,
                        k_desc0,
                        k_desc1,
                        i_b,
                        i_hkv,
                        kv_row,
                        o_n,
                        n_n,
                        D0,
                        D1,
                        D,
                        not EVEN if FULL else RAGGED,
                        HOIST,
                    )  # [N, D]
                    b_s = inner(b_q0, b_q1, b_k0, b_k1, D1, PRECISION)  # [M, N]
                    if not FOLD:
                        _, b_s = to_log2(b_s, i_bm, i_hm, o_q, o_kv, score_caps, SCALE, SCORE_MOD)
                    if not FULL:
                        if WINDOW:
                            m_in = in_window(o_n[None, :], o_q - kv_pos, left, right, n_n if RAGGED else None)
                        else:
                            m_in = visible(
                                i_bm,
                                i_hm,
                                o_q,
                                o_kv,
                                m_m[:, None],
                                m_n,
                                o_n[None, :],
                                (b_lo - kv_pos)[:, None],
                                (b_hi - kv_pos)[:, None],
                                n_n if RAGGED else None,
                                kind,
                                mask_caps,
                                MASK,
                                MASK_MOD,
                                BOUNDED,
                            )
                        b_s = tl.where(m_in, b_s, -float("inf"))
                    elif not EVEN:
                        b_s = tl.where(m_n, b_s, -float("inf"))
                    b_max = tl.maximum(b_m, tl.max(b_s, 1) * C)
                    if not FULL or SCORE_MOD is not None:  # a row may have seen only -inf
                        b_safe = tl.where(b_max == -float("inf"), 0.0, b_max)
                    else:
                        b_safe = b_max
                    b_p = tl.exp2(b_s * C - b_safe[:, None])  # [M, N]
                    b_r = tl.exp2(b_m - b_safe)
                    b_l = b_l * b_r + tl.sum(b_p, 1)
                    b_m = b_max
                    b_v0, b_v1 = stream_pair(
                        v,
                        v_desc0,
                        v_desc1,
                        i_b,
                        i_hkv,
                        kv_row,
                        o_n,
                        n_n,
                        E0,
                        E1,
                        E,
                        not EVEN if FULL else RAGGED,
                        False,
                    )  # [N, E]
                    b_acc0 *= b_r[:, None]
                    if E1 > 0:
                        b_acc1 *= b_r[:, None]
                    b_acc0, b_acc1 = outer(b_acc0, b_acc1, b_p, b_v0, b_v1, E1, PRECISION)

    leave(
        out,
        acc,
        stat_m,
        stat_l,
        lse,
        max_scores,
        i_b,
        i_h,
        row,
        o_m,
        n_m,
        b_acc0,
        b_acc1,
        b_m,
        b_l,
        E0,
        E1,
        E,
        STORE_STATE,
        STORE_MAX,
    )
