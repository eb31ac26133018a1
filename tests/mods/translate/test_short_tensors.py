"""Concatenations, splits and reductions of short tensors in both engines against float64 dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.mods.harness import N, eager_score, read_formulas, run_score
from tests.mods.translate.test_functions import check_attention
from tests.mods.translate.test_gradient import learn
from tritoncp.mods import Untranslatable, score_mod
from tritoncp.mods.tracing import vmapped
from tritoncp.reference.dense import dense_attention

G = torch.Generator().manual_seed(4)
A, B = learn(12, 8), learn(12, 8)
HEADS, W, TABLE = learn(2, 12, 8), learn(8), learn(2, 12)
CAPTURES = A, B, HEADS, W, TABLE
F = torch.nn.functional

SCORES = read_formulas("short tensors", "s, b, h, q, k", globals())


# A few in one score_mod: most of the time goes to kernels, which are interpreted.
GROUPS = [list(SCORES)[i : i + 3] for i in range(0, len(SCORES), 3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", GROUPS, ids="; ".join)
def test_stacks_of_scores_and_rows_of_captures(names: list[str], engine: str) -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        return sum(weight * SCORES[name](s, b, h, q, k) for weight, name in enumerate(names, start=1))

    check_attention(score, CAPTURES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_rows_in_other_dtypes(dtype: torch.dtype) -> None:
    a, b = (torch.randn(N, 64, generator=G).to(dtype) / 8 for _ in "ab")
    out = run_score(score_mod(lambda s, b_, h, q, k: s + a[q] @ b[k]), torch.zeros(N, N))
    exact = a.double() @ b.double().T
    assert (out - exact).abs().max() <= (1e-5 if dtype is torch.float32 else 2e-2)


def test_the_variance_of_half_precisions_is_computed_in_float32() -> None:
    rows = (100 + torch.arange(N)[:, None] * torch.arange(8.0) / 8).bfloat16()
    out = run_score(score_mod(lambda s, b, h, q, k: s + rows[q].var()), torch.zeros(N, N))
    torch.testing.assert_close(out[:, 0], rows.float().var(-1), rtol=2**-7, atol=0)


def rope_term(q_rope: Tensor, k_rope: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s + (q_rope[b, h, i] * k_rope[b, j]).sum(-1)


def test_the_rope_term_equals_folding_it_into_q_and_k(engine: str) -> None:
    """The remedy that the error names: concatenate q_rope / scale to q and k_rope to k."""
    q, k, v = (torch.randn(1, 2, 12, 16, dtype=torch.float64, generator=G) for _ in "qkv")
    q_rope, k_rope = learn(1, 2, 12, 16), learn(1, 12, 16)
    out = tritoncp.flex_attention(q, k, v, score_mod=rope_term(q_rope, k_rope), scale=0.25)
    wide_k = torch.cat([k, k_rope[:, None].expand(1, 2, 12, 16)], -1)
    folded = dense_attention(torch.cat([q, q_rope / 0.25], -1), wide_k, v, scale=0.25).out
    torch.testing.assert_close(out, folded, rtol=1e-10, atol=1e-10)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=G)
    for actual, expected in zip(
        torch.autograd.grad(out, (q_rope, k_rope), upstream),
        torch.autograd.grad(folded, (q_rope, k_rope), upstream),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_plain_torch_takes_operations_without_translation(engine: str) -> None:
    """Long rows, sorting, and functions without a formula; interpreted kernels refuse them."""
    a, b = learn(12, 99), learn(12, 99)
    mods = [
        lambda s, b_, h, q, k: s + torch.dot(a[q], b[k]),
        lambda s, b_, h, q, k: s + a[q].median() + torch.special.i0(s),
        lambda s, b_, h, q, k: s * F.layer_norm(a[q], (99,))[3],
    ]
    q, k, v = (torch.randn(1, 1, 12, 16, dtype=torch.float64) for _ in "qkv")
    for mod in mods:
        if engine == "cpu":
            check_attention(mod, (a,))
        else:
            with pytest.raises(Untranslatable):
                tritoncp.flex_attention(q, k, v, score_mod=mod)


def test_a_value_out_of_range_of_a_stack_is_not_read() -> None:
    """Kernels also evaluate masked positions."""
    table = torch.randn(4)
    fn = lambda s, b, h, q, k: torch.stack([s, table[0] * s, s + 1])[(q - k).clamp(0, 9)]  # noqa: E731
    scores = torch.randn(N, N)
    inside = (torch.arange(N)[:, None] - torch.arange(N)).clamp(0, 9) < 3
    safe = lambda s, b, h, q, k: torch.stack([s, table[0] * s, s + 1])[(q - k).clamp(0, 2)]  # noqa: E731
    out, expected = run_score(score_mod(fn), scores), eager_score(safe, scores.clone())
    torch.testing.assert_close(out[inside], expected[inside])
    assert out.isfinite().all()


def test_gradients_of_rows_and_stacks_under_vmap() -> None:
    """torch's transform of an index by a tensor adds them up over the vmapped dimension, or fails."""
    s = torch.randn(6, dtype=torch.float64, requires_grad=True)
    i = torch.arange(6)
    out = vmapped(lambda x, n: torch.stack([x, x * x, 3 * x])[n % 3] * A[n].sum(), (0, 0))(s, i)
    expected = torch.where(i % 3 == 0, s, torch.where(i % 3 == 1, s * s, 3 * s)) * A[:6].sum(1)
    for actual, right in zip(
        torch.autograd.grad(out.sum(), (s, A)), torch.autograd.grad(expected.sum(), (s, A)), strict=True
    ):
        torch.testing.assert_close(actual, right)
