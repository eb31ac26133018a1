"""One attention call on the kernels, by tests/device.py, next to the float64 oracle."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.device import DEVICE, rounding
from tritoncp import (
    Mask,
    Plan,
    and_masks,
    causal,
    create_block_mask,
    document,
    full_mask,
    mods,
    sliding_window,
)
from tritoncp.call.engine_factory import kernel_mods
from tritoncp.core.records import replace
from tritoncp.core.upload import upload
from tritoncp.kernels.engine import RequestedRouteWarning, TritonEngine
from tritoncp.kernels.launch import State
from tritoncp.kernels.tile_rules import architecture, widest_route
from tritoncp.kernels.toolchain import fused_fault
from tritoncp.planning.placement import Placement
from tritoncp.planning.step_tables import BackwardStep, ForwardStep
from tritoncp.reference.dense import dense_attention

F32, F64 = torch.float32, torch.float64
ScoreOf = Callable[..., Callable[..., Tensor]]  # captured tensors -> score_mod
Start = tuple[Tensor, Tensor] | None  # gradients of out and lse to start from; None: no backward pass
# Largest error over the largest magnitude; float32 as PyTorch's own context-parallel suite (2e-6 + 1e-5).
TOLERANCE = {F32: 1e-5, F64: 1e-12} | {x: 4 * torch.finfo(x).eps for x in (torch.bfloat16, torch.float16)}


def blocks_of(mod_of: Callable[[int], Any]) -> Callable[..., Mask]:
    return lambda n, block=32: create_block_mask(mod_of(n), None, None, n, n, BLOCK_SIZE=block)


MASKS: dict[str, Callable[..., Mask]] = {  # masks of n tokens in blocks, for each route
    "full": lambda n, block=32: full_mask(n, n, block=block),
    "causal": blocks_of(lambda n: causal()),
    "window": blocks_of(lambda n: sliding_window(9, 3)),
    "intervals": blocks_of(lambda n: and_masks(causal(), document(lengths=[n // 3, n - n // 3]))),
    "mask_mod": blocks_of(lambda n: lambda b, h, q, kv: (q * kv) % 3 != 1),
}


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    max_scores: Tensor
    grads: tuple[Tensor, ...]  # of q, k, v, then of the captured tensors


class Answer(NamedTuple):
    """Results and gradients of a call without captured tensors."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class QKV(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def qkv(q: int = 64, kv: int | None = None, *, batch: int = 1, heads: int = 1, kv_heads: int | None = None,
        dim: int = 16, v_dim: int | None = None, dtype: torch.dtype = F32) -> QKV:  # fmt: skip
    """Unit normals: q [batch, heads, q, dim], k and v [batch, kv_heads, kv, dim | v_dim]."""
    kv_shape = batch, kv_heads or heads, q if kv is None else kv
    shapes = (batch, heads, q, dim), (*kv_shape, dim), (*kv_shape, v_dim or dim)
    return QKV(*(torch.randn(shape, dtype=F64).to(dtype) for shape in shapes))


