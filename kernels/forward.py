"""Forward: one step of attention, local Q slots against the slots of one KV buffer.

Of each row m, the largest score so far, l and acc are kept over the tiles of keys (FlashAttention-2, arXiv
2307.08691, algorithm 1, in log2 units): m' = max(m, max_j S_j), P_j = exp2(S_j - m'), r = exp2(m - m'),
l' = l r + sum_j P_j, acc' = acc r + P V; at the end O = acc / l and lse = m + log2(l).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritoncp.kernels.launch import State
from tritoncp.kernels.program_order import locate_program
from tritoncp.kernels.scores import (
    LOG2E,
    Head,
    MaskRule,
    Pairs,
    Queries,
    add_dot,
    dot_nt,
    inverse_sum,
    modified_scores,
    online_softmax,
    row_intervals,
    row_lse,
    row_mask,
    row_max,
    scale_pieces,
    visible_keys,
    zeros_pieces,
)
from tritoncp.kernels.tile_runs import (
    BOUNDED_KIND,
    SideLayout,
    locate_tile,
    row_runs,
    run_tiles,
    share_row,
    share_run,
    skip_cut,
    tile_rows,
)
from tritoncp.kernels.tiles import (
    Stream,
    channels_of,
    load_pieces,
    row_pointers,
    stat_pointers,
    store_pieces,
    stream_pieces,
)


class Results(NamedTuple):
    """The tensors that a step writes: its state, or out, lse and the largest scores."""

    out: Any
    state: Any
    lse: Any
    max_scores: Any


@triton.jit
def start_state(
    state,
    i_b,
    i_h,  # one, or one for each row
    i_hc,  # the same as a column
    row,
    o_m,
    n_m,
    VO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LOAD: tl.constexpr,
    ACC: tl.constexpr,
):
    """State of a tile's rows before the first key, or as stored by the step before."""
    if LOAD:
        m_m = o_m < n_m
        b_m = tl.load(stat_pointers(state.m, i_b, i_h, row) + o_m, mask=m_m, other=-float("inf"))
        b_l = tl.load(stat_pointers(state.l, i_b, i_h, row) + o_m, mask=m_m, other=0.0)
        return b_m, b_l, load_pieces(state.acc, i_b, i_hc, row, o_m, n_m, VO)
    else:
        b_m = tl.full([BLOCK_M], -float("inf"), ACC)
        return b_m, tl.zeros([BLOCK_M], ACC), zeros_pieces(BLOCK_M, VO, ACC)


@triton.jit
def store_results(
    results,
    i_b,
    i_h,  # one, or one for each row
    i_hc,  # the same as a column
    row,
    o_m,
    n_m,
    b_acc,
    b_m,
    b_l,
    VO: tl.constexpr,
    STORE_STATE: tl.constexpr,
    STORE_MAX: tl.constexpr,
):
    """Store the results of a tile's rows: the state, or out, lse and the largest scores."""
    m_m = o_m < n_m
    if STORE_STATE:
        tl.store(stat_pointers(results.state.m, i_b, i_h, row) + o_m, b_m, mask=m_m)
        tl.store(stat_pointers(results.state.l, i_b, i_h, row) + o_m, b_l, mask=m_m)
        store_pieces(results.state.acc, i_b, i_hc, row, o_m, n_m, b_acc, VO)
    else:
        b_out = scale_pieces(b_acc, inverse_sum(b_l)[:, None])
        store_pieces(results.out, i_b, i_hc, row, o_m, n_m, b_out, VO)
        tl.store(stat_pointers(results.lse, i_b, i_h, row) + o_m, row_lse(b_m, b_l), mask=m_m)
        if STORE_MAX:
            tl.store(stat_pointers(results.max_scores, i_b, i_h, row) + o_m, row_max(b_m, b_l), mask=m_m)


