"""Random cases through public names only, against an independent dense float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tritoncp

Pairs = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, q, kv) -> who sees whom
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SCHEDULES = ("auto", "allgather", "ring", "fetch", "ulysses", "ulysses+ring")
BALANCERS = (None, "contiguous", "head_tail", "ptrr", "locality", "per_document")
BLOCKS = (8, 16, 32, 40, (16, 32), (32, 8))
SCORES = ("none", "softcap", "alibi", "by batch row", "learned table", "learned temperature", "hides")


class Mask(NamedTuple):
    """A mask_mod for tritoncp, and its visible pairs written independently; ``varies``: whether they differ
    between batch rows or heads, so that each needs lists of its own."""

    name: str
    mod: Any
    visible: Pairs
    varies: bool = False


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int  # of keys
    group: int  # query heads of each
    length: int
    kv_length: int
    dims: tuple[int, int]
    dtype: torch.dtype
    mask: Mask
    own_lists: bool  # whether lists are made for each batch row and head, or once for all
    score: str
    sinks: bool
    scale: float | None
    block: Any
    world: int
    schedule: str
    balancer: str | None
    seed: int = field(repr=False)


# -- random cases -----------------------------------------------------------------------------------------


@st.composite
def leaf_masks(draw: st.DrawFn, length: int, batch: int) -> Mask:
    kind = draw(st.sampled_from(["causal", "window", "documents", "documents by row", "prefix", "mask_mod"]))
    if kind == "causal":
        return Mask("causal", tritoncp.causal(), lambda b, h, q, kv: q >= kv)
    if kind == "window":
        left, right = draw(st.integers(-1, length)), draw(st.integers(-1, 20))
        most = 1 << 20
        before, behind = (edge if edge >= 0 else most for edge in (left, right))
        return Mask(
            f"window({left}, {right})",
            tritoncp.sliding_window(left, right),
            lambda b, h, q, kv: (q - kv <= before) & (kv - q <= behind),
        )
    if kind == "prefix":
        prefix = draw(st.integers(0, length))
        return Mask(
            f"prefix({prefix})",
            tritoncp.prefix_lm(prefix),
            lambda b, h, q, kv: (kv <= q) | (kv < prefix),
        )
    if kind == "mask_mod":
        return draw(python_masks())
    cuts = [sorted(draw(st.lists(st.integers(0, length), max_size=4))) for _ in range(batch)]
    ids = torch.stack([sum((torch.arange(length) >= cut).long() for cut in [0, *row]) for row in cuts])
    if kind == "documents":
        only = ids[0]
        return Mask(
            f"documents({cuts[0]})",
            tritoncp.document(ids=only),
            lambda b, h, q, kv: only[q] == only[kv],
        )
    by_row = tritoncp.document(ids=ids)
    return Mask(f"documents({cuts})", by_row, lambda b, h, q, kv: ids[b, q] == ids[b, kv], True)


@st.composite
def python_masks(draw: st.DrawFn) -> Mask:
    """Draw Python functions, which have no closed form."""
    m, r, shift = draw(st.integers(1, 5)), draw(st.integers(0, 4)), draw(st.integers(0, 30))
    table = torch.rand(3, 61, generator=torch.Generator().manual_seed(shift)) < 0.5
    mods: dict[str, Pairs] = {
        f"every {m}th of {r}": lambda b, h, q, kv: (q - kv) % m <= r,
        f"blocks of {shift + 1}": lambda b, h, q, kv: q // (shift + 1) == kv // (shift + 1),
        f"by head and row, {shift}": lambda b, h, q, kv: (q + kv + 7 * h + 3 * b) % 5 != shift % 5,
        f"table {shift}": lambda b, h, q, kv: table[(q + b) % 3, kv % 61],
        f"rows from {shift}": lambda b, h, q, kv: q >= shift,
        f"near {shift}": lambda b, h, q, kv: (q - kv).abs() <= shift,
    }
    name = draw(st.sampled_from(list(mods)))
    return Mask(name, mods[name], mods[name], name.startswith(("by", "table")))


@st.composite
def masks(draw: st.DrawFn, length: int, batch: int, depth: int = 2) -> Mask:
    """Draw closed forms and Python functions, combined with ``and``, ``or`` and ``not``."""
    how = draw(st.sampled_from(["leaf", "leaf", "and", "or", "not"])) if depth else "leaf"
    if how == "leaf":
        return draw(leaf_masks(length, batch))
    one = draw(masks(length, batch, depth - 1))
    if how == "not":
        return Mask(f"not {one.name}", tritoncp.not_(one.mod), lambda *at: ~one.visible(*at), one.varies)
    other = draw(masks(length, batch, depth - 1))
    name, varies = f"({one.name} {how} {other.name})", one.varies or other.varies
    if how == "and":
        both = tritoncp.and_masks(one.mod, other.mod)
        return Mask(name, both, lambda *at: one.visible(*at) & other.visible(*at), varies)
    return Mask(
        name, tritoncp.or_masks(one.mod, other.mod), lambda *at: one.visible(*at) | other.visible(*at), varies
    )


@st.composite
def cases(draw: st.DrawFn, longest: int) -> Case:
    length, batch = draw(st.integers(1, longest)), draw(st.integers(1, 2))
    kv_length = draw(st.one_of(st.just(length), st.integers(1, longest)))
    return Case(
        batch=batch,
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        length=length,
        kv_length=kv_length,
        dims=(draw(st.sampled_from([1, 3, 8, 16, 24, 40])), draw(st.sampled_from([1, 5, 16, 40]))),
        dtype=draw(st.sampled_from(DTYPES)),
        mask=draw(masks(max(length, kv_length), batch)),
        own_lists=draw(st.booleans()),
        score=draw(st.sampled_from(SCORES)),
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, 1.0, -0.2])),
        block=draw(st.sampled_from(BLOCKS)),
        world=draw(st.integers(1, 5)),
        schedule=draw(st.sampled_from(SCHEDULES)),
        balancer=draw(st.sampled_from(BALANCERS)),
        seed=draw(st.integers(0, 1 << 20)),
    )


# -- results of a case --------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Tensors of a call: q, k, v, sinks or None, and the learned capture of the score_mod, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    learned: Tensor | None

    def leaves(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def to(self, dtype: torch.dtype | None) -> Layer:
        """Return copies that require gradients."""
        return Layer(*(x if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in self))


def layer_of(case: Case) -> Layer:
    g = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(case.dtype)

    heads, (d, e) = case.heads * case.group, case.dims
    shapes = {"learned table": (heads, 33), "learned temperature": (case.batch, case.length)}
    return Layer(
        normal(case.batch, heads, case.length, d),
        normal(case.batch, case.heads, case.kv_length, d),
        normal(case.batch, case.heads, case.kv_length, e),
        normal(heads) if case.sinks else None,
        normal(*shapes[case.score]) if case.score in shapes else None,
    )


def score_of(case: Case, learned: Any) -> Callable[..., Tensor] | None:
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(case.heads * case.group)])
    return {
        "none": None,
        "softcap": lambda s, b, h, q, kv: 3 * torch.tanh(s / 3),
        "alibi": lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs(),
        "by batch row": lambda s, b, h, q, kv: s * (b + 1) + (h - q % 3) * 0.25,
        "learned table": lambda s, b, h, q, kv: s + learned[h, (q - kv).clamp(-16, 16) + 16],
        "learned temperature": lambda s, b, h, q, kv: s * learned[b, q],
        "hides": lambda s, b, h, q, kv: torch.where((q + kv + h) % 4 == 0, -math.inf, s),
    }[case.score]


def dense(case: Case, layer: Layer) -> tuple[Tensor, Tensor]:
    """Compute out and lse densely."""
    q, k, v = layer.q, *(x.repeat_interleave(case.group, 1) for x in (layer.k, layer.v))
    at = [torch.arange(n) for n in (*q.shape[:3], k.shape[2])]
    b, h, i, j = (x.view([-1 if d == axis else 1 for d in range(4)]) for axis, x in enumerate(at))
    scores = q @ k.mT * (case.dims[0] ** -0.5 if case.scale is None else case.scale)
    mod = score_of(case, layer.learned)
    scores = scores if mod is None else mod(scores, b, h, i, j)
    scores = scores.masked_fill(~case.mask.visible(b, h, i, j), -math.inf)
    filled = (scores > -math.inf).any(-1)
    scores = torch.where(filled[..., None], scores, 0)
    out = torch.where(filled[..., None], scores.softmax(-1) @ v, 0)
    lse = torch.where(filled, scores.logsumexp(-1), -math.inf)
    if layer.sinks is None:
        return out, lse
    sink = layer.sinks[:, None].expand_as(lse)
    total = torch.where(filled, torch.logaddexp(torch.where(filled, lse, 0), sink), sink)
    return out * torch.where(filled, torch.where(filled, lse, 0) - total, 0).exp()[..., None], total


def called(case: Case, layer: Layer) -> tuple[Tensor, Tensor]:
    """Compute out and lse on all ranks of a simulated world, or on one device."""
    lists = (case.batch, case.heads * case.group) if case.own_lists or case.mask.varies else (1, 1)
    sizes = *lists, case.length, case.kv_length
    mask = tritoncp.create_block_mask(case.mask.mod, *sizes, BLOCK_SIZE=case.block)
    options = {"enable_gqa": True, "return_lse": True, "sinks": layer.sinks, "scale": case.scale}
    score = score_of(case, layer.learned)
    if case.world == 1:
        return tritoncp.flex_attention(layer.q, layer.k, layer.v, score, mask, **options)
    world = tritoncp.simulate(case.world)
    plan = world.make_plan(mask, balancer=case.balancer, schedule=case.schedule)
    sides = zip(layer[:3], ("q", "kv", "kv"))
    shards = [world.shard(x, plan, dim=2, side=side) for x, side in sides]
    results = world.flex_attention(*shards, score, plan, **options)
    out, lse = (world.unshard(xs, plan, dim=2) for xs in results)
    return out, lse


def answers(case: Case, layer: Layer, call: Callable[[Case, Layer], tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return out, lse, and the gradients of one loss of both."""
    out, lse = call(case, layer)
    g = torch.Generator().manual_seed(case.seed + 1)
    by_out, by_lse = (torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (out, lse))
    finite_lse = torch.where(lse == -math.inf, 0, lse)
    loss = (out.double() * by_out.to(case.dtype).double()).sum() + (
        finite_lse.double() * by_lse.float()
    ).sum()
    grads = torch.autograd.grad(loss, layer.leaves(), materialize_grads=True)
    return [out.detach(), lse.detach(), *grads]


