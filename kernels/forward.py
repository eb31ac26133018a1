"""Forward: one step of attention, local Q slots against the slots of one KV buffer.

Of each row m, the largest score so far, l and acc are kept over the tiles of keys (FlashAttention-2, arXiv
2307.08691, algorithm 1, in log2 units): m' = max(m, max_j S_j), P_j = exp2(S_j - m'), r = exp2(m - m'),
l' = l r + sum_j P_j, acc' = acc r + P V; at the end O = acc / l and lse = m + log2(l).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritoncp.kernels.opaque_integers import integer
from tritoncp.kernels.program_order import locate_program
from tritoncp.kernels.scores import (
    LOG2E,
    Queries,
    add_dot,
    dot_nt,
    inverse_sum,
    keep_pairs,
    modify_scores,
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
    locate_tile,
    row_runs,
    run_tiles,
    share_row,
    share_run,
    skip_cut,
    tile_rows,
)
from tritoncp.kernels.tiles import (
    HeadRows,
    Stream,
    accumulator_dtype,
    head_pointer,
    head_rows,
    is_last,
    load_pieces,
    load_stat,
    row_pointers,
    stat_pointers,
    store_pieces,
    stream_pieces,
)


class Results(NamedTuple):
    """The tensors that a step writes: its state, or out, lse and the largest scores."""

    out: Any
    lse: Any
    max_scores: Any
    state: Any


@triton.jit
def start_state(state, rows, VO: tl.constexpr, ACC: tl.constexpr, LOAD: tl.constexpr):
    """State (m, l, acc) of a tile's rows before the first key, or as stored by the step before."""
    if LOAD:
        m_m = rows.offsets < rows.count
        b_m = load_stat(state.m, rows, m_m, other=-float("inf"))
        return b_m, load_stat(state.l, rows, m_m), load_pieces(state.acc, rows, VO)
    else:
        BLOCK_M: tl.constexpr = rows.offsets.shape[0]
        b_m = tl.full([BLOCK_M], -float("inf"), ACC)
        return b_m, tl.zeros([BLOCK_M], ACC), zeros_pieces(BLOCK_M, VO, ACC)


@triton.jit
def store_results(results, rows, b_m, b_l, b_acc, VO: tl.constexpr, STORE_STATE: tl.constexpr):
    """Store the results of a tile's rows: the state, or out, lse and the largest scores."""
    m_m = rows.offsets < rows.count
    if STORE_STATE:
        if is_last(VO):  # launches for other channels start from the m and l before
            tl.store(stat_pointers(results.state.m, rows), b_m, mask=m_m)
            tl.store(stat_pointers(results.state.l, rows), b_l, mask=m_m)
        store_pieces(results.state.acc, rows, b_acc, VO)
    else:
        store_pieces(results.out, rows, scale_pieces(b_acc, inverse_sum(b_l)[:, None]), VO)
        tl.store(stat_pointers(results.lse, rows), row_lse(b_m, b_l), mask=m_m)
        if results.max_scores.ptr is not None:
            tl.store(stat_pointers(results.max_scores, rows), row_max(b_m, b_l), mask=m_m)


@triton.jit
def hide_keys(b_s, tables, queries, b_bounds, kv, o_n, kind, RULE: tl.constexpr):
    """Scores of a tile of a masked block, -inf where the pair is hidden.  The branch keeps the compiler from
    evaluating the mask_mod before the product (without: 8 bytes spilled on sm_80, 64 channels).
    """
    if tables.mask_mod.fn is not None:
        m_in = row_mask(o_n, kv.n, RULE.RAGGED)[None, :]
        if kind != BOUNDED_KIND:
            b_s = tl.where(keep_pairs(tables.mask_mod, queries, (kv.pos + o_n)[None, :]), b_s, -float("inf"))
    else:
        m_in = visible_keys(tables, queries, b_bounds, kv, o_n, kind, RULE)
    return tl.where(m_in, b_s, -float("inf"))