def cotangents(x: QKV, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of out and lse to start from."""
    shape = x.q.shape[:3]
    dlse = torch.randn(shape, dtype=F64).to(F64 if x.q.dtype == F64 else F32)
    return torch.randn(*shape, x.v.shape[3], dtype=F64).to(dtype or x.q.dtype), dlse


def run(x: QKV, mask: Any = None, score: ScoreOf | None = None, captured: Sequence[Tensor] = (), *,
        start: Start, scale: float | None = None, mesh: Any = None, **options: Any) -> Results:  # fmt: skip
    """Run the public call, with tritoncp's engine of this device."""
    leaves, own = _leaves(x, captured, start)
    out, aux = tritoncp.flex_attention(
        *leaves, score and score(*own), mask, scale, enable_gqa=True, kernel_options=options,
        return_aux=AuxRequest(lse=True, max_scores=True), mesh=mesh,
    )  # fmt: skip
    return _results(out, aux.lse, aux.max_scores, leaves, own, start)


def oracle(x: QKV, mask: Any = None, score: ScoreOf | None = None, captured: Sequence[Tensor] = (), *,
           start: Start, scale: float | None = None) -> Results:  # fmt: skip
    """Run the same call in dense float64."""
    captured = [t.to(F64) if t.is_floating_point() else t for t in captured]
    leaves, own = _leaves(QKV(*(t.to(F64) for t in x)), captured, start)
    got = dense_attention(*leaves, mask, score and score(*own), scale=scale)
    return _results(*got, leaves, own, start and (start[0].to(F64), start[1].to(F64)))


def over_ranks(x: QKV, plan: Plan, score: ScoreOf | None = None, captured: Sequence[Tensor] = (), *,
               start: Start, scale: float | None = None, **options: Any) -> Results:  # fmt: skip
    """The global answer of all ranks of a simulated world, sharded and gathered by the plan."""
    leaves, own = _leaves(x, captured, start)
    world = tritoncp.simulate(plan.world_size)
    shards = [world.shard(t, plan, dim=2, side=side) for t, side in zip(leaves, ("q", "kv", "kv"))]
    outs, aux = world.flex_attention(
        *shards, score and score(*own), plan, scale=scale, enable_gqa=True, kernel_options=options,
        return_aux=AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    for rank, (out, lse) in enumerate(zip(outs, aux.lse)):
        padding = (~plan.for_rank(rank).valid)[:, None].expand(out.shape[0], out.shape[1], -1)
        assert bool((out[padding] == 0).all() and (lse[padding] == -math.inf).all())
    out, lse, top = (world.unshard(t, plan, dim=2) for t in (outs, aux.lse, aux.max_scores))
    return _results(out, lse, top, leaves, own, start)


def agree(got: Results, want: Results, tolerance: float | None = None) -> None:
    """Assert that every output and gradient of two computations is close."""
    names = "out", "lse", "max_scores", "dq", "dk", "dv", *(f"captured {i}" for i in range(9))
    for name, a, b in zip(names, (*got[:3], *got.grads), (*want[:3], *want.grads)):
        close(a, b, name, tolerance)


def _leaves(x: QKV, captured: Sequence[Tensor], start: Start) -> tuple[list[Tensor], list[Tensor]]:
    """Make leaves with the same strides; they require grad if there is a gradient to start from."""
    leaves = [t.detach() for t in x], [t.detach().clone() for t in captured]
    for t in itertools.chain(*leaves):
        t.requires_grad_(start is not None and t.is_floating_point())
    return leaves


def _results(
    out: Tensor, lse: Tensor, top: Tensor, leaves: list[Tensor], own: list[Tensor], start: Start
) -> Results:
    if start is None:
        return Results(out, lse, top, ())
    leaves = [*leaves, *(t for t in own if t.requires_grad)]
    grads = torch.autograd.grad([out, lse], leaves, start, materialize_grads=True)
    return Results(out.detach(), lse.detach(), top.detach(), grads)


def check(x: QKV, mask: Any = None, score: ScoreOf | None = None, captured: Sequence[Tensor] = (), *,
          scale: float | None = None, start: Start = None, **options: Any) -> Results:  # fmt: skip
    """Kernels and oracle agree on out, lse, max_scores and every gradient."""
    start = start or cotangents(x)
    got = run(x, mask, score, captured, start=start, scale=scale, **options)
    want = oracle(x, mask, score, captured, start=start, scale=scale)
    agree(got, want)
    return got


def transposed_products() -> AbstractContextManager[Any]:
    """Expect an error where GPUs are reported to compute products of transposed tiles wrong."""
    if fused_fault(architecture(DEVICE)) is None:
        return contextlib.nullcontext()
    return pytest.raises(ValueError, match=r"kernel option .* wrong gradients")


@contextlib.contextmanager
def route(name: str) -> Iterator[None]:
    """Raise where a step goes by the loops, as it does if the route's results are wrong; expect a warning of
    it on devices without the route."""
    if not widest_route(architecture(DEVICE), name):
        with pytest.warns(RequestedRouteWarning, match="loops"):
            yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", RequestedRouteWarning)
        yield


def close(got: Tensor, want: Tensor, name: str, tolerance: float | None = None) -> None:
    """Assert equality within the dtype's tolerance of the largest value; infinities in the same places, no
    NaN."""
    assert got.shape == want.shape, name
    assert not bool(got.isnan().any()), f"{name} has NaN"
    finite = want.isfinite()
    assert torch.equal(got[~finite].to(F64), want[~finite].to(F64)), f"infinities of {name}"
    error = (got.to(F64) - want.to(F64))[finite].abs().max().item() if bool(finite.any()) else 0.0
    size = max(1.0, want[finite].abs().max().item() if bool(finite.any()) else 0.0)
    tolerance = rounding(name) * (TOLERANCE[got.dtype] if tolerance is None else tolerance)
    assert error <= tolerance * size, f"{name} is {error:.3g} off, {tolerance * size:.3g} is allowed"


def same(got: Any, want: Any) -> None:
    """Assert that tensors, or tuples of them, are equal bit for bit."""
    if isinstance(got, Tensor):
        assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))
        return
    assert len(got) == len(want)
    for a, b in zip(got, want):
        same(a, b)


