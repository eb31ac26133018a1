"""Backward: delta, then dQ and dK/dV from separate loops, so that no sum depends on timing; or dQ added up
by the loop of dK/dV, which saves two of seven products and the order of that sum.

With P = exp(S' - lse), S' the scores after score_mod, dP = dO V^T and delta = rowsum(O * dO) - dlse:
dS' = P * (dP - delta), dS = dS' * dS'/dS, dQ = scale * dS K, dK = scale * dS^T Q, dV = P^T dO
(FlashAttention-2, arXiv 2307.08691, algorithm 2; the lse cotangent folds into delta).
"""

import triton
import triton.language as tl

from tritoncp.kernels.opaque_integers import integer
from tritoncp.kernels.program_order import locate_program
from tritoncp.kernels.scores import (
    LOG2E,
    Queries,
    add_dot,
    dot,
    dot_nt,
    probabilities,
    row_intervals,
    row_mask,
    scale_pieces,
    select_pieces,
    to_log2,
    visible_keys,
    visible_queries,
    zeros_pieces,
)
from tritoncp.kernels.tile_runs import locate_tile, row_runs, run_tiles, skip_cut
from tritoncp.kernels.tiles import (
    HeadRows,
    Stream,
    accumulator_dtype,
    add_rows,
    count_pieces,
    head_rows,
    load_pieces,
    load_rows,
    load_stat,
    stat_pointers,
    store_pieces,
    stream_pieces,
)


@triton.jit(do_not_specialize=["n_s"])
def delta_kernel(
    out,  # Strided [B, Hq, S, E]
    dout,  # Strided [B, Hq, S, E]
    dlse,  # Stat [B, Hq, S] or None
    delta,  # Stat
    n_s,  # S
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,  # E up to the next power of two
):
    """delta = rowsum(out * dout) - dlse."""
    ACC: tl.constexpr = accumulator_dtype(out.ptr.dtype.element_ty)
    row = tl.program_id(0) * BLOCK_M
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    o_m = tl.arange(0, BLOCK_M)
    rows = HeadRows(i_b, i_h, i_h, row, o_m, n_s - row)
    b_o = load_rows(out, rows, 0, BLOCK_E, E, True)  # [M, BLOCK_E]
    b_do = load_rows(dout, rows, 0, BLOCK_E, E, True)
    b_delta = tl.sum(b_o.to(ACC) * b_do.to(ACC), 1)  # [M]
    m_m = row + o_m < n_s
    if dlse.ptr is not None:
        b_delta -= load_stat(dlse, rows, m_m)
    tl.store(stat_pointers(delta, rows), b_delta, mask=m_m)


@triton.jit
def load_lse(lse, rows, m_m, score_mod, CHECK: tl.constexpr = True):
    """lse in log2 units.  In place of -inf (a score_mod made all scores of a row -inf, or the row is
    masked everywhere) 0 keeps the probabilities 0."""
    b_lse = load_stat(lse, rows, m_m, CHECK)
    if score_mod.fn is not None:
        b_lse = tl.where(b_lse == -float("inf"), 0.0, b_lse)
    return b_lse * LOG2E


@triton.jit
def score_gradients(b_ds, b_pre, queries, o_kv, m_in, m_stored, score_mod, score_grad):
    """Gradients of the scores before score_mod, from those after it; adds those of its captures.

    m_stored: the rows within the slot; the results of other rows are not stored
    """
    if score_grad.fn is None:
        return b_ds
    else:
        if len(score_grad.captured) > 0:
            m_in = m_in & m_stored
        b_dt = score_grad.fn(
            b_ds, b_pre, queries.batch, queries.head, queries.pos, o_kv, m_in,
            score_mod.captured, score_grad.captured,
        )  # fmt: skip
        return tl.where(m_in, b_dt.to(b_ds.dtype), 0.0)


