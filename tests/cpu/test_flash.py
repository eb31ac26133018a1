"""Tests of tiles by torch's flash kernel, against products in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tritoncp.cpu import flash

F64 = torch.float64


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=g, dtype=F64) for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse by plain products; rows without keys have out 0 and lse -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale + (0 if bias is None else bias)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.nan_to_num(neginf=0)[..., None]) @ v, lse


@pytest.mark.parametrize("hidden", [False, True])
def test_results_equal_plain_products(hidden: bool) -> None:
    q, k, v = tensors((2, 4, 40, 16), (2, 2, 33, 16), (2, 2, 33, 16))
    visible = torch.rand(2, 1, 40, 33) < 0.5
    visible[:, :, 5] = False
    bias = flash.hide(visible, F64) if hidden else None
    results = flash.forward(q, k, v, bias, 0.3)
    torch.testing.assert_close(results, plain(q, k, v, bias, 0.3), rtol=0, atol=1e-12)
    assert bool((results[1][:, :, 5] == -math.inf).all()) == hidden


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (3, 3)], ids=str)
def test_gradients_equal_plain_products(heads: tuple[int, int], threads: int) -> None:
    """With more threads than heads of k, each query head gets a separate k."""
    count, kv_count = heads
    q, k, v, dout = tensors((1, count, 40, 8), (1, kv_count, 33, 8), (1, kv_count, 33, 8), (1, count, 40, 8))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = plain(q, k, v, None, 0.3)
    want = torch.autograd.grad(out, leaves, dout)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        args = (x.detach() for x in (q, k, v, out, lse, dout))
        got = flash.backward(*args, None, 0.3)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_rows_with_delta_have_the_requested_products() -> None:
    dout, delta = tensors((3, 20, 8), (3, 20))
    dout[0] *= 1e-200
    dout[1, 4], delta[1, 4] = 0, 0
    rows = flash.rows_with_delta(dout, delta)
    assert rows is not None
    torch.testing.assert_close((rows * dout).sum(-1), delta, rtol=1e-12, atol=0)


def test_no_row_has_a_product_with_a_row_of_zeros() -> None:
    dout, delta = tensors((1, 3, 8), (1, 3))
    dout[0, 1] = 0
    assert flash.rows_with_delta(dout, delta) is None


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_values_that_zero_times_cannot_hide_are_noticed(which: int, value: float) -> None:
    x = tensors((1, 5, 4), (1, 6, 4), (1, 6, 4))
    assert flash.can_compute(*x, scale=1.0)
    x[which][0, 2, 1] = value
    assert not flash.can_compute(*x, scale=1.0)


def test_products_too_large_for_the_dtype_are_noticed() -> None:
    q, k, v = tensors((1, 5, 4), (1, 6, 4), (1, 6, 4))
    q, k = q * 1e100, k * 1e100
    assert flash.can_compute(q, k, v * 1e200, scale=1.0)
    assert not flash.can_compute(q * 1e120, k, v, scale=1.0)
    assert not flash.can_compute(q, k, v, scale=1.0, backward=True)