def check(case: Case) -> None:
    layer = layer_of(case)
    got = answers(case, layer.to(None), called)
    want = answers(case, layer.to(torch.float64), dense)
    names = ["out", "lse", "dq", "dk", "dv", *(["dsinks"] if case.sinks else []), "dlearned"]
    for name, a, b in zip(names, got, want, strict=False):
        assert a.shape == b.shape and a.dtype == (a.dtype if name == "lse" else case.dtype), name
        same = a.double() == b
        finite = b[b.isfinite()]
        size = max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
        limit = tolerance(case.dtype, name) * size
        wrong = ~(same | ((a.double() - b).abs() <= limit))
        assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} of {a.numel()} are off"


def tolerance(dtype: torch.dtype, name: str) -> float:
    """Return the tolerance relative to the largest number. Statistics are float32 for all inputs but float64;
    gradients of captures and sinks are sums over all pairs or rows."""
    if name == "lse":
        return {torch.float64: 1e-11}.get(dtype, 2e-5)
    grown = 4 if name in ("dsinks", "dlearned") else 1
    return grown * {torch.float64: 1e-10, torch.float32: 5e-5}.get(dtype, 8 * torch.finfo(dtype).eps)


SAMPLE = settings(phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
EAGER = pytest.mark.parametrize("engine", ["cpu"], indirect=True)
KERNELS = pytest.mark.parametrize("engine", ["kernels"], indirect=True)


@EAGER
@settings(SAMPLE, max_examples=50)
@given(case=cases(longest=70))
def test_any_case_is_the_oracle(engine: str, case: Case) -> None:
    check(case)


@KERNELS
@settings(SAMPLE, max_examples=3)
@given(case=cases(longest=30))
def test_any_case_is_the_oracle_in_kernels(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.nightly
@EAGER
@settings(SAMPLE, max_examples=1500)
@given(case=cases(longest=200))
def test_many_cases_are_the_oracle(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.nightly
@KERNELS
@settings(SAMPLE, max_examples=150)
@given(case=cases(longest=150))
def test_many_cases_are_the_oracle_in_kernels(engine: str, case: Case) -> None:
    check(case)
