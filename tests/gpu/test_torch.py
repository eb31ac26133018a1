"""Comparison with PyTorch: its flex attention, its compiler, its autograd."""

import torch

import tritoncp
from tests.gpu.support import (
    DEVICE,
    MASKS,
    ON_GPU,
    leaves,
    qkv,
)

BACKEND = "inductor" if ON_GPU else "aot_eager"


def bias(table):
    return lambda s, b, h, q, kv: s + table[h] * (q - kv)


def test_torch_compile_takes_the_call_whole():
    x, plan = qkv(), tritoncp.make_plan(MASKS["causal"]())
    (q, k, v), _ = leaves(x, (), None)
    score = bias(torch.tensor([0.01, 0.02], device=DEVICE))

    def layer(q, k, v):
        out = tritoncp.flex_attention(q * 2, k, v, score, plan, enable_gqa=True)
        return out.sin()

    expected = layer(q, k, v)
    grads = torch.autograd.grad(expected, (q, k, v), x.dout)
    compiled = torch.compile(layer, fullgraph=True, backend=BACKEND)
    got = compiled(q, k, v)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), x.dout), grads):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
