"""score_grad against torch.autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mods.harness import N, eager_score, run_grad
from tritoncp.mods import Untranslatable, score_mod


def learn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=G).requires_grad_()


G = torch.Generator().manual_seed(2)
TABLE, SLOPES, SCALE, CUBE = learn(4, 40), learn(4), learn(), learn(2, 4, 40)
IDS = torch.randint(0, 4, (2, 40), generator=G)

MODS: dict[str, Callable[..., Any]] = {
    "no captures": lambda s, b, h, q, k: torch.tanh(s) * s + 1,
    "score unused": lambda s, b, h, q, k: TABLE[h, q],
    "constant": lambda s, b, h, q, k: torch.zeros_like(s),
    "0-d scale": lambda s, b, h, q, k: s * SCALE + SCALE.exp(),
    "per head": lambda s, b, h, q, k: s + SLOPES[h] * (q - k),
    "relative bias": lambda s, b, h, q, k: s + TABLE[h][q - k],
    "bias table": lambda s, b, h, q, k: s * TABLE[h, q] + TABLE[h, k],
    "nonlinear bias": lambda s, b, h, q, k: s + TABLE[h].exp()[q] * SLOPES[h].sigmoid(),
    "product of captures": lambda s, b, h, q, k: s + (TABLE * SLOPES[:, None])[h, k],
    "quotient of captures": lambda s, b, h, q, k: s + (TABLE / (SLOPES[:, None] ** 2 + 1))[h, k],
    "difference of captures": lambda s, b, h, q, k: s + (-TABLE - SCALE * TABLE)[h, k],
    "where of captures": lambda s, b, h, q, k: s + torch.where(TABLE > 0, TABLE, 0.1 * TABLE)[h, q],
    "clamped": lambda s, b, h, q, k: s + TABLE.clamp(min=0.0)[h, q] + s.clamp(-1, 1),
    "maximum": lambda s, b, h, q, k: torch.maximum(s, TABLE[h, q]) + s.relu(),
    "transposed": lambda s, b, h, q, k: s + TABLE.T[q, h] + CUBE.permute(2, 0, 1)[k, b, h],
    "reshaped": lambda s, b, h, q, k: s + TABLE.view(-1)[q * 3] + CUBE.reshape(8, 40)[b * 4 + h, k],
    "sliced": lambda s, b, h, q, k: s + TABLE[:, 3:30:2][h, q % 13] + CUBE[1][h, q],
    "through ids": lambda s, b, h, q, k: s * TABLE[IDS[b, q], k] + SLOPES[IDS[b, k]],
    "last element": lambda s, b, h, q, k: s * TABLE[h, -1] + TABLE[-1, q],
    "masked": lambda s, b, h, q, k: torch.where(q >= k, s * SLOPES[h], -float("inf")),
    "in place": lambda s, b, h, q, k: (s * 2).add_(TABLE[h, q]).mul_(SCALE),
}


def check(fn: Callable[..., Any], captures: list[Tensor], dtype: torch.dtype, tolerance: float) -> None:
    scores = torch.randn(N, N, dtype=dtype)
    dscores = torch.randn(N, N, dtype=dtype)
    keep = torch.rand(N, N) > 0.3
    mod = score_mod(fn, dtype)
    got, grads = run_grad(mod, dscores, scores, keep, 1, 2, 5, 0)
    leaf = scores.clone().requires_grad_()
    out = eager_score(fn, leaf, 1, 2, 5, 0).to(dtype)
    wanted = [mod.tensors[i] for i in mod.wants]
    assert {id(t) for t in wanted} <= {id(t) for t in captures}

    def gradient(upstream: Tensor, of: list[Tensor]) -> list[Tensor]:
        if not out.requires_grad:
            return [torch.zeros_like(t) for t in of]
        given = torch.autograd.grad(out, of, upstream, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(given, of)]

    (dscore,) = gradient(dscores, [leaf])  # the gradient of a score does not depend on its visibility
    torch.testing.assert_close(got, dscore, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(grads, gradient(dscores * keep, wanted) if wanted else [], strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODS)
def test_gradients_are_autograd(name: str) -> None:
    check(MODS[name], [TABLE, SLOPES, SCALE, CUBE], torch.float64, 1e-9)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_of_narrow_captures(kind: torch.dtype) -> None:
    table = learn(4, 40, dtype=torch.float32).detach().to(kind).requires_grad_()
    check(lambda s, b, h, q, k: s * table[h, q], [table], torch.float32, 2e-2 if kind.itemsize == 2 else 1e-5)


def test_every_element_adds_to_a_repeated_capture() -> None:
    mod = score_mod(lambda s, b, h, q, k: s + SCALE, torch.float64)
    ones = torch.ones(N, N, dtype=torch.float64)
    keep = torch.ones(N, N, dtype=torch.bool).tril()
    _, (grad,) = run_grad(mod, ones, ones, keep)
    assert grad.item() == keep.sum().item()


def test_scatters_out_of_range_write_nothing() -> None:
    memory = torch.zeros(40, dtype=torch.float64)
    table = torch.randn(8, dtype=torch.float64).requires_grad_()
    mod = score_mod(lambda s, b, h, q, k: s + table[q - k], torch.float64)
    from tests.mods.harness import grad_kernel

    scores = torch.ones(N, N, dtype=torch.float64)
    keep = torch.ones(N, N, dtype=torch.int8)
    out = torch.zeros_like(scores)
    args = (mod.caps(), mod.dcaps([memory[16:24]]), keep, mod.grad, N)
    grad_kernel[(1,)](out, scores, scores, 0, 0, 0, 0, *args)
    i = torch.arange(N)
    diff = i[:, None] - i[None]
    inside = diff[(diff >= -8) & (diff < 8)] % 8
    assert torch.equal(memory[16:24], torch.bincount(inside, minlength=8).double())
    assert not memory[:16].any()
    assert not memory[24:].any()


def test_only_captures_that_require_grad_are_wanted() -> None:
    plain = torch.randn(4)
    mod = score_mod(lambda s, b, h, q, k: s * plain[h] + SLOPES[h])
    assert [mod.tensors[i] is SLOPES for i in mod.wants] == [True]
    assert "dcaps[0]" in mod.source
    assert "dcaps[1]" not in mod.source


def test_a_dense_gradient_is_refused() -> None:
    with pytest.raises(Untranslatable, match=r"aten\.sum"):
        score_mod(lambda s, b, h, q, k: s + TABLE.sum())


def test_buffers_of_the_wrong_shape_are_refused() -> None:
    mod = score_mod(lambda s, b, h, q, k: s + SLOPES[h])
    with pytest.raises(ValueError, match=r"\(4,\).*needed.*\(5,\)"):
        mod.dcaps([torch.zeros(5)])
