"""Hand-written @triton.jit mods in Triton's interpreter: functions of libdevice, which it lacks."""

# mypy: disable-error-code="no-untyped-def"

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as of_cuda
from triton.language.extra.libdevice import atan2

import tritoncp
from tritoncp.mods import Mod
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.interpreted


@triton.jit
def cap(score, limit):
    return limit * libdevice.tanh(score / limit)


@triton.jit
def capped(score, b, h, q_idx, kv_idx, caps):
    near = libdevice.pow(1.0 + kv_idx.to(tl.float64), 0.5)
    return cap(score, 5.0) + of_cuda.log1p(near) + atan2(near, 2.0) + libdevice.fast_expf(-near)


@triton.jit
def capped_gradient(dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps):
    unit = cap(score, 5.0) / 5.0
    return dscore * (1 - unit * unit)


@triton.jit
def counted(score, b, h, q_idx, kv_idx, caps):
    return score + libdevice.popc(kv_idx)


def same(score, b, h, q_idx, kv_idx):
    near = (1 + kv_idx.double()) ** 0.5
    return 5 * torch.tanh(score / 5) + torch.log1p(near) + torch.atan2(near, 2 * near**0) + torch.exp(-near)


def test_hand_written_mods_call_libdevice_in_the_interpreter() -> None:
    """Mods call a function of a module, an imported function, and one in a helper, forward and backward."""
    q, k, v, grad = (torch.randn(1, 2, 12, 16, dtype=torch.float64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = tritoncp.flex_attention(*leaves, Mod.from_triton(capped, capped_gradient))
    expected = dense_attention(*leaves, None, same).out
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    pairs = [torch.autograd.grad(x, leaves, grad) for x in (out, expected)]
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-9)
    assert Mod.from_triton(capped).fn is Mod.from_triton(capped).fn


def test_a_function_that_the_interpreter_lacks_is_named() -> None:
    x = torch.randn(1, 1, 8, 16)
    with pytest.raises(Exception, match=r"libdevice\.popc cannot run interpreted.*erfc"):
        tritoncp.flex_attention(x, x, x, Mod.from_triton(counted))
