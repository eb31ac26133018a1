"""Backward: delta, then dQ and dK/dV from separate loops, so that no sum depends on timing; or dQ added up
by the loop of dK/dV, which saves two of seven products and the order of that sum.

With P = exp(S' - lse), S' the scores after score_mod, dP = dO V^T and delta = rowsum(O * dO) - dlse:
dS' = P * (dP - delta), dS = dS' * dS'/dS, dQ = scale * dS K, dK = scale * dS^T Q, dV = P^T dO
(FlashAttention-2, arXiv 2307.08691, algorithm 2; the lse cotangent folds into delta).
"""

import triton
import triton.language as tl

from tritoncp.kernels.program_order import locate_program
from tritoncp.kernels.scores import (
    LOG2E,
    Head,
    MaskRule,
    Pairs,
    Queries,
    add_dot,
    dot,
    dot_nt,
    probabilities,
    row_intervals,
    row_mask,
    scale_pieces,
    to_log2,
    visible_keys,
    visible_queries,
    zeros_pieces,
)
from tritoncp.kernels.tile_runs import SideLayout, locate_tile, row_runs, run_tiles, skip_cut
from tritoncp.kernels.tiles import (
    Stream,
    add_rows,
    channels_of,
    head_pointer,
    load_pieces,
    load_rows,
    load_stat,
    stat_pointers,
    store_pieces,
    stream_pieces,
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
    b_o = load_rows(
        out, head_pointer(out, i_b, i_h), row, o_m, n_s - row, 0, BLOCK_E, E, True
    )  # [M, BLOCK_E]
    b_do = load_rows(dout, head_pointer(dout, i_b, i_h), row, o_m, n_s - row, 0, BLOCK_E, E, True)
    b_delta = tl.sum(b_o.to(ACC) * b_do.to(ACC), 1)  # [M]
    if HAS_DLSE:
        b_delta -= load_stat(dlse, i_b, i_h, row, o_m, row + o_m < n_s, True)
    tl.store(stat_pointers(delta, i_b, i_h, row) + o_m, b_delta, mask=row + o_m < n_s)


@triton.jit
def load_lse(lse, i_b, i_h, row, o_m, m_m, CHECK: tl.constexpr, SCORE_MOD: tl.constexpr):
    """lse in log2 units.  In place of -inf (a score_mod made all scores of a row -inf, or the row is
    masked everywhere) 0 keeps the probabilities 0."""
    b_lse = load_stat(lse, i_b, i_h, row, o_m, m_m, CHECK)
    if SCORE_MOD is not None:
        b_lse = tl.where(b_lse == -float("inf"), 0.0, b_lse)
    return b_lse * LOG2E


@triton.jit
def score_gradients(
    b_ds, b_pre, head, pairs, m_in, m_stored, score_caps, score_dcaps, SCORE_GRAD: tl.constexpr
):
    """Gradients of the scores before score_mod, from those after it; adds those of its captures.

    m_stored: the rows within the slot; the results of other rows are not stored
    """
    if SCORE_GRAD is None:
        return b_ds
    else:
        if len(score_dcaps) > 0:
            m_in = m_in & m_stored
        b_dt = SCORE_GRAD(b_ds, b_pre, head.b, head.h, pairs.q, pairs.kv, m_in, score_caps, score_dcaps)
        return tl.where(m_in, b_dt.to(b_ds.dtype), 0.0)


@triton.jit
def add_query_gradients(
    dq, i_b, i_h, tile, o_m, b_ds, b_k, SCALE: tl.constexpr, QK: tl.constexpr, PRECISION: tl.constexpr
):
    """dQ += scale * dS^T K in memory, for a tile of queries of one head."""
    W0: tl.constexpr = QK.first
    W1: tl.constexpr = QK.second
    b_dst = tl.trans(b_ds).to(b_k[0].dtype)  # [M, N]
    b_dq = dot(b_dst, b_k[0], PRECISION) * SCALE
    add_rows(dq.x, dq.desc0, i_b, i_h, tile.row, o_m, tile.n, b_dq, 0, W0, QK.dim)
    if W1 > 0:
        b_dq = dot(b_dst, b_k[1], PRECISION) * SCALE
        add_rows(dq.x, dq.desc1, i_b, i_h, tile.row, o_m, tile.n, b_dq, W0, W1, QK.dim)


@triton.jit
def dq_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    k_desc0,  # tensor descriptors of k and v, tiles of [BLOCK_N, piece of channels], or None
    k_desc1,
    v_desc0,
    v_desc1,
    dout,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dq,  # Strided [B, Hq, S, D]
    q_slots,  # Slots
    kv_slots,  # Slots
    rows,  # Rows over Q slots
    order,  # ProgramOrder
    interval,  # Interval
    mask_caps,
    score_caps,
    score_dcaps,  # gradients of what score_mod captures
    i_b0,
    i_h0,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDEST: tl.constexpr,  # piece of channels
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLIP: tl.constexpr,
    DENSE_Q: tl.constexpr,
    DENSE_KV: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    MASK_MOD: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    SCORE_GRAD: tl.constexpr,
    HAS_MASKED: tl.constexpr,
    RAGGED: tl.constexpr,  # masked blocks may have fewer keys in a tile than BLOCK_N
    BOUNDED: tl.constexpr,
    ADD: tl.constexpr,  # dq += instead of dq =
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    Q_TILES: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    i_b = tl.program_id(2)
    program = locate_program(order, i_b, None, Q_TILES, True)
    i_tile = program.i_tile
    i_h = program.i_head
    head = Head(i_b + i_b0, i_h + i_h0)
    Q_LAYOUT: tl.constexpr = SideLayout(Q_BLOCK, BLOCK_M, DENSE_Q)
    KV_LAYOUT: tl.constexpr = SideLayout(KV_BLOCK, BLOCK_N, DENSE_KV)
    EVEN: tl.constexpr = KV_BLOCK % BLOCK_N == 0
    QK: tl.constexpr = channels_of(D, WIDEST)
    VO: tl.constexpr = channels_of(E, WIDEST)
    RULE: tl.constexpr = MaskRule(WINDOW, MASK, MASK_MOD, BOUNDED, RAGGED)

    row, pos, n_m = locate_tile(q_slots, i_b, i_tile, Q_LAYOUT)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_q = (pos + o_m)[:, None]
    m_m = o_m < n_m

    i_hkv = i_h // GROUP
    keys = Stream(k, k_desc0, k_desc1)
    values = Stream(v, v_desc0, v_desc1)
    b_q = load_pieces(q, i_b, i_h, row, o_m, n_m, QK)  # [M, D]
    b_do = load_pieces(dout, i_b, i_h, row, o_m, n_m, VO)  # [M, E]
    b_dq = zeros_pieces(BLOCK_M, QK, ACC)  # [M, D]
    b_lse = load_lse(lse, i_b, i_h, row, o_m, m_m, True, SCORE_MOD)[:, None]
    b_delta = load_stat(delta, i_b, i_h, row, o_m, m_m, True)[:, None]
    b_lo, b_hi = row_intervals(interval, i_b, head.h, row, o_m, m_m, MASK)
    queries = Queries(o_q, m_m, b_lo, b_hi)

    begin, mid, end = row_runs(rows, i_b, head.h, i_tile // Q_TILES, WINDOW)
    # disable_licm: the compiler would keep what tiles share in registers (sm_100, 128 channels, mask_mod: 224
    # bytes spilled).
    for FULL in tl.static_range(0 if HAS_MASKED else 1, 2):  # masked blocks, then full ones
        for i_run in tl.range(mid if FULL else begin, end if FULL else mid, disable_licm=True):
            CHECK: tl.constexpr = not EVEN if FULL else RAGGED
            pos_end = pos + tl.minimum(n_m, BLOCK_M)
            tiles = run_tiles(rows, i_run, pos, pos_end, kv_slots, KV_LAYOUT, WINDOW, FULL)
            for i_t in tl.range(tiles.begin, tiles.end, disable_licm=True):
                kv = locate_tile(kv_slots, i_b, skip_cut(tiles, i_t), KV_LAYOUT)
                pairs = Pairs(o_q, (kv.pos + o_n)[None, :])
                m_in = row_mask(o_n, kv.n, CHECK)[None, :]
                b_k = stream_pieces(keys, i_b, i_hkv, kv, o_n, QK, CHECK)  # [N, D]
                b_s = dot_nt(b_q, b_k, PRECISION, FLIP)  # [M, N]
                b_pre, b_s = to_log2(b_s, head, pairs, score_caps, SCALE, SCORE_MOD)
                if not FULL:
                    m_in = visible_keys(head, queries, kv, o_n, rows, tiles.kind, mask_caps, RULE, False)
                b_p = probabilities(b_s, b_lse)  # [M, N]
                if not FULL or not EVEN:
                    b_p = tl.where(m_in, b_p, 0.0)
                b_v = stream_pieces(values, i_b, i_hkv, kv, o_n, VO, CHECK)  # [N, E]
                b_ds = b_p * (dot_nt(b_do, b_v, PRECISION, FLIP) - b_delta)  # [M, N]
                b_ds = score_gradients(
                    b_ds, b_pre, head, pairs, m_in, m_m[:, None], score_caps, score_dcaps, SCORE_GRAD
                )
                b_dq = add_dot(b_dq, b_ds, b_k, PRECISION)

    store_pieces(dq, i_b, i_h, row, o_m, n_m, scale_pieces(b_dq, SCALE), QK, ADD)


@triton.jit
def dkdv_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    dout,  # Strided [B, Hq, S, E]
    q_desc0,  # tensor descriptors of q and dout, tiles of [BLOCK_M, piece of channels], or None
    q_desc1,
    dout_desc0,
    dout_desc1,
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dk,  # Strided [B, Hkv * SPLIT, rows, D]
    dv,  # Strided [B, Hkv * SPLIT, rows, E]
    dq,  # Strided [B, Hq, S, D], float32 that every program adds to, or None: dq_kernel computes it
    dq_desc0,
    dq_desc1,
    q_slots,  # Slots
    kv_slots,  # Slots
    cols,  # Rows over KV slots: runs of Q slots
    order,  # ProgramOrder
    interval,  # Interval
    mask_caps,
    score_caps,
    score_dcaps,  # where dQ is computed here
    i_b0,
    i_h0,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,  # programs that share the query heads of a KV head
    D: tl.constexpr,
    E: tl.constexpr,
    WIDEST: tl.constexpr,  # piece of channels
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLIP: tl.constexpr,
    DENSE_Q: tl.constexpr,
    DENSE_KV: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    MASK_MOD: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    SCORE_GRAD: tl.constexpr,
    HAS_MASKED: tl.constexpr,
    RAGGED: tl.constexpr,  # masked blocks may have fewer queries in a tile than BLOCK_M
    BOUNDED: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    KV_TILES: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    i_b = tl.program_id(2)
    # i_part: KV head * SPLIT + part of its query heads
    i_tile, i_part, _ = locate_program(order, i_b, None, KV_TILES, False)
    Q_LAYOUT: tl.constexpr = SideLayout(Q_BLOCK, BLOCK_M, DENSE_Q)
    KV_LAYOUT: tl.constexpr = SideLayout(KV_BLOCK, BLOCK_N, DENSE_KV)
    HEADS: tl.constexpr = GROUP // SPLIT
    EVEN: tl.constexpr = Q_BLOCK % BLOCK_M == 0
    QK: tl.constexpr = channels_of(D, WIDEST)
    VO: tl.constexpr = channels_of(E, WIDEST)
    RULE: tl.constexpr = MaskRule(WINDOW, MASK, MASK_MOD, BOUNDED, RAGGED)

    row, pos, n_n = locate_tile(kv_slots, i_b, i_tile, KV_LAYOUT)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_kv = (pos + o_n)[:, None]
    m_n = (o_n < n_n)[:, None]

    i_hkv = i_part // SPLIT
    query_rows = Stream(q, q_desc0, q_desc1)
    output_grads = Stream(dout, dout_desc0, dout_desc1)
    query_grads = Stream(dq, dq_desc0, dq_desc1)
    b_k = load_pieces(k, i_b, i_hkv, row, o_n, n_n, QK)  # [N, D]
    b_v = load_pieces(v, i_b, i_hkv, row, o_n, n_n, VO)  # [N, E]
    b_dk = zeros_pieces(BLOCK_N, QK, ACC)  # [N, D]
    b_dv = zeros_pieces(BLOCK_N, VO, ACC)  # [N, E]

    # disable_licm: as in dq_kernel (dK/dV, sm_100, 256 channels: 512 bytes spilled).
    for FULL in tl.static_range(0 if HAS_MASKED else 1, 2):  # masked blocks, then full ones
        # A window's tiles are the same for every head: one loop over heads and tiles.
        for i_g in range(1 if WINDOW else HEADS):
            i_h = i_part * HEADS + i_g
            begin, mid, end = row_runs(cols, i_b, i_h + i_h0, i_tile // KV_TILES, WINDOW)
            for i_run in tl.range(mid if FULL else begin, end if FULL else mid, disable_licm=True):
                CHECK: tl.constexpr = not EVEN if FULL else RAGGED
                pos_end = pos + tl.minimum(n_n, BLOCK_N)
                tiles = run_tiles(cols, i_run, pos, pos_end, q_slots, Q_LAYOUT, WINDOW, FULL)
                i_t = tiles.begin
                n_t = tiles.end - tiles.begin
                for _ in tl.range(0, n_t * HEADS if WINDOW else n_t, disable_licm=True):
                    head = Head(i_b + i_b0, i_h + i_h0)
                    tile = locate_tile(q_slots, i_b, skip_cut(tiles, i_t), Q_LAYOUT)
                    pairs = Pairs((tile.pos + o_m)[None, :], o_kv)
                    m_m = row_mask(o_m, tile.n, CHECK)
                    b_q = stream_pieces(query_rows, i_b, i_h, tile, o_m, QK, CHECK)  # [M, D]
                    b_s = dot_nt(b_k, b_q, PRECISION, FLIP)  # [N, M]
                    b_lse = load_lse(lse, i_b, i_h, tile.row, o_m, m_m, CHECK, SCORE_MOD)[None, :]
                    b_pre, b_s = to_log2(b_s, head, pairs, score_caps, SCALE, SCORE_MOD)
                    b_p = probabilities(b_s, b_lse)  # [N, M]
                    m_in = m_m[None, :]
                    if not FULL:
                        b_lo, b_hi = row_intervals(interval, i_b, head.h, tile.row, o_m, m_m, MASK)
                        queries = Queries(pairs.q, m_m, b_lo, b_hi)
                        m_in = visible_queries(
                            head, o_kv, queries, tile, o_m, cols, tiles.kind, mask_caps, RULE
                        )
                    if not FULL or not EVEN:
                        b_p = tl.where(m_in, b_p, 0.0)
                    b_do = stream_pieces(output_grads, i_b, i_h, tile, o_m, VO, CHECK)  # [M, E]
                    b_dv = add_dot(b_dv, b_p, b_do, PRECISION)
                    b_dp = dot_nt(b_v, b_do, PRECISION, FLIP)  # [N, M]
                    b_delta = load_stat(delta, i_b, i_h, tile.row, o_m, m_m, CHECK)[None, :]
                    b_ds = score_gradients(
                        b_p * (b_dp - b_delta),
                        b_pre,
                        head,
                        pairs,
                        m_in,
                        m_n,
                        score_caps,
                        score_dcaps,
                        SCORE_GRAD,
                    )  # [N, M]
                    b_dk = add_dot(b_dk, b_ds, b_q, PRECISION)
                    if dq.ptr is not None:
                        if not FULL or KV_BLOCK % BLOCK_N != 0:  # keys past the slot would add to dQ
                            b_ds = tl.where(m_n, b_ds, 0.0)
                        add_query_gradients(query_grads, i_b, i_h, tile, o_m, b_ds, b_k, SCALE, QK, PRECISION)
                    i_t += 1
                    if WINDOW:
                        i_h += tl.where(i_t == tiles.end, 1, 0)
                        i_t = tl.where(i_t == tiles.end, tiles.begin, i_t)

    # Load again (without: 8 bytes spilled on sm_80, 128 channels).
    row, _, n_n = locate_tile(kv_slots, i_b, i_tile, KV_LAYOUT, True)
    store_pieces(dk, i_b, i_part, row, o_n, n_n, scale_pieces(b_dk, SCALE), QK, ADD)
    store_pieces(dv, i_b, i_part, row, o_n, n_n, b_dv, VO, ADD)
