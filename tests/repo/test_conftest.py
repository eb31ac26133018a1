"""Safeguards of conftest.py: exact products of interpreted kernels, another BLAS."""

from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl

import tritoncp


@triton.jit
def product(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    o_m, o_k, o_n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    b_a, b_b = tl.load(a + o_m * K + o_k[None, :]), tl.load(b + o_k[:, None] * N + o_n)
    tl.store(out + o_m * N + o_n, tl.dot(b_a, b_b, out_dtype=out.dtype.element_ty))


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a @ b by an interpreted kernel, in float32 or float64."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))
    product[(1,)](a, b, out, a.shape[0], a.shape[1], b.shape[1])
    return out


@pytest.mark.parametrize(("terms", "dtype"), [(16, torch.float16), (256, torch.float64)])
def test_interpreted_products_are_exact_sums_in_any_tile(terms, dtype):
    """Element (m, n) has the bits that row m and column n alone give it, on every CPU."""
    a, b = (torch.randn(64, terms).to(dtype), torch.randn(terms, 64).to(dtype))
    expected = dot(a, b)
    for m in range(0, 64, 16):
        for n in range(0, 64, 32):
            part = dot(a[m : m + 16].contiguous(), b[:, n : n + 32].contiguous())
            assert torch.equal(expected[m : m + 16, n : n + 32], part)
    order = torch.randperm(terms)
    assert torch.equal(dot(a[:, order].contiguous(), b[order]), expected)
    row, column = a[3].double().tolist(), b[:, 5].double().tolist()
    exact = torch.tensor(
        float(sum(Fraction(x) * Fraction(y) for x, y in zip(row, column))), dtype=expected.dtype
    )
    torch.testing.assert_close(expected[3, 5], exact, rtol=torch.finfo(expected.dtype).eps, atol=0)


CAUSAL = tritoncp.create_block_mask(tritoncp.causal(), None, None, 64, 64, BLOCK_SIZE=16)


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("planted", ["tests/cpu", "tests/ops", "tests/distributed"])
def test_bits_that_are_equal_by_luck_differ(planted):
    """A row of a batch by itself: output of the engine, its gradient by the op, output of ranks."""
    x, mask = [torch.randn(2, 2, 64, 16, requires_grad=True) for _ in range(3)], CAUSAL
    whole, row = (tritoncp.flex_attention(*(t[:rows] for t in x), mask) for rows in (2, 1))
    if planted == "tests/ops":
        whole, row = (torch.autograd.grad(out[:1], x[1], x[0][:1])[0] for out in (whole, row))
    elif planted == "tests/distributed":
        world = tritoncp.simulate(2)
        plan = world.make_plan(mask, schedule="allgather")
        shards = (world.shard(t[:1], plan, dim=2) for t in x)
        row = world.unshard(world.flex_attention(*shards, plan), plan, dim=2)
    torch.testing.assert_close(row[:1], whole[:1], rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(row[:1], whole[:1], rtol=0, atol=0)
