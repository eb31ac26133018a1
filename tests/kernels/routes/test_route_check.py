"""Verification of routes against the loops before their first use: right routes run, wrong ones are replaced
by the loops.  The interpreter runs no other route, so the loops replace one, and faults are injected."""

import ast
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError

import tritoncp
from tests.kernels.support import harness
from tests.kernels.support.harness import close, cotangents, over_ranks, qkv, run, same
from tritoncp import Mask, create_block_mask
from tritoncp.kernels import engine, options
from tritoncp.kernels.launch import Launches
from tritoncp.kernels.operands import Mods
from tritoncp.kernels.routes import route_check
from tritoncp.planning.step_tables import ForwardStep

PLACE = ast.parse("x = 1").body[0]
ROUTE = {"ROUTE": "gluon"}
N = 48
FINE, COARSE = torch.float16, torch.bfloat16  # tolerance of right routes; error of wrong ones
Damage = Callable[[ForwardStep], None]


def blocks(mod: Callable[..., torch.Tensor], n: int, batch: int = 1, heads: int = 1) -> Mask:
    return create_block_mask(mod, batch, heads, n, n, BLOCK_SIZE=16)


MASKS: dict[str, Callable[[int], Mask]] = {
    **{name: partial(of_tokens, block=16) for name, of_tokens in harness.MASKS.items()},
    "of batch rows and heads": lambda n: blocks(lambda b, h, q, kv: q + 8 * b >= kv + 16 * h, n, 2, 2),
    "rows that see nothing": lambda n: blocks(lambda b, h, q, kv: (q >= 16) & (q != 20) & (kv < 32), n),
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat kernels as compiled."""
    monkeypatch.setattr(route_check, "COMPILED", True)
    monkeypatch.setattr(route_check, "_VERDICTS", {})


def damaged(monkeypatch: pytest.MonkeyPatch, damage: Damage) -> list[str]:
    """Make the route apply ``damage`` to its results; return a list that names each of its launches."""
    launched = []

    def launch(own: Any, step: ForwardStep) -> Launches:
        launched.append("launch")
        return Launches((own.loops(step), lambda: damage(step)))

    broken = SimpleNamespace(launch=launch, obstacles=lambda *args: iter(()))
    monkeypatch.setattr(engine, "route_of", lambda name: broken)
    return launched


@pytest.mark.sample(1)
@pytest.mark.parametrize("mask", MASKS)
def test_a_route_with_correct_results_is_used(
    mask: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps pass states, and some rows are not written by kernels. The verdict is logged."""
    caplog.set_level("DEBUG", "tritoncp")
    batch = 2 if "batch" in mask else 1
    x, block_mask = qkv(N, batch=batch, heads=batch, dtype=FINE), MASKS[mask](N)
    world, launched = tritoncp.simulate(2), damaged(monkeypatch, lambda step: None)
    plan = world.make_plan(block_mask, schedule="ring")
    options = {"return_lse": True, "kernel_options": ROUTE}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ROUTE=.*its answer")
        results = [tritoncp.flex_attention(*x, block_mask, **options)]
        ring = world.flex_attention(*(world.shard(t, plan, dim=2) for t in x), plan, **options)
        results.append([world.unshard(shards, plan, dim=2) for shards in ring])
    assert launched
    assert "route gluon on cpu: agrees with 'loops'" in caplog.messages
    want = tritoncp.flex_attention(*x, block_mask, return_lse=True)
    for out, lse in results:
        close(out, want[0], "out", 2 * torch.finfo(FINE).eps)
        close(lse, want[1], "lse")


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.usefixtures("in_pieces")
def test_results_of_a_trial_have_other_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered heads are not adjacent in out, so the verification has other launches."""
    x, mask = qkv(N, batch=2, heads=4, kv_heads=2, dtype=COARSE), MASKS["causal"](N)
    plan = tritoncp.make_plan(mask, world_size=2, rank=0, schedule="allgather")
    want = over_ranks(x, plan, start=None)
    launched = damaged(monkeypatch, lambda step: None)
    same(over_ranks(x, plan, start=None, **ROUTE).out, want.out)
    assert launched


def one_row(step: ForwardStep) -> None:
    """A small error in one row."""
    if step.store_state:
        step.state[2][..., 5] *= 1.1
    else:
        step.out[..., 5, :] *= 1.1


def forgotten(step: ForwardStep) -> None:
    if step.store_state:
        step.state[0][..., 3, :] = torch.nan
    else:
        step.out[..., 3, :] = torch.nan


def lse(step: ForwardStep) -> None:
    """A wrong lse beside a right out, which would spoil the backward pass."""
    if not step.store_state:
        step.lse[..., 1] += 0.05


@pytest.mark.sample(1)
@pytest.mark.bits
@pytest.mark.parametrize("damage", [one_row, forgotten, lse], ids=lambda f: f.__name__)
def test_a_route_with_wrong_results_is_not_used(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = qkv(N, dtype=COARSE), MASKS["causal"](N)
    start = cotangents(x)
    plan = tritoncp.make_plan(mask, world_size=2, rank=0, schedule="ring")
    alone, ranks = run(x, mask, start=start), over_ranks(x, plan, start=None)
    damaged(monkeypatch, damage)
    with pytest.warns(
        engine.RequestedRouteWarning,
        match="'gluon' is requested; this step goes by 'loops': its results are not",
    ):
        got = run(x, mask, start=start, **ROUTE)
    same((got.out, got.lse, got.grads), (alone.out, alone.lse, alone.grads))
    with pytest.warns(UserWarning, match="its results are not those of 'loops': (out|lse) differs in"):
        got = over_ranks(x, plan, start=None, **ROUTE)
    same((got.out, got.lse), (ranks.out, ranks.lse))


@pytest.mark.parametrize("key", ["out", "lse"])
def test_results_agree_within_rounding(key: str) -> None:
    """The tolerance of out is two units of bfloat16 of the max of its row; of statistics, a thousandth,
    relative and absolute. Two NaN agree."""
    want = torch.randn(2, 3, 4, 5) * torch.logspace(-3, 2, 4)[:, None]
    largest = want.abs().amax(-1, keepdim=True).expand_as(want)
    room = 2 * 2**-7 * largest if key == "out" else 1e-3 * (want.abs() + 1)
    want[0, 1, 2, 3] = torch.nan

    def difference(share: Tensor) -> str | None:
        got = want + share * room
        return route_check._describe_difference({key: got}, {key: want}, torch.bfloat16)

    within = torch.empty_like(want).uniform_(-0.99, 0.99)
    assert difference(within) is None
    beyond = within.clone()
    beyond[1, 2, 3, 4], beyond[0, 0, 0, 1], beyond[1, 0, 1, 0] = 1.01, -1.01, torch.nan
    assert f"{key} differs in 3 of 120 numbers" in str(difference(beyond))


@pytest.mark.long
def test_a_kind_of_step_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, numbers of heads and tensors do not make another kind of step; dtypes, masks, mods, and query
    heads that share a KV head do."""
    launched = damaged(monkeypatch, one_row)

    def attend(
        mask: str, dtype: torch.dtype = torch.bfloat16, n: int = N, shape: Any = None, **more: Any
    ) -> int:
        before, x = len(launched), qkv(n, dtype=dtype, **(shape or {}))
        with pytest.warns(UserWarning, match="its results are not those of 'loops'"):
            tritoncp.flex_attention(
                *x, block_mask=MASKS[mask](n), kernel_options=ROUTE, enable_gqa=True, **more
            )
        return len(launched) - before

    assert attend("causal") == 1
    assert attend("causal") == 0 == attend("causal", n=2 * N)
    assert attend("causal", torch.float16) == 1 == attend("full")
    for shape, tries in (
        ({"heads": 2, "batch": 3}, 0),
        ({"heads": 2, "kv_heads": 1}, 1),
        ({"heads": 6, "kv_heads": 3}, 0),
        ({"dim": 32, "v_dim": 16}, 1),
        ({"dim": 16, "v_dim": 32}, 1),
    ):
        assert attend("causal", shape=shape) == tries
    assert attend("causal", score_mod=lambda s, b, h, q, kv: 2 * s) == 1


@pytest.mark.bits
def test_a_measured_route_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured tables may come from another GPU, or another Triton."""
    x, mask = qkv(128, dtype=COARSE), MASKS["causal"](128)
    want = tritoncp.flex_attention(*x, mask)
    tritoncp.plan_cache_clear()  # with the engine, which knows its route
    monkeypatch.setattr(engine.TritonEngine, "route", "gluon")
    damaged(monkeypatch, one_row)
    with pytest.warns(
        UserWarning, match="'gluon' is in the table of measured tiles; this step goes by 'loops'"
    ):
        same(tritoncp.flex_attention(*x, mask), want)


def test_options_of_tiles_and_programs_win_over_the_measured_route() -> None:
    measured = {"CONFIGS": (("route", tuple(ROUTE.items())),)}
    for setting, route in (
        ({}, "gluon"),
        ({"SPLIT_KV": 1, "PACK_GQA": False, "bwd_BLOCK_M1": 64}, "gluon"),
        *(({name: 16}, "loops") for name in ("BLOCK_M", "fwd_BLOCK_N", "num_warps")),
        *((one, "loops") for one in ({"SPLIT_KV": 2}, {"PACK_GQA": True}, {"ROUTE": "loops"})),
    ):
        assert engine.TritonEngine(Mods(), 1.0, measured | setting).route == route


@pytest.mark.bits
@pytest.mark.parametrize(
    "error", [CompilationError("def kernel():\n  ...", PLACE, "no such word"), RuntimeError()]
)
def test_a_route_that_cannot_be_compiled_is_not_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route that this version of Triton does not compile is replaced by the loops."""

    def fail(step: ForwardStep) -> None:
        raise error

    x, mask = qkv(N, dtype=COARSE), MASKS["causal"](N)
    want = tritoncp.flex_attention(*x, mask)
    damaged(monkeypatch, fail)
    said = "no such word" if str(error) else "no message"
    with pytest.warns(UserWarning, match=f"goes by 'loops': it fails: {type(error).__name__}: .*{said}"):
        same(tritoncp.flex_attention(*x, block_mask=mask, kernel_options=ROUTE), want)


def test_loops_are_the_default_and_every_other_route_has_a_launcher() -> None:
    assert options.ROUTES[0] == "loops"
    for route in options.ROUTES[1:]:
        assert callable(engine.route_of(route).launch) and callable(engine.route_of(route).obstacles)
