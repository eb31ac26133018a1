"""Gradients of translated score_mods against torch.autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mods.harness import N, eager_score, grad_kernel, read_formulas, run_grad, run_score
from tritoncp.mods import score_mod


def learn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=G).requires_grad_()


G = torch.Generator().manual_seed(2)
TABLE, SLOPES, SCALE, CUBE = learn(4, 40), learn(4), learn(), learn(2, 4, 40)
IDS = torch.randint(0, 4, (2, 40), generator=G)

MODS = read_formulas("learned", "s, b, h, q, k", globals())


def check(fn: Callable[..., Any], captures: list[Tensor], dtype: torch.dtype, tolerance: float) -> None:
    scores = torch.randn(N, N, dtype=dtype)
    dscores = torch.randn(N, N, dtype=dtype)
    keep = torch.rand(N, N) > 0.3
    mod = score_mod(fn, dtype)
    out_grad, grads = run_grad(mod, dscores, scores, keep, 1, 2, 5, 0)
    leaf = scores.clone().requires_grad_()
    out = eager_score(fn, leaf, 1, 2, 5, 0).to(dtype)
    learned = [mod.tensors[i] for i in mod.wants]
    assert {id(t) for t in learned} <= {id(t) for t in captures}

    def gradient(upstream: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        if not out.requires_grad:
            return [torch.zeros_like(t) for t in leaves]
        grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves)]

    (dscore,) = gradient(dscores, [leaf])  # the gradient of a score does not depend on its visibility
    torch.testing.assert_close(out_grad, dscore, rtol=tolerance, atol=tolerance)
    for actual, reference in zip(grads, gradient(dscores * keep, learned) if learned else [], strict=True):
        torch.testing.assert_close(actual, reference.to(actual.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MODS)
def test_gradients_equal_autograds(name: str) -> None:
    check(MODS[name], [TABLE, SLOPES, SCALE, CUBE], torch.float64, 1e-9)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_of_narrow_captures(kind: torch.dtype) -> None:
    table = learn(4, 40, dtype=torch.float32).detach().to(kind).requires_grad_()
    check(lambda s, b, h, q, k: s * table[h, q], [table], torch.float32, 2e-2 if kind.itemsize == 2 else 1e-5)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("size", "look"),
    [
        (8, lambda t, i: t[i]),
        (4, lambda t, i: t.expand(2, 4).reshape(8)[i]),
        (8, lambda t, i: t[torch.arange(8)[i]]),
        (8, lambda t, i: t[torch.arange(8).flip(0)[i]]),
        (8, lambda t, i: t.view(2, 4).t().reshape(8)[i]),
        (8, lambda t, i: t[2:6][i]),
    ],
    ids=["plain", "expanded", "range", "flipped", "transposed", "slice"],
)  # fmt: skip
@pytest.mark.parametrize("visible", ["all", "some"])
def test_indices_out_of_range_neither_read_nor_write(size: int, look: Any, visible: str) -> None:
    """Adding a zero out of range would make a -0.0 on either side of the gradient positive."""
    memory = torch.full((400,), -0.0, dtype=torch.float64)
    padded = torch.full((400,), torch.nan, dtype=torch.float64)
    table, buffer = padded[200 : 200 + size], memory[200 : 200 + size]
    table.copy_(torch.randn(size))
    buffer.zero_()
    mod = score_mod(lambda s, b, h, q, k: s + look(table, q - k), torch.float64)
    assert not run_score(mod, torch.zeros(N, N, dtype=torch.float64)).isnan().any()

    learned = table.clone().requires_grad_()
    mod = score_mod(lambda s, b, h, q, k: s + look(learned, q - k), torch.float64)
    scores, keep = torch.ones(N, N, dtype=torch.float64), torch.ones(N, N, dtype=torch.int8)
    keep = keep if visible == "all" else keep.tril().triu(-3)
    args = (mod.caps(), mod.dcaps([buffer]), keep, mod.grad, N)
    grad_kernel[(1,)](torch.zeros_like(scores), scores, scores, 0, 0, 0, 0, *args)
    outside = torch.ones(400, dtype=torch.bool)
    outside[200 : 200 + size] = False
    assert memory[outside].signbit().all()
    if visible == "some":  # distances 0 to 3, which torch can index
        diff = (torch.arange(N)[:, None] - torch.arange(N)[None])[keep.bool()]
        sum(look(learned, d) for d in diff).backward()
        assert torch.allclose(buffer, learned.grad)


def test_only_captures_that_require_grad_get_gradients() -> None:
    plain = torch.randn(4)
    mod = score_mod(lambda s, b, h, q, k: s * plain[h] + SLOPES[h])
    assert [mod.tensors[i] is SLOPES for i in mod.wants] == [True]
    assert "dcaps[0]" in mod.source
    assert "dcaps[1]" not in mod.source
