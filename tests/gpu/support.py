"""Helpers of the tests on a real GPU: sizes, tensors, and the rule for rounding.

Nothing here insists on a GPU. `TRITON_INTERPRET=1 pytest --noconftest tests/gpu` runs the same tests on
interpreted kernels and smaller shapes, which shows that the tests themselves are sound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tritoncp.masks import (
    Mask,
    and_masks,
    causal,
    create_block_mask,
    document,
    full_mask,
    prefix_lm,
    sliding_window,
)
from tritoncp.reference.dense import allowed_error, dense_attention, eager_attention, largest_error

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
BF16 = torch.bfloat16 if ON_GPU else FP16  # the interpreter cuts bfloat16 off, it does not round
N = 1000 if ON_GPU else 150  # no multiple of any block
BLOCK = 128 if ON_GPU else 64
ScoreOf = Callable[..., Callable[..., Tensor]]  # captured tensors -> score_mod


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    max_scores: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: tuple[Tensor, ...] = ()


class QKV(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=FP32).to(dtype)


def qkv(*, n: int = N, kv: int | None = None, batch: int = 1, heads: int = 2, kv_heads: int = 1,
        dim: int = 64, v_dim: int | None = None, dtype: torch.dtype = BF16) -> QKV:  # fmt: skip
    """Draw unit-normal tensors, and the gradients of out and lse for the backward pass."""
    v_dim, kv = v_dim or dim, kv or n
    q, dout = (normal(batch, heads, n, width, dtype=dtype) for width in (dim, v_dim))
    k, v = (normal(batch, kv_heads, kv, width, dtype=dtype) for width in (dim, v_dim))
    return QKV(q, k, v, dout, normal(batch, heads, n, dtype=FP32))


# -- masks ----------------------------------------------------------------------------------------------


def block_mask(mod: Callable[..., Tensor], n: int = N, batch: int = 1, heads: int = 1) -> Mask:
    return create_block_mask(mod, batch, heads, n, n, DEVICE, BLOCK)


def documents(n: int) -> Any:
    lengths = [n // 3, 2, n // 5]
    ids = torch.arange(4).repeat_interleave(torch.tensor([*lengths, n - sum(lengths)]))
    return and_masks(causal(), document(ids=ids.to(DEVICE)))


def some_rows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A mask with single rows, and blocks of rows, that see no key."""
    return (q >= kv) & (q % 5 != 2) & ((q < BLOCK) | (q >= 2 * BLOCK))


def random_bits(n: int, heads: int) -> Callable[..., Tensor]:
    table = torch.rand(heads, n, n, device=DEVICE) < 0.3
    return lambda b, h, q, kv: table[h, q, kv]


MASKS: dict[str, Callable[[], Mask]] = {
    "full": lambda: full_mask(N, N, block=BLOCK),
    "causal": lambda: block_mask(causal()),
    "window": lambda: block_mask(sliding_window(BLOCK + 30, 7)),
    "documents": lambda: block_mask(documents(N)),
    "prefix": lambda: block_mask(prefix_lm(BLOCK + 11)),
    "dilated": lambda: block_mask(lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0)),
    "random": lambda: block_mask(random_bits(N, 2), heads=2),
    "empty rows": lambda: block_mask(some_rows),
}


# -- scores ---------------------------------------------------------------------------------------------


class Score(NamedTuple):
    """A factory of score_mods from tensors that require gradients."""

    of: ScoreOf | None
    captured: Callable[[int], tuple[Tensor, ...]] = lambda heads: ()


def _alibi() -> Callable[..., Tensor]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625] * 8, device=DEVICE)
    return lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs() / 16


def _relative(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, q, kv: s + table[h, (q - kv).clamp(-16, 16) + 16]


SCORES: dict[str, Score] = {
    "none": Score(None),
    "softcap": Score(lambda: lambda s, b, h, q, kv: 2 * torch.tanh(s / 2)),
    "alibi": Score(_alibi),
    "relative": Score(_relative, lambda heads: (normal(heads, 33, dtype=FP32),)),
}


# -- runs -----------------------------------------------------------------------------------------------


def leaves(x: QKV, captured: Sequence[Tensor], dtype: torch.dtype | None) -> list[list[Tensor]]:
    """q, k, v and the captured tensors as leaves; strides are kept unless the dtype changes."""
    return [
        [t.detach().to(t.dtype if dtype is None else dtype).requires_grad_() for t in part]
        for part in (x[:3], captured)
    ]


def gathered(outs: Sequence[Tensor], wrt: Sequence[Tensor], x: QKV) -> Results:
    out, lse, top = outs
    start = [x.dout.to(out.dtype), x.dlse.to(lse.dtype)]
    grads = torch.autograd.grad([out, lse], wrt, start, allow_unused=True)
    tensors = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, wrt)]
    return Results(out.detach(), lse.detach(), top.detach(), *tensors[:3], tuple(tensors[3:]))


