"""Forward route "gluon" for Hopper, in Gluon: softmax of one tile while tensor cores multiply another.

The pipeline of FlashAttention-3 (arXiv 2407.08608), over the tables of :mod:`tritoncp.kernels.forward`.  A
program computes a tile of 128 query rows in three partitions: a *producer*, one warp that copies Q and then
tile after tile of K and V into rings of shared memory; two *groups* of four warps, with 64 rows each.

In a loop over full tiles a group issues S(j) = Q K(j)^T and then acc += P(j-1) V(j-1), waits for the former
only, and computes P(j) from S(j) during the latter.  The groups take turns in issuing: the products of one
run during the softmax of the other.

Unverified on GPUs, and Gluon has no interpreter.  ``tests/compiled/test_gluon.py`` runs on one too.  Names as
in :mod:`tritoncp.kernels.tiles`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritoncp.kernels.forward import Results
from tritoncp.kernels.launch import Launch
from tritoncp.kernels.opaque_integers import integer
from tritoncp.kernels.program_order import locate_program
from tritoncp.kernels.routes.obstacles import find_obstacles
from tritoncp.kernels.scores import (
    LOG2E,
    Queries,
    inverse_sum,
    online_softmax,
    row_intervals,
    row_lse,
    row_max,
    visible_keys,
)
from tritoncp.kernels.tile_rules import architecture
from tritoncp.kernels.tile_runs import locate_tile, row_runs, run_tiles, skip_cut
from tritoncp.kernels.tiles import (
    HeadRows,
    descriptors,
    head_pointer,
    load_stat,
    stat_pointers,
    tile_pointers,
)

if TYPE_CHECKING:
    from tritoncp.kernels.engine import TritonEngine

GROUP_ROWS: gl.constexpr = gl.constexpr(64)  # of one warp group, as wgmma has it
# 65536 registers for three groups of 128 threads: 168 a thread when the program starts, then few for the
# producer and the three idle warps of its group, and the rest for the two groups that multiply.
REGISTERS = 168
PRODUCER_REGISTERS: gl.constexpr = gl.constexpr(24)
GROUP_REGISTERS: gl.constexpr = gl.constexpr(240)
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name until Triton 3.8


class Ring(NamedTuple):
    """Tiles of K or V in shared memory.  Tile i of a program's walk lies in stage ``i % STAGES`` and ends
    phase ``i // STAGES`` of that stage's barriers: ``full`` once it is copied, ``free`` once both groups have
    read it."""

    tiles: Any  # [STAGES, 1, 1, BLOCK_N, width]
    full: Any
    free: Any


class Walk(NamedTuple):
    """Indices of a program and tables of the tiles that it visits. i_hm: global head. No mod runs in Gluon,
    so that the batch row of the mods is not needed: tables hold the tensors' rows."""

    i_b: Any
    i_h: Any
    i_hkv: Any
    i_hm: Any
    i_slot: Any
    tile: Any  # of queries
    tables: Any  # StepTables


class Spec(NamedTuple):
    """Constants of the kernel; D, E: channels of keys and values."""

    C: Any  # scale of scores in log2 units
    D: Any
    E: Any
    BLOCK_N: Any
    STAGES: Any  # of the rings
    KV_LAYOUT: Any  # SideLayout
    RULE: Any  # MaskRule
    LOAD_STATE: Any
    STORE_STATE: Any


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """Allocate N barriers. A phase ends after COUNT arrivals and all bytes that they announced."""
    buffer = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(buffer.index(i), COUNT)
    return buffer