@triton.jit(do_not_specialize=["splits"])
def forward_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    k_desc0,  # tensor descriptors of k and v, tiles of [BLOCK_N, piece of channels], or None: Triton's
    k_desc1,  # launcher finds none inside a tuple
    v_desc0,
    v_desc1,
    out,  # Strided [B, Hq, S, E]
    lse,  # Stat [B, Hq, S], natural log
    max_scores,  # Stat, largest score after scale and score_mod
    state,  # State
    tables,  # StepTables
    order,  # ProgramOrder
    splits,  # programs that share a row's keys, each with a head of its own in the state; None: one
    score_mod,  # Closure
    origin,  # Origin
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PACK: tl.constexpr,  # query heads in a tile
    BLOCK_M: tl.constexpr,  # rows of a tile, of all its heads
    QK: tl.constexpr,  # Channels of q and k
    VO: tl.constexpr,  # Channels of v and out that this launch computes
    Q_LAYOUT: tl.constexpr,  # SideLayout
    KV_LAYOUT: tl.constexpr,
    RULE: tl.constexpr,  # MaskRule
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPECIALIZE: tl.constexpr,  # by warps: some copy, one multiplies, others compute
):
    """Attend a tile of queries, of one head or of PACK heads, to the keys that it sees."""
    BLOCK_N: tl.constexpr = KV_LAYOUT.TILE
    tl.static_assert(BLOCK_M >= 16 and BLOCK_N >= 16)
    # Only copies by descriptor are left to warps of their own.
    tl.static_assert(not SPECIALIZE or k_desc0 is not None)
    EVEN: tl.constexpr = KV_LAYOUT.BLOCK % BLOCK_N == 0
    # exp2(s * C - m): units, and without a score_mod a positive scale, cost no instruction of their own.
    FOLD: tl.constexpr = (score_mod.fn is None) and (SCALE > 0)
    C: tl.constexpr = SCALE * LOG2E if FOLD else LOG2E
    keys = Stream(k, k_desc0, k_desc1)
    values = Stream(v, v_desc0, v_desc1)

    i_b = tl.program_id(2)
    i_tile, i_y, i_split = locate_program(order, i_b, splits, Q_LAYOUT.TILES, True)
    tile = locate_tile(tables.q_slots, i_b, i_tile, Q_LAYOUT)
    i_hkv, i_h, o_m = tile_rows(i_y, tile.n, BLOCK_M, GROUP, PACK)
    # With PACK > 1 each row has a head of its own, and all heads share one table.
    i_hc = i_h if PACK == 1 else i_h[:, None]
    i_ht = i_h + integer(origin.head) if PACK == 1 else i_hkv
    o_n = tl.arange(0, BLOCK_N)
    o_q = (tile.pos + o_m)[:, None]
    m_m = o_m < tile.n
    queries = Queries(i_b + integer(origin.batch), i_hc + integer(origin.head), o_q, m_m)
    rows = HeadRows(i_b, i_h, i_hc, tile.row, o_m, tile.n)
    b_q = load_pieces(q, rows, QK)  # [M, D]
    b_bounds = row_intervals(tables.interval, rows, i_ht, m_m)
    b_m, b_l, b_acc = start_state(state, rows, VO, accumulator_dtype(q.ptr.dtype.element_ty), LOAD_STATE)

    begin, mid, end = row_runs(tables.rows, i_b, i_ht, i_tile // Q_LAYOUT.TILES)
    share = share_row(
        tables.rows, begin, end, tile, tables.kv_slots, i_split, splits, Q_LAYOUT.TILE, KV_LAYOUT
    )
    # disable_licm: the compiler would keep what tiles share in registers (sm_100, 256 channels: 72 bytes
    # spilled).
    for FULL in tl.static_range(0 if RULE.MASKED else 1, 2):  # masked blocks, then full ones
        for i_run in range(mid if FULL else begin, end if FULL else mid):
            CHECK: tl.constexpr = not EVEN if FULL else RULE.RAGGED
            tiles = run_tiles(tables.rows, i_run, tile, tables.kv_slots, Q_LAYOUT.TILE, KV_LAYOUT, FULL)
            tiles, share = share_run(tiles, share, splits)
            for i_t in tl.range(tiles.begin, tiles.end, disable_licm=True, warp_specialize=SPECIALIZE):
                kv = locate_tile(tables.kv_slots, i_b, skip_cut(tiles, i_t), KV_LAYOUT)
                kv_rows = head_rows(i_b, i_hkv, kv, o_n)
                b_k = stream_pieces(keys, kv_rows, QK, CHECK)  # [N, D]
                b_s = dot_nt(b_q, b_k, PRECISION)  # S = Q K^T [M, N]
                if score_mod.fn is not None:
                    b_s = modify_scores(b_s, queries, (kv.pos + o_n)[None, :], score_mod, SCALE)
                elif not FOLD:
                    b_s = b_s * SCALE
                if not FULL:
                    b_s = hide_keys(b_s, tables, queries, b_bounds, kv, o_n, tiles.kind, RULE)
                elif not EVEN:
                    b_s = tl.where(row_mask(o_n, kv.n, CHECK)[None, :], b_s, -float("inf"))
                # P = exp2(S - m') [M, N] and r = exp2(m - m') [M] with the new maximum m'; acc' = acc r + P V
                b_p, b_r, b_m, b_l = online_softmax(b_s, b_m, b_l, C, not FULL or score_mod.fn is not None)
                b_v = stream_pieces(values, kv_rows, VO, CHECK)  # [N, E]
                b_acc = add_dot(scale_pieces(b_acc, b_r[:, None]), b_p, b_v, PRECISION)

    # Again (without: 64 bytes spilled on sm_80, 192 channels).
    tile = locate_tile(tables.q_slots, i_b, i_tile, Q_LAYOUT, True)
    if splits is not None:
        i_h = i_h * splits + i_split
        i_hc = i_hc * splits + i_split
    rows = HeadRows(i_b, i_h, i_hc, tile.row, o_m, tile.n)
    store_results(Results(out, lse, max_scores, state), rows, b_m, b_l, b_acc, VO, STORE_STATE)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    parts,  # State, tensors [B, Hq * splits, S, ...]: states of the programs that share a row's keys
    splits,
    out,  # from here on as in forward_kernel
    lse,
    max_scores,
    state,
    q_slots,  # Slots
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,  # a power of two from E on
    PARTS: tl.constexpr,  # states loaded at a time
    Q_LAYOUT: tl.constexpr,  # tiles of one row
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
):
    """Combine the partial states of one row of one head, and the state before this step, into out or a state;
    always in the same order."""
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    row, _, n_m = locate_tile(q_slots, i_b, tl.program_id(0), Q_LAYOUT)
    if n_m <= 0:  # no slot covers this row
        return
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < E
    if LOAD_STATE:
        b_m = tl.load(head_pointer(state.m, i_b, i_h) + row)
        b_l = tl.load(head_pointer(state.l, i_b, i_h) + row)
        b_acc = tl.load(row_pointers(state.acc, i_b, i_h, row, o_e), mask=m_e, other=0.0)  # [E]
    else:
        ACC: tl.constexpr = parts.acc.ptr.dtype.element_ty
        b_m = tl.full([], -float("inf"), ACC)
        b_l = tl.zeros([], ACC)
        b_acc = tl.zeros([BLOCK_E], ACC)
    for i_part in range(0, splits, PARTS):
        o_p = i_part + tl.arange(0, PARTS)
        m_p = o_p < splits
        i_hp = i_h * splits + o_p
        b_mp = tl.load(head_pointer(parts.m, i_b, i_hp) + row, mask=m_p, other=-float("inf"))  # [P]
        b_lp = tl.load(head_pointer(parts.l, i_b, i_hp) + row, mask=m_p, other=0.0)
        p_ap = row_pointers(parts.acc, i_b, i_hp[:, None], row, o_e[None, :])
        b_ap = tl.load(p_ap, mask=m_p[:, None] & m_e[None, :], other=0.0)  # [P, E]
        b_max = tl.maximum(b_m, tl.max(b_mp, 0))
        b_safe = tl.where(b_max == -float("inf"), 0.0, b_max)
        b_r = tl.exp2(b_m - b_safe)
        b_w = tl.exp2(b_mp - b_safe)
        b_l = b_l * b_r + tl.sum(b_lp * b_w, 0)
        b_acc = b_acc * b_r + tl.sum(b_ap * b_w[:, None], 0)
        b_m = b_max
    if STORE_STATE:
        tl.store(head_pointer(state.m, i_b, i_h) + row, b_m)
        tl.store(head_pointer(state.l, i_b, i_h) + row, b_l)
        tl.store(row_pointers(state.acc, i_b, i_h, row, o_e), b_acc, mask=m_e)
    else:
        b_out = (b_acc * inverse_sum(b_l)).to(out.ptr.dtype.element_ty)
        tl.store(row_pointers(out, i_b, i_h, row, o_e), b_out, mask=m_e)
        tl.store(head_pointer(lse, i_b, i_h) + row, row_lse(b_m, b_l))
        if max_scores.ptr is not None:
            tl.store(head_pointer(max_scores, i_b, i_h) + row, row_max(b_m, b_l))
