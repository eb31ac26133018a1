"""Forms of score_mods for tensors that broadcast, beside torch.vmap of the same graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mods.translate.test_emit import SCORES
from tests.mods.translate.test_gradient import MODS
from tritoncp.mods import score_mod
from tritoncp.mods.tracing import vmapped
from tritoncp.mods.translate.elementwise import elementwise_form

ALL = SCORES | {f"learned: {name}": mod for name, mod in MODS.items()}
# What they gather is a row of an expression, and an operation on rows is not elementwise.
NEED_VMAP = {"scaled bias", "learned: nonlinear bias"}
SIZES = 2, 2, 5, 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name in ALL if name not in NEED_VMAP])
def test_the_elementwise_form_of_a_score_mod_is_its_vmap(name: str, dtype: torch.dtype) -> None:
    """Values and dtype are equal, and so are the gradients of scores."""
    mod = score_mod(ALL[name], dtype)
    form, constants = elementwise_form(mod.graph, 5), (*mod.tensors, *mod.numbers)
    assert form is not None
    scores = torch.randn(SIZES, generator=torch.Generator().manual_seed(0), dtype=dtype)
    numbers = [torch.arange(size) for size in SIZES]
    shaped = [x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(numbers)]
    levels = [(0, *(0 if i == axis else None for i in range(4))) for axis in (3, 2, 1, 0)]
    vmap = vmapped(lambda *x: mod.graph.forward(*x, *constants), *levels)
    forms: list[Callable[..., Any]] = [
        lambda x: form.forward(x, *shaped, *constants).expand(SIZES), lambda x: vmap(x, *numbers)
    ]  # fmt: skip
    results = []
    for run in forms:
        value, pull, *_ = torch.func.vjp(run, scores.clone())
        results.append((value, *pull(torch.ones_like(value))))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", sorted(NEED_VMAP))
def test_a_score_mod_with_operations_on_rows_has_no_elementwise_form(name: str) -> None:
    assert elementwise_form(score_mod(ALL[name]).graph, 5) is None


def test_an_index_by_a_mask_is_not_a_gather_of_elements() -> None:
    table = torch.ones(4)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + torch.where(q[None] > kv, table, 0).sum()

    assert elementwise_form(score_mod(score).graph, 5) is None
