"""The specialised route: masked blocks leave a state, full blocks continue from it in a launch of their own;
or as on sm_100 all blocks run in one launch, whose loop masks behind a branch.  The interpreter specialises
no warps; the results are the same."""

import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import _allocation

import tritoncp
from tests.kernels.support.harness import (
    F32,
    F64,
    QKV,
    close,
    engine_of,
    forward,
    keys_between,
    new_state,
    oracle,
    qkv,
    same,
    single,
)
from tritoncp.analysis import resource_table
from tritoncp.analysis.jobs import step_job
from tritoncp.kernels import engine, forward_specialised, options, tile_rules
from tritoncp.kernels.launch import Launches
from tritoncp.masks import Mask, and_masks, causal, create_block_mask, document, full_mask, sliding_window

N = 48


def blocks(mod: Callable[..., Tensor], n: int = N, batch: int = 1, heads: int = 1) -> Mask:
    return create_block_mask(mod, batch, heads, n, n, BLOCK_SIZE=16)


MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: full_mask(n, n, block=16),
    "causal": lambda n: blocks(causal(), n),
    "window": lambda n: blocks(sliding_window(33, 1), n),
    "intervals": lambda n: blocks(and_masks(causal(), document(lengths=[n // 4, n - n // 4])), n),
    "two runs": lambda n: blocks(lambda b, h, q, kv: (kv < 18) | (kv >= 20), n),
    "mask_mod": lambda n: blocks(lambda b, h, q, kv: (kv < 16) | ((q * kv) % 3 == 1), n),
    "of batch rows and heads": lambda n: blocks(lambda b, h, q, kv: q + 8 * b >= kv + 16 * h, n, 2, 2),
    "rows that see nothing": lambda n: blocks(lambda b, h, q, kv: (q >= 16) & (q != 20) & (kv < 32), n),
    "nothing is masked": lambda n: blocks(lambda b, h, q, kv: (q // 16 + kv // 16) % 2 == 0, n),
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the route for small steps too; a fallback is an error."""
    monkeypatch.setattr(forward_specialised, "STATE_SHARE", math.inf)
    warnings.filterwarnings("error", message="ROUTE=")


@pytest.mark.parametrize("forward_tile", [(32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("mask", [causal(), sliding_window(77, 5), sliding_window(-1, 90)], ids=repr)
def test_launches_of_a_window_cut_it_at_the_same_tiles(mask: Any, forward_tile: tuple[int, int]) -> None:
    """Both launches split the keys at one place, for all measured tiles: no key is read twice or left out."""
    tiles = {"forward": forward_tile, "few": forward_tile, "specialised": (16, 16)}
    tiled = ((kind, (("BLOCK_M", m), ("BLOCK_N", n))) for kind, (m, n) in tiles.items())
    x = qkv(100, 131, heads=2, kv_heads=1)
    whole = create_block_mask(mask, 1, 1, 100, 131, BLOCK_SIZE=32)
    engine = engine_of(x, ROUTE="specialised", CONFIGS=tuple(tiled))
    start = torch.zeros(*x.q.shape[:3], 16), torch.zeros(x.q.shape[:3])
    assert single(whole).tables("cpu", 1, 2).window
    for got, want in zip(forward(engine, x, single(whole)), oracle(x, whole, start=start)):
        close(got, want, "out or lse")


@pytest.fixture(params=[2, 1], ids=["two launches", "one"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as on sm_90 and as on sm_100."""
    monkeypatch.setattr(forward_specialised, "merges", lambda arch: request.param == 1)


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 2 * torch.tanh(s / 2) - 0.1 * (q - kv).abs()


def routes(x: QKV, mask: Mask, **kernel_options: Any) -> list[tuple[Tensor, ...]]:
    """(out, lse, max_scores) by both routes, the second in two launches and in one."""
    tables = single(mask).tables("cpu", *x.q.shape[:2])
    results = []
    for route, merges in (("loops", False), ("specialised", False), ("specialised", True)):
        one = replace(engine_of(x, mask.mask_mod, **kernel_options), options={"ROUTE": route})
        one = replace(one, mods=one.mods._replace(score_loads=0))
        out = torch.empty(*x.q.shape[:3], x.v.shape[3], dtype=x.q.dtype)
        lse, top = torch.empty(2, *x.q.shape[:3], dtype=F64 if x.q.dtype == F64 else F32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward_specialised, "merges", lambda arch, merges=merges: merges)
            launch = one.forward(*x, tables, out=out, lse=lse, max_scores=top)
        assert isinstance(launch, Launches) == (route == "specialised" and not merges)
        assert isinstance(launch, Launches) or launch.args["SPECIALISE"] == merges
        launch()
        results.append((out, lse, top))
    return results


# -- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "n"), [*((name, 50) for name in MASKS), ("causal", N), ("full", N)])
def test_both_routes_give_the_answer(name: str, n: int) -> None:
    """Grouped heads, two pieces of channels, padded ones."""
    batch = 2 if name == "of batch rows and heads" else 1
    x, mask = qkv(n, batch=batch, heads=2, kv_heads=1, dim=40, v_dim=16), MASKS[name](n)
    start = torch.zeros(*x.q.shape[:3], 16), torch.zeros(x.q.shape[:3])
    want = oracle(x, mask, start=start)
    for got in routes(x, mask):
        for values, exact, what in zip(got, want, ("out", "lse", "max_scores")):
            close(values, exact, what)


def test_a_score_mod_that_only_computes() -> None:
    x, mask = qkv(N, dtype=F64), MASKS["intervals"](N)
    start = torch.zeros_like(x.q), torch.zeros(x.q.shape[:3], dtype=F64)
    want = oracle(x, mask, lambda: softcap, start=start)
    for got in routes(x, mask, score_mod=softcap):
        for values, exact, what in zip(got, want, ("out", "lse", "max_scores")):
            close(values, exact, what)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_differs_by_rounding_only(dtype: torch.dtype) -> None:
    """The state between the launches is float32."""
    x, mask = qkv(N, dtype=dtype), MASKS["causal"](N)
    loops, *specialised = routes(x, mask)
    for result in specialised:
        for a, b, what in zip(result, loops, ("out", "lse", "max_scores")):
            close(a, b, what, torch.finfo(dtype).eps if what == "out" else 1e-5)


# -- steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [48, 46], ids=["in place", "rows of the state no descriptor can copy"])
@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.usefixtures("launches")
def test_steps_from_state_to_state(name: str, n: int) -> None:
    x, mask = qkv(n, dim=24, v_dim=40, dtype=F64), MASKS[name](n)
    one = engine_of(x, mask.mask_mod, ROUTE="specialised")
    want = oracle(x, mask, start=(torch.zeros(1, 1, n, 40), torch.zeros(1, 1, n)))
    state, cuts = new_state(x), [0, 16, 32, n]
    for begin, end in pairwise(cuts):
        part = QKV(x.q, x.k[:, :, begin:end], x.v[:, :, begin:end])
        step = {"state": state, "load_state": begin > 0, "store_state": end < n}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="ROUTE=.*no full blocks")
            out, lse = forward(one, part, keys_between(single(mask), begin, end), **step)
    close(out, want.out, "out")
    close(lse, want.lse, "lse")


def test_the_state_left_is_that_of_the_loops() -> None:
    x, mask = qkv(N), MASKS["causal"](N)
    part = QKV(x.q, x.k[:, :, :32], x.v[:, :, :32])
    left = []
    for route in ("loops", "specialised"):
        left.append(new_state(x))
        step = keys_between(single(mask), 0, 32)
        out, lse = forward(engine_of(x, ROUTE=route), part, step, state=left[-1], store_state=True)
        assert bool(out.isnan().all() and lse.isnan().all())
    for a, b, what in zip(*left, ("acc", "m", "l")):
        close(a, b, what)


@pytest.mark.parametrize("schedule", ["allgather", "ring", "fetch"])
@pytest.mark.usefixtures("launches")
def test_slots_in_any_order(schedule: str) -> None:
    """Keys of two ranks, dealt in zig-zag: rows of full blocks lie wherever a table says."""
    x, mask = qkv(64), blocks(causal(), 64)
    plan = tritoncp.make_plan(mask, world_size=2, schedule=schedule)
    world = tritoncp.simulate(2)
    shards = [world.shard(t, plan, dim=2) for t in x]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ROUTE=.*no full blocks")
        options = {"ROUTE": "specialised"}
        outs = world.flex_attention(*shards, plan, enable_gqa=True, kernel_options=options)
    want = oracle(x, mask, start=(torch.zeros_like(x.q), torch.zeros(x.q.shape[:3])))
    close(world.unshard(outs, plan, dim=2), want.out, "out")


# -- where it cannot be had -----------------------------------------------------------------------------


def why(x: QKV, mask: Mask, arch: str = "sm_90", loads: int = 0, **options: Any) -> list[str]:
    """List the obstacles of the specialised route for one step."""
    one = replace(engine_of(x, mask.mask_mod, **options), arch=arch)
    one = replace(one, mods=one.mods._replace(score_loads=loads))
    return list(forward_specialised.obstacles(one, *x, single(mask).tables("cpu", *x.q.shape[:2])))


def large(dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> QKV:
    return qkv(512, dim=dim, dtype=dtype)


CAUSAL = create_block_mask(causal(), None, None, 512, 512)
OBSTACLES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "architecture": ("on sm_80 there are tiles up to a head dim of 0", lambda: why(large(), CAUSAL, "sm_80")),
    "head dim": ("on sm_90 there are tiles up to a head dim of 192", lambda: why(large(256), CAUSAL)),
    "head dim of sm_100": ("tiles up to a head dim of 128", lambda: why(large(192), CAUSAL, "sm_100")),
    "two pieces": ("scores of 96 channels are two products", lambda: why(large(96), CAUSAL, "sm_100")),
    "dtype": ("float32 is not multiplied", lambda: why(large(dtype=F32), CAUSAL)),
    "warps": ("it takes BLOCK_M=128, num_warps=4", lambda: why(large(), CAUSAL, num_warps=8)),
    "stages": ("num_stages of 2 or more", lambda: why(large(), CAUSAL, num_stages=1)),
    "small blocks": (
        "it takes BLOCK_M=128",
        lambda: why(large(), create_block_mask(causal(), None, None, 512, 512, BLOCK_SIZE=64)),
    ),
    "odd blocks": (
        "no tile divides KV blocks of 24",
        lambda: why(qkv(50), create_block_mask(causal(), None, None, 50, 50, BLOCK_SIZE=24), "interpreter"),
    ),
    "strides": (
        "leave nothing to descriptors",
        lambda: why(large()._replace(k=torch.randn(1, 1, 512, 129).bfloat16()[..., 1:]), CAUSAL),
    ),
    "pointers": ("USE_TMA=False forbids", lambda: why(large(), CAUSAL, "sm_100", USE_TMA=False)),
    "strides of sm_100": (
        "leave nothing to descriptors",
        lambda: why(large()._replace(k=torch.randn(1, 1, 512, 129).bfloat16()[..., 1:]), CAUSAL, "sm_100"),
    ),
    "runs": (
        "a row has 3 runs of full blocks",
        lambda: why(
            large(),
            create_block_mask(
                lambda b, h, q, kv: (q < 128) & (kv % 1024 // 128 != 1) & (kv // 128 != 3),
                None, None, 512, 640,
            ),
        ),
    ),
    "nothing full": (
        "there are no full blocks",
        lambda: why(large(), create_block_mask(sliding_window(9), None, None, 512, 512)),
    ),
    "loads": ("loads what depends", lambda: why(large(), CAUSAL, score_mod=softcap, loads=1)),
    "loads of sm_100": (
        "loads what depends",
        lambda: why(large(), CAUSAL, "sm_100", score_mod=softcap, loads=1),
    ),
    "heads in a tile": ("deal rows and keys", lambda: why(large(), CAUSAL, "sm_100", PACK_GQA=True)),
    "keys of a row": ("deal rows and keys", lambda: why(large(), CAUSAL, "sm_100", SPLIT_KV=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_is_in_the_way_is_named(name: str) -> None:
    said, obstacles = OBSTACLES[name]
    (line,) = obstacles()
    assert said in line
    assert why(large(), CAUSAL) == []


def test_one_launch_has_no_state_and_takes_what_two_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, short rows, many runs, masks with a mask_mod."""
    monkeypatch.undo()
    x, dilated = large(), create_block_mask(lambda b, h, q, kv: (q - kv) % 3 == 0, None, None, 512, 512)
    for mask in (CAUSAL, create_block_mask(sliding_window(9), None, None, 512, 512), dilated):
        assert why(x, mask, "sm_100", score_mod=softcap) == []


def test_a_state_that_costs_more_than_it_wins_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule, 3 % of the time: 8 bytes a channel and row at 4.3 TB/s against 4 FLOPs a channel and pair
    at 520 TFLOP/s are 8062 keys a row. Without masked blocks there is no state between launches."""
    monkeypatch.undo()
    x, full = large(), full_mask(512, 512)
    (line,) = why(x, CAUSAL)
    assert "would take 75.6% of the time, over 3%" in line  # 320 keys a row: of 4 blocks 1, 2, 3, 4
    assert why(x, full) == []
    for keys, lines in ((8060, 1), (8065, 0)):
        tables = replace(single(CAUSAL).tables("cpu", 1, 1), keys=keys)
        one = replace(engine_of(x), arch="sm_90")
        assert len(list(forward_specialised.obstacles(one, *x, tables))) == lines


def test_a_step_that_goes_by_loops_says_so_and_has_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, mask = qkv(48), MASKS["causal"](48)
    want = tritoncp.flex_attention(*x, mask)
    with pytest.warns(UserWarning, match="ROUTE='specialised' is requested; this step goes by 'loops': its"):
        same(tritoncp.flex_attention(*x, mask, kernel_options={"ROUTE": "specialised"}), want)


def test_keys_and_runs_of_a_step() -> None:
    for name, mask in ((name, make_mask(N)) for name, make_mask in MASKS.items()):
        tables, kinds = single(mask).tables("cpu", 1, 1), mask.runs.to_kinds()
        listed, full = kinds != 3, torch.nn.functional.pad(kinds == 1, (1, 0)).int()
        assert tables.keys == pytest.approx(16 * listed.sum(-1).double().mean().item()), name
        assert tables.full_runs == int((full.diff(dim=-1) > 0).sum(-1).max()), name


# -- the choice -------------------------------------------------------------------------------------------


def test_every_route_has_a_launcher_and_loops_are_the_default() -> None:
    assert options.ROUTES[0] == "loops"
    for route in options.ROUTES[1:]:
        assert callable(engine.route_of(route).launch) and callable(engine.route_of(route).obstacles)
    with pytest.raises(ValueError, match="kernel option ROUTE='fast'; one of loops, specialised, gluon"):
        tritoncp.flex_attention(*qkv(), kernel_options={"ROUTE": "fast"})


def test_a_public_call_takes_the_route_with_a_score_mod_of_slopes() -> None:
    """A load that depends on the head alone does not vary in the loop."""
    slopes = torch.tensor([0.5, 0.25])
    x, mask = qkv(N, heads=2), MASKS["causal"](N)

    def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s - slopes[h] * (q - kv)

    got = tritoncp.flex_attention(*x, alibi, mask, kernel_options={"ROUTE": "specialised"})
    start = torch.zeros_like(x.q), torch.zeros(x.q.shape[:3])
    close(got, oracle(x, mask, lambda: alibi, start=start).out, "out")
    table = torch.randn(7)
    with pytest.raises(UserWarning, match="the score_mod loads"):
        tritoncp.flex_attention(
            *x, lambda s, b, h, q, kv: s + table[(q - kv) % 7], mask, kernel_options={"ROUTE": "specialised"}
        )


# -- memory for descriptors ---------------------------------------------------------------------------------


def test_the_users_allocator_is_left_alone() -> None:
    """In this thread and in a fresh one without an allocator: only the launch sees tritoncp's allocator."""
    allocations: dict[str, list[Any]] = {"here": [], "there": []}

    def user_allocator(size: int, alignment: int, stream: int | None) -> Any:
        raise AssertionError("nobody asks the user's")

    def look(where: str) -> None:
        allocations[where].append(_allocation._allocator.get())

    def launch(where: str) -> None:
        look(where)
        forward_specialised.launch_with_allocator(look, where=where)
        look(where)

    triton.set_allocator(user_allocator)
    try:
        launch("here")
        thread = threading.Thread(target=launch, args=("there",))
        thread.start()
        thread.join()
    finally:
        triton.set_allocator(_allocation._NULL_ALLOCATOR)
    assert allocations["here"] == [user_allocator, forward_specialised._allocate, user_allocator]
    assert allocations["there"] == [
        _allocation._NULL_ALLOCATOR,
        forward_specialised._allocate,
        _allocation._NULL_ALLOCATOR,
    ]


def test_launches_of_a_fresh_thread_give_the_same_bits() -> None:
    x, mask = qkv(N), MASKS["causal"](N)
    got = []
    thread = threading.Thread(target=lambda: got.append(forward(engine_of(x, ROUTE="specialised"), x, plan)))
    plan = single(mask)
    thread.start()
    thread.join()
    same(got[0], forward(engine_of(x, ROUTE="specialised"), x, plan))


# -- compiled -----------------------------------------------------------------------------------------------


def test_warps_are_specialised_and_nothing_got_worse() -> None:
    """One group copies, two compute, or on sm_100 one for each part of the work: 12 warps for 4, no spill, no
    product too many, as the table says."""
    jobs = [step_job("specialised", "sm_90", dim) for dim in (64, 128)] + [
        step_job("specialised", "sm_100", 128)
    ]
    before = resource_table.read_table()
    for row in resource_table.inspect_jobs([*jobs, step_job("masked", "sm_90", 128)], 1, 300):
        if row["arch"] == "sm_100":  # products run ahead of all softmax; no masks in the full loop
            assert row["hidden"] == 1 and row["loop"] < 0.6 * row["masked_loop"]
        assert resource_table.find_regressions(row, before[resource_table.key(row)]) == []
        assert row["warps"] == (12 if row["kernel"] == "specialised" else 8)
        assert row["flops"] == 1 and row["spill_bytes"] == 0 and row["tma"] > 0


def test_specialisation_that_is_lost_is_named() -> None:
    """With eight warps the compiler silently does not specialise."""
    config = replace(tile_rules.default("specialised", "sm_90", 128, torch.bfloat16), num_warps=8)
    (row,) = resource_table.inspect_jobs([step_job("specialised", "sm_90", 128, config=config)], 1, 300)
    assert "the compiler has not specialised its warps" in resource_table.find_regressions(row, row)
