"""Forward route "specialised": warp specialisation by the compiler (``tl.range(warp_specialize=True)``).

sm_90: one group of warps copies tiles, two groups of four warps compute.  Triton 3.7 specialises only kernels
of four warps and 128 query rows, whose tiles are all loaded by descriptors made on the device, in one counted
loop without a branch.  So masked blocks are a separate launch, which stores its state; ``specialised_kernel``
starts from that state and computes full blocks, at most two runs of them a row.
sm_100: two warps copy, one multiplies, four compute the softmax and four rescale the accumulator.  The
compiler specialises the loop of ``forward_kernel`` with its masks, so one launch suffices and only
:func:`launch` and :func:`obstacles` of this module are used.
Unverified on GPUs. Triton has miscompiled specialised loops (triton#8311) and kernels of four warps
(fla#988), so the route runs only on request or by a measured entry.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritoncp.kernels.forward import Results, add_values, start_state, store_results
from tritoncp.kernels.launch import Launch, Launches, State
from tritoncp.kernels.program_order import locate_program
from tritoncp.kernels.scores import LOG2E, dot_nt, online_softmax, to_log2
from tritoncp.kernels.tile_rules import architecture, merges, pieces, specialises, tile_obstacles
from tritoncp.kernels.tile_runs import RunTiles, locate_tile, row_runs, run_tiles, skip_cut
from tritoncp.kernels.tiles import copyable, head_pointer, piece

STATE_SHARE = 0.03  # largest share of a step's time that a state between two launches may take
COPY = 4.3e12  # bytes a second that an H200 copies
COMPUTE = 520e12  # predicted FLOPs a second of the loop over full blocks on an H200


def state_share(keys: float, d: int, e: int) -> float:
    """Return the time to write and read a float32 accumulator [S, e], relative to the time of attention to
    ``keys`` keys a row.

    >>> f"{state_share(8192, 128, 128):.3f}"  # 16K causal
    '0.030'
    """
    return (2 * 4 * e / COPY) / max(2 * (d + e) * keys / COMPUTE, 1e-30)


def device_copyable(x: Tensor) -> bool:
    """Whether the tiles of one head of x [B, H, S, D] can be copied by a descriptor that a kernel makes."""
    return copyable(x) and x.stride(2) * x.element_size() % 16 == 0


def launch_with_allocator(kernel: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Launch a kernel that makes descriptors, for which Triton's allocator provides memory.

    The allocator is a context variable, which autograd's threads lack. It is set in a copy of the context, so
    that an allocator of the user stays in place.
    """

    def launch() -> Any:
        triton.set_allocator(_allocate)
        return kernel(*args, **named)

    return copy_context().run(launch)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate memory by torch: aligned to 512 bytes, and reused only by later work on this stream."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@triton.jit
