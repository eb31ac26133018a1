"""Random calls on the CPU engine against dense attention in float64: layouts, losses and score_mods that
other tests do not combine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine")
AUX = AuxRequest(lse=True, max_scores=True)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASKS = ("causal", "window", "documents", "prefix", "none", "by head", "by row", "blocks", "bits", "empty")
SCORES = {
    "none": 0, "alibi": 0, "slopes": 1, "table": 2, "temperature": 3, "softcap": 0, "replaces": 1,
    "bias of keys": 4, "product and sum": 1, "minus": 1, "hides": 0, "undefined where hidden": 2,
}  # fmt: skip
BY_HEAD = ("by head", "blocks", "bits")  # masks that need lists for each head
LAYOUTS = ("dense", "heads inside", "slice", "channels apart", "shared by rows", "one channel")
LOSSES = ("out", "lse", "both", "out of some rows")


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int  # of keys
    group: int  # query heads of each
    length: int
    kv_length: int
    dims: tuple[int, int]
    dtype: torch.dtype
    mask: str
    number: int  # of the mask: its window, prefix or seed
    lists: tuple[bool, bool]  # whether batch rows and heads have lists of their own
    block: Any
    score: str
    layout: str
    loss: str
    size: float  # of q and k
    world: int
    schedule: str
    seed: int = field(repr=False)


@st.composite
def cases(draw: st.DrawFn, longest: int) -> Case:
    length = draw(st.integers(1, longest))
    dtype = draw(st.sampled_from(DTYPES))
    return Case(
        batch=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        length=length,
        kv_length=draw(st.one_of(st.just(length), st.integers(1, longest))),
        dims=(draw(st.sampled_from([2, 7, 16, 33])), draw(st.sampled_from([1, 7, 16, 40]))),
        dtype=dtype,
        mask=draw(st.sampled_from(MASKS)),
        number=draw(st.integers(0, longest)),
        lists=draw(st.tuples(st.booleans(), st.booleans())),
        block=draw(st.sampled_from([4, 8, 16, 24, (8, 16), (16, 8), (32, 5)])),
        score=draw(st.sampled_from(list(SCORES))),
        layout=draw(st.sampled_from(LAYOUTS)),
        loss=draw(st.sampled_from(LOSSES)),
        size=draw(st.sampled_from([1.0, 30.0])) if dtype == torch.float64 else 1.0,
        world=draw(st.sampled_from([1, 1, 1, 2, 3])),
        schedule=draw(st.sampled_from(["auto", "allgather", "ring", "fetch", "ulysses"])),
        seed=draw(st.integers(0, 1 << 20)),
    )


def mask_mod(case: Case) -> Callable[..., Any] | None:
    """Return the mask as a function that tritoncp classifies: a closed form where there is one."""
    n, cut, g = case.number, case.length // 3, torch.Generator().manual_seed(case.number)
    lengths = [cut, min(5, case.length - cut), case.length - cut - min(5, case.length - cut)]
    bits = torch.rand(case.batch, case.heads * case.group, case.length, case.kv_length, generator=g) < 0.3
    same = case.length == case.kv_length
    return {
        "causal": tritoncp.causal(),
        "window": tritoncp.sliding_window(n, n % 7),
        "documents": tritoncp.and_masks(tritoncp.causal(), tritoncp.document(lengths=lengths))
        if same else tritoncp.causal(),
        "prefix": tritoncp.prefix_lm(n),
        "none": None,
        "by head": lambda b, h, q, kv: (q >= kv) & ((q - kv) <= n // (h + 1)),
        "by row": lambda b, h, q, kv: (q + b) // (n % 20 + 1) == kv // (n % 20 + 1),
        "blocks": lambda b, h, q, kv: (q // 16 + kv // 16 + h) % 3 == 0,
        "bits": lambda b, h, q, kv: bits[b, h, q, kv],
        "empty": lambda b, h, q, kv: (q > n) & (kv < n),
    }[case.mask]  # fmt: skip


def captures_of(case: Case) -> Tensor | None:
    """Return the tensor that the score_mod captures, in float64."""
    g, heads = torch.Generator().manual_seed(case.seed), case.heads * case.group
    shapes = [(), (heads,), (heads, case.length + case.kv_length), (case.batch, case.length)]
    shape = [*shapes, (case.batch, heads, case.kv_length)][SCORES[case.score]]
    return torch.randn(shape, generator=g, dtype=torch.float64) if shape else None


def score_mod(case: Case, x: Any) -> Callable[..., Tensor] | None:
    """Return the score_mod; ``x``: what it captures."""
    last, mod = case.kv_length - 1, mask_mod(case)

    def shown(*pair: Tensor) -> Tensor:
        return pair[2] >= 0 if mod is None else mod(*pair)

    return {
        "none": None,
        "alibi": lambda s, b, h, q, kv: s - 0.25 * (h + 1) * (q - kv).abs() / case.length,
        "slopes": lambda s, b, h, q, kv: s + x[h] * (q - kv) / case.length,
        "table": lambda s, b, h, q, kv: s + x[h, q - kv + last],
        "temperature": lambda s, b, h, q, kv: s * x[b, q],
        "softcap": lambda s, b, h, q, kv: 3 * torch.tanh(s / 3),
        "replaces": lambda s, b, h, q, kv: x[h],
        "bias of keys": lambda s, b, h, q, kv: x[b, h, kv] + s,
        "product and sum": lambda s, b, h, q, kv: s * 0.5 + x[h] * torch.sin(s),
        "minus": lambda s, b, h, q, kv: s - torch.exp(x[h]) * kv / case.kv_length,
        "hides": lambda s, b, h, q, kv: torch.where((q + kv + h) % 4 == 0, -math.inf, s),
        # The index of a hidden pair is an error.
        "undefined where hidden": lambda s, b, h, q, kv: (
            s + x[h, torch.where(shown(b, h, q, kv), kv, 1 << 40)]
        ),
    }[case.score]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a tensor with the values of x [B, H, S, D] in memory as the layout says; a leaf."""
    if layout == "heads inside":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "slice":
        x = torch.cat([x, x + 1], 2)[:, :, : x.shape[2]]
    elif layout == "channels apart":
        x = x.mT.contiguous().mT
    elif layout == "one channel":
        x = torch.stack([x, -x], -1)[..., 0]
    return x.detach().requires_grad_()