# -- one step of an engine by itself ------------------------------------------------------------------


def keys_between(plan: Plan, begin: int, end: int) -> Plan:
    """A step of the plan whose KV buffer holds only the keys [begin, end)."""
    first = [begin, *range((begin // plan.kv.block + 1) * plan.kv.block, end, plan.kv.block)]
    last = [*first[1:], end]
    slots = torch.tensor(
        [[(a - begin, a, b - a) for a, b in zip(first, last)]], dtype=torch.int32, device="cpu"
    )  # as all tables of plans
    kv = Placement(plan.kv.length, plan.kv.block, (slots,), (end - begin,))
    return replace(plan, kv=kv, handle=None)


def engine_of(
    x: QKV, mask_mod: Callable[..., Tensor] | None = None, score_mod: Callable[..., Tensor] | None = None,
    **options: Any,
) -> TritonEngine:  # fmt: skip
    """An engine with these mods, without gradients of the score_mod's captures."""
    mask = None if mask_mod is None else mods.mask_mod(mask_mod)
    score = score_mod and mods.score_mod(score_mod, F64 if x.q.dtype == F64 else F32)
    caps = score.caps(upload(score.tensors, x.q.device)) if score else ()
    bound = kernel_mods(mask, score, caps)
    return TritonEngine(bound, 1 / math.sqrt(x.q.shape[3]), options)


def single(mask: Mask) -> Plan:
    return tritoncp.make_plan(mask)


def new_state(x: QKV) -> State:
    """Allocate a state without initialising its memory."""
    stats = F64 if x.q.dtype == F64 else F32
    shape = x.q.shape[:3]
    acc = torch.empty(*shape, x.v.shape[3], dtype=stats)
    return State(acc, torch.empty(shape, dtype=stats), torch.empty(shape, dtype=stats))


def forward(engine: TritonEngine, x: QKV, plan: Plan, **state: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of one step over poisoned memory."""
    out = torch.empty(*x.q.shape[:3], x.v.shape[3], dtype=x.q.dtype)
    lse = torch.empty(x.q.shape[:3], dtype=F64 if x.q.dtype == F64 else F32)
    engine.forward(ForwardStep(*x, plan.tables(x.q.device, *x.q.shape[:2]), out, lse, **state))()
    return out, lse


class Grads(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward(
    engine: TritonEngine,
    x: QKV,
    plan: Plan,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    into: Grads | None = None,
    add: bool = False,
) -> Grads:
    """dq, dk, dv of one step over poisoned memory, or added to ``into``."""
    delta = torch.empty_like(lse)
    engine.delta(out, dout, None, delta)()
    got = into or Grads(*(torch.empty_like(t, dtype=lse.dtype) for t in x))
    step = BackwardStep(*x, dout, lse, delta, plan.tables(x.q.device, *x.q.shape[:2]))
    engine.dq(step, got.dq, add=add)()
    engine.dkdv(step, got.dk, got.dv, add=add, split=1)()
    return got
