"""Tests of gradients of narrow captured tensors: summed in float32 and rounded once, on both engines."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tritoncp

S, D = 256, 16
ZEROS = torch.zeros(S, dtype=torch.long)
ScoreOf = Callable[[Tensor], Callable[..., Tensor]]
SCORES: dict[str, ScoreOf] = {
    "gathered by rows": lambda t: lambda s, b, h, q, kv: s * t[ZEROS[q]],
    "gathered by keys": lambda t: lambda s, b, h, q, kv: s * t[ZEROS[kv]],
    "one element": lambda t: lambda s, b, h, q, kv: s * t[0],
    "moved behind the gather": lambda t: lambda s, b, h, q, kv: s * (t * 2)[ZEROS[q]],
    "product of two": lambda t: lambda s, b, h, q, kv: s * (t[ZEROS[q]] * t[ZEROS[kv]]),
    "score in its type": lambda t: lambda s, b, h, q, kv: (s.to(t.dtype) * t[ZEROS[q]]).to(s.dtype),
}


def exact(qkv: list[Tensor], score_of: ScoreOf, t: Tensor, dout: Tensor) -> tuple[float, float]:
    """Compute the gradient in dense float64, and the root of the sum of the squares of its terms (one per
    pair), which scales the error of random roundings."""
    q, k, v = (x.double() for x in qkv)
    t = t.detach().double().requires_grad_()
    at = torch.arange(S)
    raw = q @ k.mT / math.sqrt(D)
    scores = score_of(t)(raw, 0, 0, at[:, None], at)
    out = scores.masked_fill(at[:, None] < at, -math.inf).softmax(-1) @ v
    dscores, dt = torch.autograd.grad(out, (scores, t), dout.double())
    return dt.item(), (dscores * raw).norm().item()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        ("cpu", torch.bfloat16),
        ("cpu", torch.float16),
        ("kernels", torch.bfloat16),
        pytest.param("kernels", torch.float16, marks=pytest.mark.long),
    ],
    indirect=["engine"],
    ids=str,
)
@pytest.mark.parametrize("name", SCORES)
def test_a_sum_over_all_pairs_is_right_to_a_few_roundings(name: str, dtype: torch.dtype, engine: str) -> None:
    qkv = [torch.randn(1, 2, S, D).to(dtype) for _ in range(3)]
    t = torch.full((1,), 0.5, dtype=dtype, requires_grad=True)
    out = tritoncp.flex_attention(*qkv, SCORES[name](t), tritoncp.causal())
    dout = torch.randn_like(out)
    grad = torch.autograd.grad(out, t, dout)[0]
    want, spread = exact(qkv, SCORES[name], t, dout)
    assert grad.dtype == dtype
    assert abs(grad.item() - want) <= torch.finfo(dtype).eps * (abs(want) + 4 * spread)