def run(x: QKV, mask: Any, score: Score = SCORES["none"], captured: Sequence[Tensor] = (), *,
        scale: float | None = None, mesh: Any = None, **options: Any) -> Results:  # fmt: skip
    """Run the public call, with gradients."""
    own, caught = leaves(x, captured, None)
    out, aux = tritoncp.flex_attention(
        *own, score.of and score.of(*caught), mask, scale, enable_gqa=True, kernel_options=options,
        return_aux=AuxRequest(lse=True, max_scores=True), mesh=mesh,
    )  # fmt: skip
    return gathered((out, aux.lse, aux.max_scores), [*own, *caught], x)


def oracle(x: QKV, mask: Mask, score: Score = SCORES["none"], captured: Sequence[Tensor] = (), *,
           scale: float | None = None) -> Results:  # fmt: skip
    """Compute dense attention in float64."""
    own, caught = leaves(x, captured, FP64)
    visible = mask.to_dense(x.q.shape[0], x.q.shape[1], DEVICE).to(DEVICE)
    outs = dense_attention(*own, visible, score.of and score.of(*caught), scale=scale)
    return gathered(outs, [*own, *caught], x)


def peer(x: QKV, mask: Mask, score: Score = SCORES["none"], captured: Sequence[Tensor] = (), *,
         scale: float | None = None) -> Results:  # fmt: skip
    """Compute attention as torch's eager flex attention does; tests/gpu/test_torch.py compares the two."""
    (q, k, v), caught = leaves(x, captured, None)
    mod = score.of and score.of(*caught)
    return Results(*eager_attention(q, k, v, mask, x.dout, x.dlse, mod, caught, scale=scale))


# -- the rule -------------------------------------------------------------------------------------------


def check(x: QKV, mask: Mask, score: Score = SCORES["none"], captured: Sequence[Tensor] = (), *,
          scale: float | None = None, got: Results | None = None, **options: Any) -> Results:  # fmt: skip
    """Compare a call with float64 attention, see :func:`close`. The kernels' statistics are float32."""
    got = got or run(x, mask, score, captured, scale=scale, **options)
    want = oracle(x, mask, score, captured, scale=scale)
    other = peer(x, mask, score, captured, scale=scale)
    for name in ("out", "dq", "dk", "dv"):
        close(name, getattr(got, name), getattr(want, name), getattr(other, name))
    for i, tensors in enumerate(zip(got.captured, want.captured, other.captured)):
        close(f"captured {i}", *tensors)
    for name in ("lse", "max_scores"):
        torch.testing.assert_close(
            getattr(got, name).double(), getattr(want, name), atol=1e-4, rtol=1e-5, msg=name
        )
    return got


def forward(x: QKV, mask: Any, score: Score = SCORES["none"], captured: Sequence[Tensor] = (),
            **options: Any) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (out, lse, max_scores) of a call that compiles no backward kernel."""
    want = AuxRequest(lse=True, max_scores=True)
    out, aux = tritoncp.flex_attention(
        *x[:3], score.of and score.of(*captured), mask, enable_gqa=True, kernel_options=options,
        return_aux=want,
    )  # fmt: skip
    return out, aux.lse, aux.max_scores


def check_forward(x: QKV, mask: Mask, score: Score = SCORES["none"], captured: Sequence[Tensor] = (),
                  **options: Any) -> tuple[Tensor, ...]:  # fmt: skip
    """:func:`check` of the forward pass."""
    got = forward(x, mask, score, captured, **options)
    want, other = oracle(x, mask, score, captured), peer(x, mask, score, captured)
    close("out", got[0], want.out, other.out)
    for values, exact, name in ((got[1], want.lse, "lse"), (got[2], want.max_scores, "max_scores")):
        torch.testing.assert_close(values.double(), exact, atol=1e-4, rtol=1e-5, msg=name)
    return got


def equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Assert that tensors are equal bit for bit."""
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))


def close(name: str, got: Tensor, want: Tensor, other: Tensor) -> None:
    """Assert errors within :func:`tritoncp.reference.dense.allowed_error` of float64."""
    assert got.shape == want.shape and got.dtype == other.dtype, name
    error, allowed = largest_error(got, want), allowed_error(other, want)
    assert error <= allowed, f"{name}: {error:.3g} off, allowed {allowed:.3g}"


def same(got: Results, want: Results) -> None:
    """Assert that tensors are equal bit for bit."""
    equal(got[:6], want[:6])