@gluon.jit
def place(i, STAGES: gl.constexpr):
    """Stage and parity of tile ``i``."""
    return i % STAGES, (i // STAGES) & 1


@gluon.jit
def fill(ring, desc, i_b, i_h, row, i, STAGES: gl.constexpr):
    """Copy rows ``row`` and on as tile ``i`` once its stage is free. All stages are free at first: a wait for
    parity 1 passes a fresh barrier."""
    stage, parity = place(i, STAGES)
    mbarrier.wait(ring.free.index(stage), parity ^ 1)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    copy_tile(desc, [i_b, i_h, row, 0], ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def ready(ring, i, STAGES: gl.constexpr):
    """Wait until tile ``i`` is copied."""
    stage, parity = place(i, STAGES)
    mbarrier.wait(ring.full.index(stage), parity)


@gluon.jit
def release(ring, i, STAGES: gl.constexpr):
    """Signal that this group has read tile ``i``."""
    mbarrier.arrive(ring.free.index(i % STAGES))


@gluon.jit
def tile(ring, i, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """Tile ``i`` in shared memory, [BLOCK_N, WIDTH]."""
    return ring.tiles.index(i % STAGES).reshape([BLOCK_N, WIDTH])


@gluon.jit
def runs_of(walk):
    """Bounds of the runs of the program's row, see row_runs."""
    return row_runs(walk.tables.rows, walk.i_b, walk.i_hm, walk.i_slot)


@gluon.jit
def tiles_of(walk, i_run, FULL: gl.constexpr, SPEC: gl.constexpr):
    """Tiles of a run, see run_tiles."""
    return run_tiles(
        walk.tables.rows, i_run, walk.tile, walk.tables.kv_slots, 2 * GROUP_ROWS, SPEC.KV_LAYOUT, FULL
    )


@gluon.jit
def keys_at(walk, tiles, i_t, SPEC: gl.constexpr):
    """Tile ``i_t`` of a run of keys."""
    return locate_tile(walk.tables.kv_slots, walk.i_b, skip_cut(tiles, i_t), SPEC.KV_LAYOUT)


@gluon.jit
def rows_of(walk, I_GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the rows of a group lie in tensors of queries; LAYOUT: of a block [64, n]."""
    first = walk.tile.row + I_GROUP * GROUP_ROWS
    o_m = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LAYOUT))
    return HeadRows(walk.i_b, walk.i_h, walk.i_h, first, o_m, walk.tile.n - I_GROUP * GROUP_ROWS)


@gluon.jit
def produce(q_desc, k_desc, v_desc, q_tiles, q_full, keys, values, walk, SPEC: gl.constexpr):
    """Copy Q, then K and V of every tile: those of masked runs, then those of full ones."""
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    for i_group in gl.static_range(2):
        at = [walk.i_b, walk.i_h, walk.tile.row + i_group * GROUP_ROWS, 0]
        copy_tile(q_desc, at, q_full, q_tiles.index(i_group))
    begin, mid, end = runs_of(walk)
    i = 0
    for FULL in gl.static_range(2):
        if SPEC.RULE.MASKED or FULL:
            for i_run in range(mid if FULL else begin, end if FULL else mid):
                tiles = tiles_of(walk, i_run, FULL, SPEC)
                for i_t in range(tiles.begin, tiles.end):
                    kv = keys_at(walk, tiles, i_t, SPEC)
                    fill(keys, k_desc, walk.i_b, walk.i_hkv, kv.row, i, SPEC.STAGES)
                    fill(values, v_desc, walk.i_b, walk.i_hkv, kv.row, i, SPEC.STAGES)
                    i += 1


@gluon.jit
def shrink(b_acc, b_r):
    """Rescale acc [64, E] by a factor for each row, which has the layout of rows of S."""
    ROWS: gl.constexpr = gl.SliceLayout(1, b_acc.type.layout)
    return b_acc * gl.convert_layout(b_r, ROWS)[:, None]


@gluon.jit
def operand(b_p, b_acc, DTYPE: gl.constexpr):
    """Probabilities as the left operand of a product that adds to acc."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_acc.type.layout, 2)
    return gl.convert_layout(b_p.to(DTYPE), LAYOUT)


@gluon.jit
def attend_masked(
    q_tile,
    keys,
    values,
    walk,
    b_acc,
    b_m,
    b_l,
    I_GROUP: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    SPEC: gl.constexpr,
):
    """Attention to the tiles of masked runs, one after the other: only the other group's products overlap the
    softmax."""
    rows = rows_of(walk, I_GROUP, S_LAYOUT)
    o_n = gl.arange(0, SPEC.BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    o_q = (walk.tile.pos + I_GROUP * GROUP_ROWS + rows.offsets)[:, None]
    m_m = rows.offsets < rows.count
    b_bounds = row_intervals(walk.tables.interval, rows, walk.i_hm, m_m)
    queries = Queries(walk.i_b, walk.i_hm, o_q, m_m)
    b_zero = gl.full([GROUP_ROWS, SPEC.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    begin, mid, _ = runs_of(walk)
    i = 0
    for i_run in range(begin, mid):
        tiles = tiles_of(walk, i_run, False, SPEC)
        for i_t in range(tiles.begin, tiles.end):
            kv = keys_at(walk, tiles, i_t, SPEC)
            ready(keys, i, SPEC.STAGES)
            b_k = tile(keys, i, SPEC.BLOCK_N, SPEC.D, SPEC.STAGES).permute((1, 0))
            b_s = warpgroup_mma(q_tile, b_k, b_zero, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))  # [64, N]
            release(keys, i, SPEC.STAGES)
            m_in = visible_keys(walk.tables, queries, b_bounds, kv, o_n, tiles.kind, SPEC.RULE)
            b_s = gl.where(m_in, b_s, -float("inf"))
            b_p, b_r, b_m, b_l = online_softmax(b_s, b_m, b_l, SPEC.C, True)
            b_p = operand(b_p, b_acc, q_tile.dtype)
            b_acc = shrink(b_acc, b_r)
            ready(values, i, SPEC.STAGES)
            b_v = tile(values, i, SPEC.BLOCK_N, SPEC.E, SPEC.STAGES)
            b_acc = warpgroup_mma(b_p, b_v, b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, deps=(b_acc, b_p))[0]
            release(values, i, SPEC.STAGES)
            i += 1
    return b_acc, b_m, b_l, i


@gluon.jit
def attend_full(
    q_tile,
    keys,
    values,
    turn,
    walk,
    i,
    b_acc,
    b_m,
    b_l,
    I_GROUP: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    SPEC: gl.constexpr,
):
    """Attention to the tiles of full runs, from tile ``i`` of the rings on: scores of a tile are
    computed while the probabilities of the tile before are multiplied with values."""
    b_zero = gl.full([GROUP_ROWS, SPEC.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    _, mid, end = runs_of(walk)
    last = i - 1
    for i_run in range(mid, end):
        tiles = tiles_of(walk, i_run, True, SPEC)
        last += gl.maximum(tiles.end - tiles.begin, 0)
    if last >= i:
        ready(keys, i, SPEC.STAGES)
        b_k = tile(keys, i, SPEC.BLOCK_N, SPEC.D, SPEC.STAGES).permute((1, 0))
        b_s = warpgroup_mma(q_tile, b_k, b_zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))  # [64, N]
        release(keys, i, SPEC.STAGES)
        b_e, b_r, b_m, b_l = online_softmax(b_s, b_m, b_l, SPEC.C, False)
        b_acc = shrink(b_acc, b_r)
        b_p = operand(b_e, b_acc, q_tile.dtype)
        ready(values, i, SPEC.STAGES)
        for j in range(i + 1, last + 1):  # P and V of tile j - 1 are ready
            ready(keys, j, SPEC.STAGES)
            # Group 0 issues first; then each group waits until the other has issued its products.
            mbarrier.wait(turn.index(I_GROUP), ((j - i) & 1) ^ I_GROUP)
            b_k = tile(keys, j, SPEC.BLOCK_N, SPEC.D, SPEC.STAGES).permute((1, 0))
            b_s = warpgroup_mma(q_tile, b_k, b_zero, use_acc=False, is_async=True)
            b_v = tile(values, j - 1, SPEC.BLOCK_N, SPEC.E, SPEC.STAGES)
            b_acc = warpgroup_mma(b_p, b_v, b_acc, is_async=True)
            mbarrier.arrive(turn.index(1 - I_GROUP))
            b_s = warpgroup_mma_wait(1, deps=(b_s,))
            release(keys, j, SPEC.STAGES)
            b_e, b_r, b_m, b_l = online_softmax(b_s, b_m, b_l, SPEC.C, False)
            # Waits here, earlier than V(j) is needed: ptxas moves no softmax across a barrier. Without it,
            # the wait for the product comes before the softmax and nothing overlaps.
            ready(values, j, SPEC.STAGES)
            b_acc = warpgroup_mma_wait(0, deps=(b_acc, b_p))[0]
            release(values, j - 1, SPEC.STAGES)
            b_p = operand(b_e, b_acc, q_tile.dtype)
            b_acc = shrink(b_acc, b_r)
        b_acc = warpgroup_mma(
            b_p, tile(values, last, SPEC.BLOCK_N, SPEC.E, SPEC.STAGES), b_acc, is_async=True
        )
        b_acc = warpgroup_mma_wait(0, deps=(b_acc, b_p))[0]
    return b_acc, b_m, b_l


@gluon.jit
def load_state(
    state, walk, I_GROUP: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, E: gl.constexpr
):
    """Load the state of the step before: acc [64, E], m and l [64]."""
    rows = rows_of(walk, I_GROUP, S_LAYOUT)
    m_m = rows.offsets < rows.count
    b_m = load_stat(state.m, rows, m_m, other=-float("inf"))
    b_l = load_stat(state.l, rows, m_m)
    p_acc, m_acc = pointers(state.acc, walk, I_GROUP, O_LAYOUT, E)
    return gl.load(p_acc, mask=m_acc, other=0.0), b_m, b_l


@gluon.jit
def pointers(x, walk, I_GROUP: gl.constexpr, LAYOUT: gl.constexpr, E: gl.constexpr):
    """Pointers to a group's rows [64, E], and the mask of those within the tile."""
    rows = rows_of(walk, I_GROUP, LAYOUT)
    o_e = gl.arange(0, E, gl.SliceLayout(0, LAYOUT))
    m_x = (rows.offsets < rows.count)[:, None] & (o_e >= 0)[None, :]
    return tile_pointers(x, head_pointer(x, walk.i_b, walk.i_h), rows, o_e), m_x


@gluon.jit
def store_results(results, walk, b_acc, b_m, b_l, I_GROUP: gl.constexpr, SPEC: gl.constexpr):
    """Store the results of a group's rows: the state, or out, lse and the largest scores."""
    O_LAYOUT: gl.constexpr = b_acc.type.layout
    S_LAYOUT: gl.constexpr = b_m.type.layout.parent
    rows = rows_of(walk, I_GROUP, S_LAYOUT)
    m_m = rows.offsets < rows.count
    if SPEC.STORE_STATE:
        p_acc, m_acc = pointers(results.state.acc, walk, I_GROUP, O_LAYOUT, SPEC.E)
        gl.store(p_acc, b_acc, mask=m_acc)
        gl.store(stat_pointers(results.state.m, rows), b_m, mask=m_m)
        gl.store(stat_pointers(results.state.l, rows), b_l, mask=m_m)
    else:
        b_acc = shrink(b_acc, inverse_sum(b_l))
        p_out, m_out = pointers(results.out, walk, I_GROUP, O_LAYOUT, SPEC.E)
        gl.store(p_out, b_acc.to(results.out.ptr.dtype.element_ty), mask=m_out)
        gl.store(stat_pointers(results.lse, rows), row_lse(b_m, b_l), mask=m_m)
        if results.max_scores.ptr is not None:
            gl.store(stat_pointers(results.max_scores, rows), row_max(b_m, b_l), mask=m_m)


@gluon.jit
def attend(I_GROUP: gl.constexpr, q_tiles, q_full, keys, values, turn, walk, results, SPEC: gl.constexpr):
    """Attention of group I_GROUP: rows ``64 * I_GROUP`` and on of the program's tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPEC.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPEC.E, 16])
    if SPEC.LOAD_STATE:
        b_acc, b_m, b_l = load_state(results.state, walk, I_GROUP, S_LAYOUT, O_LAYOUT, SPEC.E)
    else:
        b_acc = gl.full([GROUP_ROWS, SPEC.E], 0.0, gl.float32, O_LAYOUT)
        b_m = gl.full([GROUP_ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        b_l = gl.full([GROUP_ROWS], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    mbarrier.wait(q_full, 0)  # also without a tile to compute: no copy may be in flight when a program ends
    q_tile = q_tiles.index(I_GROUP).reshape([GROUP_ROWS, SPEC.D])
    i = 0
    if SPEC.RULE.MASKED:
        b_acc, b_m, b_l, i = attend_masked(
            q_tile, keys, values, walk, b_acc, b_m, b_l, I_GROUP, S_LAYOUT, SPEC
        )
    b_acc, b_m, b_l = attend_full(
        q_tile, keys, values, turn, walk, i, b_acc, b_m, b_l, I_GROUP, S_LAYOUT, SPEC
    )
    store_results(results, walk, b_acc, b_m, b_l, I_GROUP, SPEC)


@gluon.jit
def gluon_forward_kernel(
    q_desc,  # tensor descriptors: tiles of [64, D]
    k_desc,  # [BLOCK_N, D]
    v_desc,  # [BLOCK_N, E]
    out,  # from here on as in forward_kernel
    lse,
    max_scores,
    state,
    tables,
    order,
    origin,
    SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    QK: gl.constexpr,
    VO: gl.constexpr,
    Q_LAYOUT: gl.constexpr,
    KV_LAYOUT: gl.constexpr,
    RULE: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_STATE: gl.constexpr,
    STORE_STATE: gl.constexpr,
):
    D: gl.constexpr = QK.dim
    E: gl.constexpr = VO.dim
    BLOCK_N: gl.constexpr = KV_LAYOUT.TILE
    gl.static_assert(Q_LAYOUT.TILE == 2 * GROUP_ROWS and KV_LAYOUT.BLOCK % BLOCK_N == 0 and SCALE > 0)
    gl.static_assert(STAGES >= 2)  # V(j) is waited for before V(j - 1) is released
    SPEC: gl.constexpr = Spec(SCALE * LOG2E, D, E, BLOCK_N, STAGES, KV_LAYOUT, RULE, LOAD_STATE, STORE_STATE)
    i_b = gl.program_id(2)
    program = locate_program(order, i_b, None, Q_LAYOUT.TILES, True)
    i_h = program.i_head
    tile = locate_tile(tables.q_slots, i_b, program.i_tile, Q_LAYOUT)
    i_slot = program.i_tile // Q_LAYOUT.TILES
    walk = Walk(i_b, i_h, i_h // GROUP, i_h + integer(origin.head), i_slot, tile, tables)
    results = Results(out, lse, max_scores, state)

    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, GROUP_ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    q_full = barriers(1, 1).index(0)
    turn = barriers(2, 1)
    keys = Ring(k_tiles, barriers(STAGES, 1), barriers(STAGES, 2))
    values = Ring(v_tiles, barriers(STAGES, 1), barriers(STAGES, 2))
    gl.warp_specialize(
        [
            (attend, (0, q_tiles, q_full, keys, values, turn, walk, results, SPEC)),
            (attend, (1, q_tiles, q_full, keys, values, turn, walk, results, SPEC)),
            (produce, (q_desc, k_desc, v_desc, q_tiles, q_full, keys, values, walk, SPEC)),
        ],
        [4, 1],
        [GROUP_REGISTERS, PRODUCER_REGISTERS],
    )


def launch(engine: "TritonEngine", step: Any) -> Launch:
    """Prepare a step by this route, with the arguments of ``engine.forward``."""
    loops = engine.loops(step, kind="gluon")
    q_desc, _ = descriptors(step.q, GROUP_ROWS.value, (step.q.shape[3], 0))
    args = loops.args
    args |= {
        "q_desc": laid_out(q_desc),
        "k_desc": laid_out(args["k_desc0"]),
        "v_desc": laid_out(args["v_desc0"]),
        "STAGES": loops.config.num_stages,
    }
    values = [args[name] for name in gluon_forward_kernel.arg_names]
    compiled = loops.compiled  # holds this kernel: the launch of the loops is never called
    return Launch(gluon_forward_kernel, loops.grid, values, loops.config, compiled, {"maxnreg": REGISTERS})


def obstacles(engine: "TritonEngine", step: Any) -> Iterator[str]:
    """Reasons why a step cannot take the route in Gluon."""
    arch = engine.arch or architecture(step.q.device)
    if arch == "interpreter" and "ROUTE" in engine.options:
        raise ValueError("ROUTE='gluon' is for GPUs and cannot be interpreted; leave it out on a CPU")
    if arch != "sm_90":
        yield f"its instructions are those of sm_90, and this is {arch}"
        return
    if engine.mods.score.fn or step.tables.mask == "mod":
        yield "it runs no score_mod or mask_mod, whose values have no layouts in Gluon"
    if not engine.scale > 0:
        yield f"the scale is folded into the exponent, and {engine.scale} is not positive"
    yield from find_obstacles(engine, "gluon", step, 2)


def laid_out(desc: Any) -> TensorDescriptor:
    """Copy a descriptor with the shared memory layout that wgmma reads."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(desc.base, desc.shape, desc.strides, desc.block_shape, layout)
