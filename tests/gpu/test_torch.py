"""Comparison with PyTorch: its flex attention, its compiler, its autograd."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tritoncp
from tests.gpu.support import (
    DEVICE,
    MASKS,
    ON_GPU,
    N,
    close,
    leaves,
    oracle,
    peer,
    qkv,
)

BACKEND = "inductor" if ON_GPU else "aot_eager"


def bias(table):
    return lambda s, b, h, q, kv: s + table[h] * (q - kv)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_yardstick_is_torch_eager_flex_attention():
    """The error of `peer` is not above that of torch's own eager call, so the tolerance is not lax."""
    x, mask = qkv(), MASKS["causal"]()
    peer_result = peer(x, mask)
    lists = create_block_mask(mask.mask_mod, None, None, N, N, device=DEVICE.type)
    out = flex_attention(x.q, x.k, x.v, block_mask=lists, enable_gqa=True)
    close("out", peer_result.out, oracle(x, mask).out, out)


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
