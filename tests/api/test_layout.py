"""Tests of the memory layout of results: torch's, for every order of the query's dimensions."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import tritoncp

SHAPE = 2, 3, 5, 8


def permuted(order, make=torch.randn):
    """Make a tensor of SHAPE whose memory runs through dimensions in this order, the last one innermost."""
    return make([SHAPE[i] for i in order]).permute([order.index(i) for i in range(4)])


FORMS = {
    "dense": lambda order: permuted(order),
    "sliced": lambda order: permuted(order, lambda shape: torch.randn(*shape, 2)[..., 1]),
    "expanded batch": lambda order: permuted(order)[:1].expand(SHAPE),
    "expanded heads": lambda order: permuted(order)[:, :1].expand(SHAPE),
    "expanded rows": lambda order: permuted(order)[:, :, :1].expand(SHAPE),
}

CASES = [  # compiled for one length of values only
    pytest.param(v_dim, form, compiled, marks=[pytest.mark.long] * (compiled and (i + j) % 2))
    for i, v_dim in enumerate((8, 6))
    for j, form in enumerate(FORMS)
    for compiled in (False, True)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("v_dim", "form", "compiled"), CASES)
@pytest.mark.usefixtures("cpu_engine", "eager_flex")
def test_out_has_the_layout_of_torchs(form, v_dim, compiled):
    torch._dynamo.reset()
    call = tritoncp.flex_attention
    orders = list(permutations(range(4)))
    if compiled:  # compilation takes longer: two orders
        call, orders = torch.compile(call, backend="aot_eager", fullgraph=True), orders[::13]
    for order in orders:
        q, v = FORMS[form](order), torch.randn(2, 3, 5, v_dim)
        out = call(q, q, v)
        want = torch_flex.flex_attention(q, q, v)
        assert out.stride() == want.stride(), order
        assert out.stride(3) == 1
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(5)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_gradients_have_the_stride_orders_of_their_tensors(order, engine):
    leaves = [permuted(order).requires_grad_() for _ in range(3)]
    for grad, x in zip(torch.autograd.grad(tritoncp.flex_attention(*leaves).sum(), leaves), leaves):
        strides = [sorted(range(4), key=lambda dim, t=t: (t.stride(dim), dim)) for t in (grad, x)]
        assert strides[0] == strides[1]