def tile_descriptors(x, i_b, i_h, n_s, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Make descriptors of one head's tiles of ROWS rows, one for each piece of channels."""
    W0: tl.constexpr = piece(DIM, 0)
    W1: tl.constexpr = piece(DIM, 1)
    p_x = head_pointer(x, i_b, i_h)
    desc0 = tl.make_tensor_descriptor(p_x, [n_s, DIM], [x.stride_s, 1], [ROWS, W0])
    if W1 > 0:
        shape = [n_s, DIM - W0]
        return desc0, tl.make_tensor_descriptor(p_x + W0, shape, [x.stride_s, 1], [ROWS, W1])
    else:
        return (desc0,)


@triton.jit
def load_tile(descs, row):
    """Load the tile that starts at ``row``, a block for each piece of channels."""
    if len(descs) > 1:
        return descs[0].load([row, 0]), descs[1].load([row, 0])
    else:
        return (descs[0].load([row, 0]),)


@triton.jit
def load_stat_tile(x, i_b, i_h, n_s, row, ROWS: tl.constexpr):
    """Load the statistics of a tile's rows by descriptor; the compiler specialises no loop whose state comes
    by pointers."""
    return tl.make_tensor_descriptor(head_pointer(x, i_b, i_h), [n_s], [1], [ROWS]).load([row])


@triton.jit
def full_tiles(
    rows,
    begin,
    end,
    lo,
    hi,
    left,
    right,
    slots,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Tiles of a row's full runs, two at most, as one run."""
    if WINDOW:
        return run_tiles(rows, begin, lo, hi, left, right, slots, BLOCK, TILE, WINDOW, True)
    else:
        TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
        p_run = rows.runs + begin * 3
        one = begin < end
        two = begin + 1 < end
        a_lo = tl.load(p_run, mask=one, other=0) * TILES
        a_hi = tl.load(p_run + 1, mask=one, other=0) * TILES
        b_lo = tl.load(p_run + 3, mask=two, other=0) * TILES
        b_hi = tl.load(p_run + 4, mask=two, other=0) * TILES
        return RunTiles(a_lo, a_hi + (b_hi - b_lo), 0, a_hi, b_lo - a_hi)


@triton.jit
def specialised_kernel(
    q,  # Strided [B, Hq, S, D]
    k,  # Strided [B, Hkv, rows, D]
    v,  # Strided [B, Hkv, rows, E]
    n_q,  # S
    n_kv,  # rows
    from_acc,  # Strided [B, Hq, S, E], float32: the state to start from, and its Stats
    from_m,
    from_l,
    out,  # from here on as in forward_kernel
    acc,
    stat_m,
    stat_l,
    lse,
    max_scores,
    q_slots,
    kv_slots,
    rows,
    order,
    score_caps,
    left,
    right,
    i_b0,
    i_h0,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DENSE_Q: tl.constexpr,
    DENSE_KV: tl.constexpr,
    WINDOW: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    STORE_MAX: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    tl.static_assert(KV_BLOCK % BLOCK_N == 0)
    Q_TILES: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    i_b = tl.program_id(2)
    i_bm = i_b + i_b0
    program = locate_program(order, i_b, None, Q_TILES, True)
    i_tile = program.i_tile
    i_h = program.i_head
    i_hm = i_h + i_h0
    i_hkv = i_h // GROUP
    FOLD: tl.constexpr = (SCORE_MOD is None) and (SCALE > 0)
    C: tl.constexpr = SCALE * LOG2E if FOLD else 1.0

    row, pos, n_m = locate_tile(q_slots, i_b, i_tile, Q_BLOCK, BLOCK_M, DENSE_Q)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)

    keys = tile_descriptors(k, i_b, i_hkv, n_kv, BLOCK_N, D)
    values = tile_descriptors(v, i_b, i_hkv, n_kv, BLOCK_N, E)
    b_q = load_tile(tile_descriptors(q, i_b, i_h, n_q, BLOCK_M, D), row)
    if LOAD_STATE:
        b_m = load_stat_tile(from_m, i_b, i_h, n_q, row, BLOCK_M)
        b_l = load_stat_tile(from_l, i_b, i_h, n_q, row, BLOCK_M)
        b_acc = load_tile(tile_descriptors(from_acc, i_b, i_h, n_q, BLOCK_M, E), row)
    else:
        b_m, b_l, b_acc = start_state(None, i_b, i_h, i_h, row, o_m, n_m, E, BLOCK_M, False, ACC)

    _, begin, end = row_runs(rows, i_b, i_hm, i_tile // Q_TILES, WINDOW)
    pos_end = pos + tl.minimum(n_m, BLOCK_M)
    tiles = full_tiles(rows, begin, end, pos, pos_end, left, right, kv_slots, KV_BLOCK, BLOCK_N, WINDOW)
    for i_t in tl.range(tiles.begin, tiles.end, warp_specialize=True):
        kv = locate_tile(kv_slots, i_b, skip_cut(tiles, i_t), KV_BLOCK, BLOCK_N, DENSE_KV)
        b_s = dot_nt(b_q, load_tile(keys, kv.row), PRECISION)
        if not FOLD:
            o_q = (pos + o_m)[:, None]
            o_kv = (kv.pos + o_n)[None, :]
            _, b_s = to_log2(b_s, i_bm, i_hm, o_q, o_kv, score_caps, SCALE, SCORE_MOD)
        b_p, b_r, b_m, b_l = online_softmax(b_s, b_m, b_l, C, SCORE_MOD is not None)
        b_acc = add_values(b_acc, b_p, b_r, load_tile(values, kv.row), PRECISION)

    results = Results(out, State(acc, stat_m, stat_l), lse, max_scores)
    store_results(results, i_b, i_h, i_h, row, o_m, n_m, b_acc, b_m, b_l, E, STORE_STATE, STORE_MAX)


# -- on the host -------------------------------------------------------------------------------------------


def launch(
    engine: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Any,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_scores: Tensor | None = None,
    state: Sequence[Tensor] | None = None,
    load_state: bool = False,
    store_state: bool = False,
    h_offset: int = 0,
) -> Launch | Launches:
    """Prepare a step by this route; arguments are those of ``engine.loops``.

    sm_90: a launch for masked blocks, which stores a state (in ``state`` if descriptors can copy it), then
    one for full blocks, with specialised warps; without masked blocks only the second. sm_100: one launch.
    The caller has checked :func:`obstacles`.
    """
    if merges(engine.arch or architecture(q.device)):
        outputs = {"out": out, "lse": lse, "max_scores": max_scores, "state": state}
        step: dict[str, Any] = {"load_state": load_state, "store_state": store_state, "h_offset": h_offset}
        return engine.loops(q, k, v, tables, **outputs, **step, kind="specialised")
    parts: list[Launch | Callable[[], None]] = []
    stored = State(*state) if state else None
    start = stored if load_state else None
    if tables.has_masked or not (start is None or _copyable_state(start)):
        work = stored if stored and _copyable_state(stored) else _allocate_state(q, v)
        if start is not None and work is not start:
            parts.append(partial(_copy_state, start, work))
        step = {"state": work, "load_state": load_state, "store_state": True}
        first = _match_tiles(engine, q, v, tables) if tables.window else engine
        parts += first.loops(q, k, v, tables, **step, h_offset=h_offset, full=False).parts
        start = work
    from_acc, from_m, from_l = start or (None, None, None)
    acc, m, l = stored or (None, None, None)
    tensors = {"q": q, "k": k, "v": v, "out": out, "acc": acc, "from_acc": from_acc}
    tensors |= {"lse": lse, "max_scores": max_scores, "stat_m": m, "stat_l": l}
    tensors |= {"from_m": from_m, "from_l": from_l}
    flags = {
        "n_q": q.shape[2],
        "n_kv": k.shape[2],
        "LOAD_STATE": start is not None,
        "STORE_STATE": store_state,
        "STORE_MAX": max_scores is not None,
    }
    last = engine.launch(specialised_kernel, "specialised", tensors, tables, h_offset, flags)
    return Launches((*parts, last._replace(runner=launch_with_allocator)))


def _match_tiles(engine: Any, q: Tensor, v: Tensor, tables: Any) -> Any:
    """Copy the engine with the tile shape of the specialised launch, for the launch of masked blocks.  A
    window has no table of masked blocks: each launch counts them in its own tiles, and with different tiles
    neither launch would compute some keys."""
    config = engine.config("specialised", q, v, tables)
    tiles = {"fwd_BLOCK_M": config.BLOCK_M, "fwd_BLOCK_N": config.BLOCK_N, "fwd_num_warps": 8}
    other = {"fwd_num_stages": 2, "fwd_maxnreg": None, "PACK_GQA": False, "SPLIT_KV": 1}
    return replace(engine, options={**engine.options, **tiles, **other})


def _copy_state(start: State, into: State) -> None:
    for a, b in zip(start, into):
        b.copy_(a)


def _allocate_state(q: Tensor, v: Tensor) -> State:
    """Allocate a state, its rows padded so that descriptors may copy it."""
    (b, h, s, _), e = q.shape, v.shape[3]
    make = partial(torch.empty, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    m, l = make((2, b, h, triton.cdiv(s, 4) * 4))[..., :s]
    return State(make((b, h, s, triton.cdiv(e, 4) * 4))[..., :e], m, l)


def _copyable_state(state: State) -> bool:
    return all(map(device_copyable, (state.acc, state.m[:, :, None], state.l[:, :, None])))


def obstacles(engine: Any, q: Tensor, k: Tensor, v: Tensor, tables: Any) -> Iterator[str]:
    """Reasons why a step cannot, or should not, take the specialised route."""
    arch = engine.arch or architecture(q.device)
    if arch == "interpreter":  # it has no warps
        pass
    elif max(q.shape[3], v.shape[3]) > specialises(arch):
        yield f"on {arch} there are tiles up to a head dim of {specialises(arch)}"
    elif q.dtype.itemsize != 2:
        yield f"{q.dtype} is not multiplied by wgmma or tcgen05"
    elif merges(arch) and pieces(q.shape[3])[1]:
        yield f"on {arch} scores of {q.shape[3]} channels are two products, with registers between them"
    elif merges(arch) and not engine.config("specialised", q, v, tables).USE_TMA:
        yield "it copies tiles by descriptor, which USE_TMA=False forbids"
    else:
        yield from tile_obstacles(engine.config("specialised", q, v, tables))
    if tables.kv_block & -tables.kv_block < 16:
        yield f"no tile divides KV blocks of {tables.kv_block}"
    if engine.mods.score and engine.mods.score_loads:
        yield "the score_mod loads what depends on q_idx or kv_idx, or may"
    if merges(arch):
        if engine.options.get("PACK_GQA") or engine.options.get("SPLIT_KV", 1) > 1:
            yield "PACK_GQA and SPLIT_KV deal rows and keys as it does not"
        if not engine.streams(k, v, tables):
            yield "k or v has strides, or slots with ends, that leave nothing to descriptors"
        return
    if not all(map(device_copyable, (q, k, v))):
        yield "q, k or v has strides or an address that leave nothing to descriptors"
    if tables.full_runs > 2:
        yield f"a row has {tables.full_runs} runs of full blocks, and the loop takes 2"
    if tables.full_runs == 0:
        yield "there are no full blocks"
    share = state_share(tables.keys, q.shape[3], v.shape[3])
    if tables.has_masked and share > STATE_SHARE:
        yield f"its state between two launches would take {share:.1%} of the time, over {STATE_SHARE:.0%}"