@triton.jit
def hide_keys(b_s, head, queries, kv, o_n, rows, kind, caps, RULE: tl.constexpr):
    """Scores of a tile of a masked block, -inf where the pair is hidden.  The branch keeps the compiler from
    evaluating the mask_mod before the product (without: 8 bytes spilled on sm_80, 64 channels).
    """
    if RULE.MASK == "mod" and not RULE.WINDOW:
        m_in = row_mask(o_n, kv.n, RULE.RAGGED)[None, :]
        if kind != BOUNDED_KIND:
            m_keep = RULE.MASK_MOD(head.b, head.h, queries.o, (kv.pos + o_n)[None, :], caps)
            b_s = tl.where(m_keep, b_s, -float("inf"))
    else:
        m_in = visible_keys(head, queries, kv, o_n, rows, kind, caps, RULE)
    return tl.where(m_in, b_s, -float("inf"))


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
    order,  # ProgramOrder
    interval,  # Interval
    mask_caps,
    score_caps,
    i_b0,  # offsets that make b and h global for the mods
    i_h0,
    splits,  # programs that share a row's keys, each with a head of its own in the state; None: one
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PACK: tl.constexpr,  # query heads in a tile
    D: tl.constexpr,
    E: tl.constexpr,
    WIDEST: tl.constexpr,  # piece of channels
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
    RAGGED: tl.constexpr,  # masked blocks may have fewer keys in a tile than BLOCK_N
    BOUNDED: tl.constexpr,
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    STORE_MAX: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,  # float32, float64 for float64 inputs
):
    tl.static_assert(BLOCK_M >= 16 and BLOCK_N >= 16)
    ROWS: tl.constexpr = BLOCK_M // PACK  # of one head
    Q_TILES: tl.constexpr = (Q_BLOCK + ROWS - 1) // ROWS
    Q_LAYOUT: tl.constexpr = SideLayout(Q_BLOCK, ROWS, DENSE_Q)
    KV_LAYOUT: tl.constexpr = SideLayout(KV_BLOCK, BLOCK_N, DENSE_KV)
    i_b = tl.program_id(2)
    i_tile, i_y, i_split = locate_program(order, i_b, splits, Q_TILES, True)
    EVEN: tl.constexpr = KV_BLOCK % BLOCK_N == 0
    QK: tl.constexpr = channels_of(D, WIDEST)
    VO: tl.constexpr = channels_of(E, WIDEST)
    RULE: tl.constexpr = MaskRule(WINDOW, MASK, MASK_MOD, BOUNDED, RAGGED)
    # exp2(s * C - m): units, and without a score_mod a positive scale, cost no instruction of their own.
    FOLD: tl.constexpr = (SCORE_MOD is None) and (SCALE > 0)
    C: tl.constexpr = SCALE * LOG2E if FOLD else LOG2E

    row, pos, n_m = locate_tile(q_slots, i_b, i_tile, Q_LAYOUT)
    i_hkv, i_h, o_m = tile_rows(i_y, n_m, BLOCK_M, GROUP, PACK)
    if PACK == 1:
        i_hc = i_h
        i_ht = i_h + i_h0
    else:  # heads of the rows; of their tables there is one for all heads
        i_hc = i_h[:, None]
        i_ht = i_hkv
    head = Head(i_b + i_b0, i_hc + i_h0)
    o_n = tl.arange(0, BLOCK_N)
    o_q = (pos + o_m)[:, None]
    m_m = o_m < n_m

    keys = Stream(k, k_desc0, k_desc1)
    values = Stream(v, v_desc0, v_desc1)
    b_q = load_pieces(q, i_b, i_hc, row, o_m, n_m, QK)  # [M, D]
    b_lo, b_hi = row_intervals(interval, i_b, i_ht, row, o_m, m_m, MASK)
    queries = Queries(o_q, m_m, b_lo, b_hi)
    b_m, b_l, b_acc = start_state(
        State(acc, stat_m, stat_l), i_b, i_h, i_hc, row, o_m, n_m, VO, BLOCK_M, LOAD_STATE, ACC
    )

    begin, mid, end = row_runs(rows, i_b, i_ht, i_tile // Q_TILES, WINDOW)
    if splits is not None:
        pos_end = pos + tl.minimum(n_m, ROWS)
        share = share_row(rows, begin, end, pos, pos_end, kv_slots, splits, i_split, KV_LAYOUT, WINDOW)
    # disable_licm: the compiler would keep what tiles share in registers (sm_100, 256 channels: 72 bytes
    # spilled).
    for FULL in tl.static_range(0 if HAS_MASKED else 1, 2):  # masked blocks, then full ones
        for i_run in range(mid if FULL else begin, end if FULL else mid):
            CHECK: tl.constexpr = not EVEN if FULL else RAGGED
            pos_end = pos + tl.minimum(n_m, ROWS)
            tiles = run_tiles(rows, i_run, pos, pos_end, kv_slots, KV_LAYOUT, WINDOW, FULL)
            if splits is not None:
                tiles, share = share_run(tiles, share)
            for i_t in tl.range(tiles.begin, tiles.end, disable_licm=True):
                kv = locate_tile(kv_slots, i_b, skip_cut(tiles, i_t), KV_LAYOUT)
                b_k = stream_pieces(keys, i_b, i_hkv, kv, o_n, QK, CHECK)  # [N, D]
                b_s = dot_nt(b_q, b_k, PRECISION)  # [M, N]
                if SCORE_MOD is not None:
                    pairs = Pairs(o_q, (kv.pos + o_n)[None, :])
                    b_s = modified_scores(b_s, head, pairs, score_caps, SCALE, SCORE_MOD)
                elif not FOLD:
                    b_s = b_s * SCALE
                if not FULL:
                    b_s = hide_keys(b_s, head, queries, kv, o_n, rows, tiles.kind, mask_caps, RULE)
                elif not EVEN:
                    b_s = tl.where(row_mask(o_n, kv.n, CHECK)[None, :], b_s, -float("inf"))
                b_p, b_r, b_m, b_l = online_softmax(b_s, b_m, b_l, C, not FULL or SCORE_MOD is not None)
                b_v = stream_pieces(values, i_b, i_hkv, kv, o_n, VO, CHECK)  # [N, E]
                b_acc = add_dot(scale_pieces(b_acc, b_r[:, None]), b_p, b_v, PRECISION)

    # Load again (without: 64 bytes spilled on sm_80, 192 channels).
    row, _, n_m = locate_tile(q_slots, i_b, i_tile, Q_LAYOUT, True)
    if splits is not None:
        i_h = i_h * splits + i_split
        i_hc = i_hc * splits + i_split
    results = Results(out, State(acc, stat_m, stat_l), lse, max_scores)
    store_results(results, i_b, i_h, i_hc, row, o_m, n_m, b_acc, b_m, b_l, VO, STORE_STATE, STORE_MAX)


@triton.jit
def combine_kernel(
    parts_acc,  # Strided [B, Hq * splits, S, E]: states of the programs that share a row's keys
    parts_m,  # Stat
    parts_l,
    splits,
    out,  # from here on as in forward_kernel
    acc,
    stat_m,
    stat_l,
    lse,
    max_scores,
    q_slots,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,  # a power of two from E on
    PARTS: tl.constexpr,  # states loaded at a time
    Q_BLOCK: tl.constexpr,
    DENSE_Q: tl.constexpr,
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    STORE_MAX: tl.constexpr,
    ACC: tl.constexpr,
):
    """Combine the partial states of one row of one head, and the state before this step, into out or a state;
    always in the same order."""
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    ROWS: tl.constexpr = SideLayout(Q_BLOCK, 1, DENSE_Q)
    row, _, n_m = locate_tile(q_slots, i_b, tl.program_id(0), ROWS)
    if n_m <= 0:  # no slot covers this row
        return
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < E
    if LOAD_STATE:
        b_m = tl.load(stat_pointers(stat_m, i_b, i_h, row))
        b_l = tl.load(stat_pointers(stat_l, i_b, i_h, row))
        b_acc = tl.load(row_pointers(acc, i_b, i_h, row, o_e), mask=m_e, other=0.0)  # [E]
    else:
        b_m = tl.full([], -float("inf"), ACC)
        b_l = tl.zeros([], ACC)
        b_acc = tl.zeros([BLOCK_E], ACC)
    for i_part in range(0, splits, PARTS):
        o_p = i_part + tl.arange(0, PARTS)
        m_p = o_p < splits
        i_hp = i_h * splits + o_p
        b_mp = tl.load(stat_pointers(parts_m, i_b, i_hp, row), mask=m_p, other=-float("inf"))  # [P]
        b_lp = tl.load(stat_pointers(parts_l, i_b, i_hp, row), mask=m_p, other=0.0)
        p_ap = row_pointers(parts_acc, i_b, i_hp[:, None], row, o_e[None, :])
        b_ap = tl.load(p_ap, mask=m_p[:, None] & m_e[None, :], other=0.0)  # [P, E]
        b_max = tl.maximum(b_m, tl.max(b_mp, 0))
        b_safe = tl.where(b_max == -float("inf"), 0.0, b_max)
        b_r = tl.exp2(b_m - b_safe)
        b_w = tl.exp2(b_mp - b_safe)
        b_l = b_l * b_r + tl.sum(b_lp * b_w, 0)
        b_acc = b_acc * b_r + tl.sum(b_ap * b_w[:, None], 0)
        b_m = b_max
    if STORE_STATE:
        tl.store(stat_pointers(stat_m, i_b, i_h, row), b_m)
        tl.store(stat_pointers(stat_l, i_b, i_h, row), b_l)
        tl.store(row_pointers(acc, i_b, i_h, row, o_e), b_acc, mask=m_e)
    else:
        b_out = (b_acc * inverse_sum(b_l)).to(out.ptr.dtype.element_ty)
        tl.store(row_pointers(out, i_b, i_h, row, o_e), b_out, mask=m_e)
        tl.store(stat_pointers(lse, i_b, i_h, row), row_lse(b_m, b_l))
        if STORE_MAX:
            tl.store(stat_pointers(max_scores, i_b, i_h, row), row_max(b_m, b_l))
