"""ROUTE "gluon": its source, run by the model in gluon_model.py, next to the float64 oracle; its compiled
form; and its obstacles.  Gluon has no interpreter, so these tests show nothing about a GPU."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.kernels.support import gluon_model as model
from tests.kernels.support.harness import QKV, close, engine_of, new_state, oracle, qkv, single
from tritoncp.analysis import resource_table
from tritoncp.analysis.jobs import step_job
from tritoncp.kernels import forward_gluon
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.launch import Launch
from tritoncp.masks import Mask, and_masks, causal, create_block_mask, document, full_mask, sliding_window

BF16 = torch.bfloat16


def blocks(mod: Callable[..., Tensor], n: int, batch: int = 1, heads: int = 1) -> Mask:
    return create_block_mask(mod, batch, heads, n, n)


def documents(n: int) -> Callable[..., Tensor]:
    return and_masks(causal(), document(lengths=[n // 7, n // 2, n - n // 7 - n // 2]))


MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: full_mask(n, n),
    "causal": lambda n: blocks(causal(), n),
    "window": lambda n: blocks(sliding_window(200, 10), n),
    "narrow window": lambda n: blocks(sliding_window(3, 0), n),
    "documents": lambda n: blocks(documents(n), n),
    "nothing is masked": lambda n: blocks(lambda b, h, q, kv: (q // 128 + kv // 128) % 2 == 0, n),
    "rows that see nothing": lambda n: blocks(lambda b, h, q, kv: (q >= kv) & ((q < 90) | (q >= 256)), n),
    "of batch rows and heads": lambda n: blocks(lambda b, h, q, kv: q + 300 * b >= kv + 64 * h, n, 2, 4),
}


def tensors(n: int, batch: int = 1, dim: int = 64, v_dim: int = 64) -> QKV:
    heads = 2 * batch
    return qkv(n, batch=batch, heads=heads, kv_heads=heads // 2, dim=dim, v_dim=v_dim, dtype=BF16)


def prepared(
    x: QKV, mask: Mask, first_row: int = 0, **options: Any
) -> tuple[Launch, tuple[Tensor, Tensor, Tensor]]:
    """A launch and its outputs out, lse and max_scores; in float32, except for the rounding in the model."""
    engine = replace(engine_of(x), options=options, arch="sm_90", first_row=first_row)
    tables = single(mask).tables("cpu", *x.q.shape[:2])
    assert list(forward_gluon.obstacles(engine, *x, tables)) == []
    out = torch.empty(*x.q.shape[:3], x.v.shape[3])
    lse, top = torch.empty(2, *x.q.shape[:3])
    return forward_gluon.launch(engine, *x, tables, out=out, lse=lse, max_scores=top), (out, lse, top)


def agrees(x: QKV, mask: Mask, got: tuple[Tensor, ...], tolerance: float | None = None) -> None:
    start = torch.zeros(*x.q.shape[:3], x.v.shape[3]), torch.zeros(x.q.shape[:3])
    want = oracle(x, mask, start=start)
    for a, b, what in zip(got, want, ("out", "lse", "max_scores")):
        close(a, b, what, tolerance)


# -- the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [512, 413], ids=["whole", "ragged"])
@pytest.mark.parametrize("name", MASKS)
def test_the_answer(name: str, n: int) -> None:
    x, mask = tensors(n, batch=2 if name == "of batch rows and heads" else 1), MASKS[name](n)
    launch, got = prepared(x, mask)
    model.run(launch, seed=n)
    agrees(x, mask, got)


def test_rows_of_a_batch_read_their_own_tables() -> None:
    """Tables hold a row for each batch row of the tensors, which begin at row 1 of their batch here."""
    x, mask = tensors(300, batch=2), blocks(lambda b, h, q, kv: q + 300 * b >= kv + 64 * h, 300, 2, 4)
    launch, got = prepared(x, mask, first_row=1)
    model.run(launch)
    agrees(x, mask, got)


@pytest.mark.parametrize("n", [1, 128, 130, 256])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_few_tiles(name: str, n: int) -> None:
    """No, one or two full tiles: the loop is entered late or not at all."""
    x, mask = tensors(n), MASKS[name](n)
    launch, got = prepared(x, mask)
    model.run(launch)
    agrees(x, mask, got)


@pytest.mark.parametrize(("dim", "v_dim"), [(128, 128), (64, 128), (128, 64)])
def test_head_dims(dim: int, v_dim: int) -> None:
    x, mask = tensors(300, dim=dim, v_dim=v_dim), MASKS["causal"](300)
    launch, got = prepared(x, mask)
    model.run(launch)
    agrees(x, mask, got)


@pytest.mark.parametrize(("stages", "tile"), [(2, 64), (3, 64), (2, 128), (4, 128)])
def test_no_interleaving_changes_a_bit(stages: int, tile: int) -> None:
    """No partition waits for ever, reads unwritten memory, or writes memory under read, for any order of
    partitions."""
    x, mask = qkv(512, dim=64, dtype=BF16), MASKS["documents"](512)
    outcomes = []
    for seed in range(6):
        launch, got = prepared(x, mask, num_stages=stages, BLOCK_N=tile)
        model.run(launch, seed)
        outcomes.append(torch.cat([got[0].flatten(), *(t.flatten() for t in got[1:])]))
    assert all(torch.equal(one, outcomes[0]) for one in outcomes)
    agrees(x, mask, got)


def test_groups_take_turns() -> None:
    """In a loop over full tiles the groups issue two products each in turn."""
    x, mask = tensors(1024)._replace(q=torch.zeros(1, 2, 128, 64, dtype=BF16)), full_mask(128, 1024)
    for seed in range(5):
        launch, _ = prepared(x, mask)
        pairs = [one for one in model.run(launch, seed) if one.outstanding == 2]
        for head in range(2):
            order = [one.group for one in pairs if one.program == (head, 0, 0)]
            assert order == [0, 1] * 7


@pytest.mark.parametrize("schedule", ["allgather", "ring", "fetch"])
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_shards_and_steps(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the public call: two ranks' blocks in zig-zag, keys where a table says, state from step to step."""

    def forward(self: TritonEngine, *args: Any, **step: Any) -> Callable[[], Any]:
        launch = forward_gluon.launch(replace(self, arch="sm_90"), *args, **step)
        return lambda: model.run(launch)

    monkeypatch.setattr(TritonEngine, "forward", forward)
    x, mask = tensors(768), MASKS[name](768)
    plan = tritoncp.make_plan(mask, world_size=2, schedule=schedule)
    world = tritoncp.simulate(2)
    outs = world.flex_attention(*(world.shard(t, plan, dim=2) for t in x), plan, enable_gqa=True)
    agrees(x, mask, (world.unshard(outs, plan, dim=2),), tolerance=torch.finfo(BF16).eps)


