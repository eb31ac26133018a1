"""Tests that transforms of torch.func are refused with a remedy."""

from __future__ import annotations

import re

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import tritoncp
from tritoncp import causal


def attend(x):
    return tritoncp.flex_attention(x, x, x, causal())


def dual(x):
    with forward_ad.dual_level():
        return attend(forward_ad.make_dual(x, x))


TRANSFORMS = {
    "grad": (lambda x: func.grad(lambda y: attend(y).sum())(x), "torch.autograd.grad"),
    "vjp": (lambda x: func.vjp(attend, x), "torch.autograd.grad"),
    "jacrev": (lambda x: func.jacrev(attend)(x), "torch.autograd.grad"),
    "vmap": (lambda x: torch.vmap(attend)(x[None]), "batch dimension"),
    "vmap of grad": (lambda x: torch.vmap(func.grad(lambda y: attend(y).sum()))(x[None]), "torch.autograd"),
    "jvp": (lambda x: func.jvp(attend, (x,), (x,)), "reverse mode"),
    "jacfwd": (lambda x: func.jacfwd(attend)(x), "reverse mode|batch dimension"),
    "forward AD": (dual, "reverse mode"),
    "compiled grad": (
        lambda x: torch.compile(func.grad(lambda y: attend(y).sum()), backend="eager", fullgraph=True)(x),
        "torch.autograd.grad",
    ),
    "compiled vmap": (
        lambda x: torch.compile(torch.vmap(attend), backend="eager", fullgraph=True)(x[None]),
        "batch dimension",
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_refused_with_a_remedy(name):
    torch._dynamo.reset()
    call, remedy = TRANSFORMS[name]
    with pytest.raises(RuntimeError) as info:
        call(torch.randn(1, 2, 32, 16))
    message = str(info.value)
    line = next(line for line in message.splitlines() if "tritoncp.flex_attention was called under" in line)
    assert re.search(remedy, line)
    if "compiled" not in name:
        assert "\n" not in message


def test_functionalize_is_allowed():
    x = torch.randn(1, 2, 32, 16)
    assert torch.equal(func.functionalize(attend)(x), attend(x))