@triton.jit
def add_query_gradients(dq, rows, b_ds, b_k, SCALE: tl.constexpr, QK: tl.constexpr, PRECISION: tl.constexpr):
    """dQ += scale * dS^T K in memory, for a tile of queries of one head."""
    b_dst = tl.trans(b_ds).to(b_k[0].dtype)  # [M, N]
    for I in tl.static_range(count_pieces(QK)):
        b_dq = dot(b_dst, b_k[I], PRECISION) * SCALE
        if QK.count > I:
            add_rows(dq.x, dq.desc0, rows, b_dq, I * QK.first, QK.first, QK.dim)
        else:
            add_rows(dq.x, dq.desc1, rows, b_dq, I * QK.first, QK.second, QK.dim)


@triton.jit
def dq_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    k_desc0,  # as in forward_kernel
    k_desc1,
    v_desc0,
    v_desc1,
    dout,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    delta,  # Stat
    dq,  # Strided [B, Hq, S, D]
    tables,  # from here on as in forward_kernel
    order,
    score_mod,
    score_grad,  # Closure of the gradient of score_mod, with the gradients of its captures
    origin,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    QK: tl.constexpr,
    VO: tl.constexpr,
    Q_LAYOUT: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    RULE: tl.constexpr,
    FLIP: tl.constexpr,
    ADD: tl.constexpr,  # dq += instead of dq =
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,  # Channels of dq that this launch computes
):
    """dQ of a tile of queries, and the gradients of the captures of score_mod."""
    BLOCK_M: tl.constexpr = Q_LAYOUT.TILE
    BLOCK_N: tl.constexpr = KV_LAYOUT.TILE
    EVEN: tl.constexpr = KV_LAYOUT.BLOCK % BLOCK_N == 0
    keys = Stream(k, k_desc0, k_desc1)
    values = Stream(v, v_desc0, v_desc1)

    i_b = tl.program_id(2)
    i_tile, i_h, _ = locate_program(order, i_b, None, Q_LAYOUT.TILES, True)
    i_hm = i_h + integer(origin.head)
    tile = locate_tile(tables.q_slots, i_b, i_tile, Q_LAYOUT)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_q = (tile.pos + o_m)[:, None]
    m_m = o_m < tile.n
    queries = Queries(i_b + integer(origin.batch), i_hm, o_q, m_m)

    i_hkv = i_h // GROUP
    rows = head_rows(i_b, i_h, tile, o_m)
    b_q = load_pieces(q, rows, QK)  # [M, D]
    b_do = load_pieces(dout, rows, VO)  # [M, E]
    b_dq = zeros_pieces(BLOCK_M, SUM, accumulator_dtype(q.ptr.dtype.element_ty))  # [M, D]
    b_lse = load_lse(lse, rows, m_m, score_mod)[:, None]
    b_delta = load_stat(delta, rows, m_m)[:, None]
    b_bounds = row_intervals(tables.interval, rows, i_hm, m_m)

    begin, mid, end = row_runs(tables.rows, i_b, i_hm, i_tile // Q_LAYOUT.TILES)
    # disable_licm: the compiler would keep what tiles share in registers (sm_100, 128 channels, mask_mod: 224
    # bytes spilled).
    for FULL in tl.static_range(0 if RULE.MASKED else 1, 2):  # masked blocks, then full ones
        for i_run in tl.range(mid if FULL else begin, end if FULL else mid, disable_licm=True):
            CHECK: tl.constexpr = not EVEN if FULL else RULE.RAGGED
            tiles = run_tiles(tables.rows, i_run, tile, tables.kv_slots, BLOCK_M, KV_LAYOUT, FULL)
            for i_t in tl.range(tiles.begin, tiles.end, disable_licm=True):
                kv = locate_tile(tables.kv_slots, i_b, skip_cut(tiles, i_t), KV_LAYOUT)
                kv_rows = head_rows(i_b, i_hkv, kv, o_n)
                o_kv = (kv.pos + o_n)[None, :]
                m_in = row_mask(o_n, kv.n, CHECK)[None, :]
                b_k = stream_pieces(keys, kv_rows, QK, CHECK)  # [N, D]
                b_s = dot_nt(b_q, b_k, PRECISION, FLIP)  # S = Q K^T [M, N]
                b_pre, b_s = to_log2(b_s, queries, o_kv, score_mod, SCALE)
                if not FULL:
                    m_in = visible_keys(tables, queries, b_bounds, kv, o_n, tiles.kind, RULE, False)
                b_p = probabilities(b_s, b_lse)  # P = exp(S' - lse) [M, N]
                if not FULL or not EVEN:
                    b_p = tl.where(m_in, b_p, 0.0)
                b_v = stream_pieces(values, kv_rows, VO, CHECK)  # [N, E]
                b_ds = b_p * (dot_nt(b_do, b_v, PRECISION, FLIP) - b_delta)  # dS' = P (dO V^T - delta) [M, N]
                m_q = m_m[:, None]
                b_ds = score_gradients(b_ds, b_pre, queries, o_kv, m_in, m_q, score_mod, score_grad)
                b_dq = add_dot(b_dq, b_ds, select_pieces(b_k, SUM), PRECISION)  # dQ += dS K [M, D]

    store_pieces(dq, rows, scale_pieces(b_dq, SCALE), SUM, ADD)


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
    tables,  # with rows over KV slots: runs of Q slots
    order,
    score_mod,
    score_grad,  # with the gradients of captures where dQ is computed here
    origin,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,  # programs that share the query heads of a KV head
    QK: tl.constexpr,
    VO: tl.constexpr,
    Q_LAYOUT: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    RULE: tl.constexpr,
    FLIP: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,  # Channels of dk that this launch computes
    RESULTS: tl.constexpr,  # "dk dv"; "dk"; or "dv", of the channels VO
):
    """dK and dV of a tile of keys of a KV head, or one of them; with ``dq`` also the addends to dQ of these
    keys."""
    BLOCK_M: tl.constexpr = Q_LAYOUT.TILE
    BLOCK_N: tl.constexpr = KV_LAYOUT.TILE
    HEADS: tl.constexpr = GROUP // SPLIT
    EVEN: tl.constexpr = Q_LAYOUT.BLOCK % BLOCK_M == 0
    ACC: tl.constexpr = accumulator_dtype(q.ptr.dtype.element_ty)
    query_rows = Stream(q, q_desc0, q_desc1)
    output_grads = Stream(dout, dout_desc0, dout_desc1)
    query_grads = Stream(dq, dq_desc0, dq_desc1)

    i_b = tl.program_id(2)
    # i_part: KV head * SPLIT + part of its query heads
    i_tile, i_part, _ = locate_program(order, i_b, None, KV_LAYOUT.TILES, False)
    kv = locate_tile(tables.kv_slots, i_b, i_tile, KV_LAYOUT)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_kv = (kv.pos + o_n)[:, None]
    m_n = (o_n < kv.n)[:, None]

    i_hkv = i_part // SPLIT
    kv_rows = head_rows(i_b, i_hkv, kv, o_n)
    b_k = load_pieces(k, kv_rows, QK)  # [N, D]
    if RESULTS != "dv":
        b_v = load_pieces(v, kv_rows, VO)  # [N, E]
        b_dk = zeros_pieces(BLOCK_N, SUM, ACC)  # [N, D]
    if RESULTS != "dk":
        b_dv = zeros_pieces(BLOCK_N, VO, ACC)  # [N, E]

    # disable_licm: as in dq_kernel (dK/dV, sm_100, 256 channels: 512 bytes spilled).
    for FULL in tl.static_range(0 if RULE.MASKED else 1, 2):  # masked blocks, then full ones
        # A window's tiles are the same for every head: one loop over heads and tiles.
        for i_g in range(1 if tables.rows.runs is None else HEADS):
            i_h = i_part * HEADS + i_g
            begin, mid, end = row_runs(
                tables.rows, i_b, i_h + integer(origin.head), i_tile // KV_LAYOUT.TILES
            )
            for i_run in tl.range(mid if FULL else begin, end if FULL else mid, disable_licm=True):
                CHECK: tl.constexpr = not EVEN if FULL else RULE.RAGGED
                tiles = run_tiles(tables.rows, i_run, kv, tables.q_slots, BLOCK_N, Q_LAYOUT, FULL)
                i_t = tiles.begin
                n_t = tiles.end - tiles.begin
                for _ in tl.range(0, n_t * HEADS if tables.rows.runs is None else n_t, disable_licm=True):
                    i_hm = i_h + integer(origin.head)
                    tile = locate_tile(tables.q_slots, i_b, skip_cut(tiles, i_t), Q_LAYOUT)
                    rows = head_rows(i_b, i_h, tile, o_m)
                    o_q = (tile.pos + o_m)[None, :]
                    m_m = row_mask(o_m, tile.n, CHECK)
                    queries = Queries(i_b + integer(origin.batch), i_hm, o_q, m_m)
                    b_q = stream_pieces(query_rows, rows, QK, CHECK)  # [M, D]
                    b_s = dot_nt(b_k, b_q, PRECISION, FLIP)  # S^T = K Q^T [N, M]
                    b_lse = load_lse(lse, rows, m_m, score_mod, CHECK)[None, :]
                    b_pre, b_s = to_log2(b_s, queries, o_kv, score_mod, SCALE)
                    b_p = probabilities(b_s, b_lse)  # P^T = exp(S'^T - lse) [N, M]
                    m_in = m_m[None, :]
                    if not FULL:
                        b_bounds = row_intervals(tables.interval, rows, i_hm, m_m)
                        m_in = visible_queries(tables, queries, b_bounds, tile, o_m, o_kv, tiles.kind, RULE)
                    if not FULL or not EVEN:
                        b_p = tl.where(m_in, b_p, 0.0)
                    b_do = stream_pieces(output_grads, rows, VO, CHECK)  # [M, E]
                    if RESULTS != "dk":
                        b_dv = add_dot(b_dv, b_p, b_do, PRECISION)  # dV += P^T dO [N, E]
                    if RESULTS != "dv":
                        b_dp = dot_nt(b_v, b_do, PRECISION, FLIP)  # dP^T = V dO^T [N, M]
                        b_delta = load_stat(delta, rows, m_m, CHECK)[None, :]
                        b_ds = b_p * (b_dp - b_delta)  # dS'^T [N, M]
                        b_ds = score_gradients(b_ds, b_pre, queries, o_kv, m_in, m_n, score_mod, score_grad)
                        b_dk = add_dot(b_dk, b_ds, select_pieces(b_q, SUM), PRECISION)  # dK += dS^T Q [N, D]
                    if dq.ptr is not None:
                        if not FULL or KV_LAYOUT.BLOCK % BLOCK_N != 0:  # keys past the slot would add to dQ
                            b_ds = tl.where(m_n, b_ds, 0.0)
                        add_query_gradients(query_grads, rows, b_ds, b_k, SCALE, QK, PRECISION)
                    i_t += 1
                    if tables.rows.runs is None:
                        i_h += tl.where(i_t == tiles.end, 1, 0)
                        i_t = tl.where(i_t == tiles.end, tiles.begin, i_t)

    # Again (without: 24 bytes spilled on sm_80, 128 channels).
    kv = locate_tile(tables.kv_slots, i_b, i_tile, KV_LAYOUT, True)
    kv_rows = head_rows(i_b, i_part, kv, o_n)
    if RESULTS != "dv":
        store_pieces(dk, kv_rows, scale_pieces(b_dk, SCALE), SUM, ADD)
    if RESULTS != "dk":
        store_pieces(dv, kv_rows, b_dv, VO, ADD)
