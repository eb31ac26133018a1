"""Safeguards of conftest.py: poisoned memory, interpreted kernels, seeds, exact products."""

import math
import os
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unwritten_floats_are_nan(dtype):
    x = torch.zeros(3, dtype=dtype)
    for tensor in (torch.empty(3, dtype=dtype), torch.empty_like(x), x.new_empty(3)):
        assert tensor.isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), dtype=dtype).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_unwritten_integers_are_absurd(dtype):
    assert (torch.empty(3, dtype=dtype) > 100).all()


def test_poison_keeps_requires_grad_and_shape():
    x = torch.empty(2, 3, requires_grad=True)
    assert x.requires_grad and x.is_leaf and x.shape == (2, 3)


def test_kernels_are_interpreted_off_the_gpu():
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"


def test_random_numbers_do_not_depend_on_earlier_tests():
    assert torch.rand(1).item() == pytest.approx(0.4962565898895264)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("terms", [16, 64, 256])
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


def test_interpreted_products_confine_nan_and_infinity_to_their_rows():
    a, b = torch.randn(32, 16), torch.randn(16, 32)
    expected = dot(a, b)
    a[3, 2], a[4, 0], b[5, 7] = math.nan, math.inf, 0.0
    b[0, 9] = 0.0
    actual, torch_product = dot(a, b), a @ b
    assert torch.equal(actual.isnan(), torch_product.isnan()) and torch.equal(
        actual == math.inf, torch_product == math.inf
    )
    rows = [m for m in range(32) if m not in (3, 4)]
    columns = [n for n in range(32) if n not in (7, 9)]
    assert torch.equal(actual[rows][:, columns], expected[rows][:, columns])