def test_rows_of_a_state_that_saw_nothing() -> None:
    """A state left where the mask shows nothing is zero and -inf; nothing is written to out."""
    n = 300
    x, mask, state = tensors(n), MASKS["rows that see nothing"](n), None
    state = new_state(x._replace(q=x.q.float(), v=x.v.float()))
    engine = replace(engine_of(x), options={}, arch="sm_90")
    tables = single(mask).tables("cpu", 1, 2)
    model.run(forward_gluon.launch(engine, *x, tables, state=state, store_state=True))
    assert bool((state.l[:, :, 90:256] == 0).all() and (state.m[:, :, 90:256] == -torch.inf).all())
    assert bool((state.acc[:, :, 90:256] == 0).all() and not state.acc.isnan().any())


BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "nobody waits for a copy": ("ready", lambda ring, i, STAGES: None),
    "a stage is not given back": ("release", lambda ring, i, STAGES: None),
    "the next stage's parity": ("place", lambda i, STAGES: (i % STAGES, (i // STAGES + 1) & 1)),
    "the tile before": (
        "tile",
        lambda ring, i, N, D, STAGES: ring.tiles.index((i - 1) % STAGES).reshape([N, D]),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_model_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, broken = BROKEN[name]
    monkeypatch.setattr(forward_gluon, part, SimpleNamespace(fn=broken))
    x, mask = tensors(512), MASKS["causal"](512)
    launch, got = prepared(x, mask, num_stages=2)

    def test() -> None:
        model.run(launch)
        agrees(x, mask, got)

    with pytest.raises((model.Deadlock, AssertionError)):
        test()


# -- compiled -----------------------------------------------------------------------------------------------


def test_softmax_runs_beside_products() -> None:
    """By the order of instructions: scores are issued, then P V, and exponentials come before the latter is
    waited for.  No spill, no product too many, nothing touches a register of a product under way."""
    before = resource_table.read_table()
    jobs = [step_job("gluon", "sm_90", 64), step_job("gluon", "sm_90", 128)]
    for row in resource_table.inspect_jobs(jobs, 1, 300):
        assert resource_table.find_regressions(row, before[resource_table.key(row)]) == []
        assert row["hidden"] == 1 and row["touched"] == 0 and row["warps"] == 12
        assert row["flops"] == 1 and row["spill_bytes"] == row["loop_spills"] == 0 and row["tma"] > 0
        assert row["bound"] == row["overlap"] > 0.95


# -- where it cannot be had -----------------------------------------------------------------------------


def why(x: QKV, mask: Mask, arch: str = "sm_90", **options: Any) -> list[str]:
    engine = replace(engine_of(x), options=options, arch=arch)
    return list(forward_gluon.obstacles(engine, *x, single(mask).tables("cpu", *x.q.shape[:2])))


CAUSAL = blocks(causal(), 512)
OBSTACLES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "architecture": ("those of sm_90, and this is sm_100", lambda: why(tensors(512), CAUSAL, "sm_100")),
    "dtype": ("float32 is not multiplied", lambda: why(QKV(*(t.float() for t in tensors(512))), CAUSAL)),
    "head dims": ("head dims of 64 and 128, and has 64, 80", lambda: why(tensors(512, v_dim=80), CAUSAL)),
    "warps": ("it takes BLOCK_M=128, num_warps=4", lambda: why(tensors(512), CAUSAL, num_warps=8)),
    "stages": ("num_stages of 2 or more", lambda: why(tensors(512), CAUSAL, num_stages=1)),
    "query blocks": (
        "it takes BLOCK_M=128",
        lambda: why(tensors(512), create_block_mask(causal(), None, None, 512, 512, BLOCK_SIZE=(64, 128))),
    ),
    "key blocks": (
        "tiles of 64 or 128 keys that divide blocks of 96",
        lambda: why(tensors(512), create_block_mask(causal(), None, None, 512, 512, BLOCK_SIZE=(128, 96))),
    ),
    "mods": (
        "a score_mod or mask_mod says nothing of layouts",
        lambda: why(tensors(512), blocks(lambda b, h, q, kv: (q * kv) % 3 == 1, 512)),
    ),
    "strides": (
        "leave nothing to descriptors",
        lambda: why(tensors(512)._replace(q=torch.randn(1, 2, 512, 65, dtype=BF16)[..., 1:]), CAUSAL),
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_is_in_the_way_is_named(name: str) -> None:
    said, obstacles = OBSTACLES[name]
    (line,) = obstacles()
    assert said in line
    assert why(tensors(512), CAUSAL) == []


def test_a_step_that_cannot_go_this_way_goes_by_loops_and_says_so() -> None:
    x = tensors(256, v_dim=80)
    engine = replace(engine_of(x), options={"ROUTE": "gluon"}, arch="sm_90")
    out, lse = torch.empty(1, 2, 256, 80), torch.empty(1, 2, 256)
    tables = single(MASKS["causal"](256)).tables("cpu", 1, 2)
    with pytest.warns(
        UserWarning, match="ROUTE='gluon' is requested; this step goes by 'loops': it takes head"
    ):
        launch = engine.forward(*x, tables, out=out, lse=lse)
    assert isinstance(launch, Launch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = tensors(256)
        launch = replace(engine).forward(*x, tables, out=torch.empty(1, 2, 256, 64), lse=lse)
    assert isinstance(launch, Launch) and launch.kernel is forward_gluon.gluon_forward_kernel


def test_it_is_not_for_a_cpu() -> None:
    with pytest.raises(ValueError, match="cannot be interpreted"):
        tritoncp.flex_attention(*qkv(), kernel_options={"ROUTE": "gluon"})