def leaves_of(case: Case) -> list[Tensor]:
    """Return q, k, v and the captured tensor, if there is one."""
    g, heads, (d, e) = torch.Generator().manual_seed(case.seed), case.heads * case.group, case.dims
    tensors = []
    for n, length, width, size in (
        (heads, case.length, d, case.size), (case.heads, case.kv_length, d, case.size),
        (case.heads, case.kv_length, e, 1.0),
    ):  # fmt: skip
        x = torch.randn(case.batch, n, length, width, generator=g, dtype=torch.float64) * size
        x = x[:1].expand(case.batch, -1, -1, -1) if case.layout == "shared by rows" else x
        tensors.append(laid_out(x.to(case.dtype), case.layout))
    captured = captures_of(case)
    return (
        tensors
        if captured is None
        else [*tensors, captured.to(torch.promote_types(case.dtype, torch.float32)).requires_grad_()]
    )


def visible_pairs(case: Case) -> Tensor:
    mod = mask_mod(case)
    sizes = case.batch, case.heads * case.group, case.length, case.kv_length
    if mod is None:
        return torch.ones(sizes, dtype=torch.bool)
    at = [torch.arange(n) for n in sizes]
    return torch.broadcast_to(mod(*torch.meshgrid(*at, indexing="ij")), sizes)


def called(case: Case, q: Tensor, k: Tensor, v: Tensor, captured: Tensor | None = None) -> list[Tensor]:
    """Return out, lse and max_scores of the call."""
    mod, score = mask_mod(case), score_mod(case, captured)
    own = case.mask in ("by row", "bits") or case.lists[0], case.mask in BY_HEAD or case.lists[1]
    sizes = case.batch if own[0] else 1, case.heads * case.group if own[1] else 1
    everything = mod or (lambda b, h, q, kv: q >= 0)
    mask = tritoncp.create_block_mask(everything, *sizes, case.length, case.kv_length, BLOCK_SIZE=case.block)
    options = {"enable_gqa": True, "return_aux": AUX, "scale": 0.4}
    if case.world == 1:
        out, aux = tritoncp.flex_attention(q, k, v, score, mask, **options)
        return [out, aux.lse, aux.max_scores]
    world = tritoncp.simulate(case.world)
    plan = world.make_plan(mask, schedule=case.schedule)
    shards = [world.shard(x, plan, dim=2, side=side) for x, side in ((q, "q"), (k, "kv"), (v, "kv"))]
    outs, aux = world.flex_attention(*shards, score, plan, **options)
    return [world.unshard(xs, plan, dim=2) for xs in (outs, aux.lse, aux.max_scores)]


def expected(case: Case, q: Tensor, k: Tensor, v: Tensor, captured: Tensor | None = None) -> list[Tensor]:
    return list(dense_attention(q, k, v, visible_pairs(case), score_mod(case, captured), scale=0.4))


def with_gradients(case: Case, results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return the results and the gradients of a loss of them."""
    out, lse, top = results
    g = torch.Generator().manual_seed(case.seed + 1)
    by_out = torch.randn(out.shape, generator=g, dtype=torch.float64).to(case.dtype).double()
    by_lse = torch.randn(lse.shape, generator=g).double()
    if case.loss == "out of some rows":
        by_out = by_out * (by_lse > 0)[..., None]
    loss = (out.double() * by_out).sum() * (case.loss != "lse")
    if case.loss != "out":
        loss = loss + (torch.where(lse == -math.inf, 0, lse).double() * by_lse).sum()
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return [x.detach() for x in (out, lse, top, *grads)]


def check(case: Case) -> None:
    leaves = leaves_of(case)
    got = with_gradients(case, called(case, *leaves), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = with_gradients(case, expected(case, *wide), wide)
    for name, a, b in zip(("out", "lse", "max_scores", "dq", "dk", "dv", "dx"), got, want, strict=False):
        finite = b[b.isfinite()]
        size = max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
        wide_enough = name in ("lse", "max_scores") and case.dtype != torch.float64
        dtype = torch.float32 if wide_enough else case.dtype
        limit = size * {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 16 * torch.finfo(dtype).eps)
        wrong = ~((a.double() == b) | ((a.double() - b).abs() <= limit))
        assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} of {a.numel()} are off"


SAMPLE = settings(phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))


@settings(SAMPLE, max_examples=30)
@given(case=cases(longest=90))
def test_any_call_is_dense_attention(case: Case) -> None:
    check(case)


@pytest.mark.nightly
@settings(SAMPLE, max_examples=1500)
@given(case=cases(longest=300))
def test_many_calls_are_dense_attention(case: Case) -> None:
    check(case)
