"""Tests of deterministic gradients of a score_mod's captures: the same bits in every run."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import tritoncp
from tests.mods.harness import N, grad_kernel
from tritoncp.mods import Mod, deterministic_sum, score_mod
from tritoncp.reference.dense import dense_attention

CPU = torch.device("cpu")


def added(values: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
    """Add values [n] in an order, as the kernels' exact sum does."""
    table = torch.zeros(1, requires_grad=True)
    mod = score_mod(lambda s, b, h, q, kv: s + table[q * 0])
    values = values if order is None else values[order]
    tiles = torch.nn.functional.pad(values, (0, -len(values) % (N * N))).view(-1, N, N)
    buffer = deterministic_sum.buffer(mod.tensors[0], CPU)
    keep = torch.ones(N, N, dtype=torch.int8)
    out = torch.zeros_like(tiles[0])
    dcaps = mod.dcaps([buffer])
    for tile in tiles:
        args = (tile.contiguous(), out, 0, 0, 0, 0, mod.caps(), dcaps, keep, mod.grad, N)
        grad_kernel[(1,)](out, *args)
    return buffer


def test_any_order_of_addends_gives_the_same_bits_and_the_exact_sum():
    values = torch.randn(1000) * 2.0 ** torch.randint(-30, 30, (1000,))
    first = added(values)
    for _ in range(3):
        assert torch.equal(added(values, torch.randperm(1000)), first)
    # Each value is a multiple of 2^-80 or so below 2^40: summed as integers, in Python, without error.
    expected = sum(int(v * 2**90) for v in values.double().tolist()) / 2**90
    assert deterministic_sum.total(first).item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("values", [[1e30, -1e30], [float("inf")], [float("nan"), 1.0], [-(2.0**60)]])
def test_values_out_of_range_give_nan(values):
    assert deterministic_sum.total(added(torch.tensor(values))).isnan().all()


@pytest.mark.parametrize(
    "values",
    [
        [2.0**59, -(2.0**59), 3.0], [-1.5, 0.25], [1e-20, 1e-20], [-(2.0**-80)], [0.0],
        [-1e-7], [-3e-8], [-1e-12], [1e-9, -3e-9], [-(2.0**40), 1e-6],
    ],
)  # fmt: skip
def test_values_in_range_are_summed_exactly(values):
    expected = sum(torch.tensor(values).double().tolist())
    assert deterministic_sum.total(added(torch.tensor(values))).item() == pytest.approx(expected, rel=1e-7)


def test_a_sum_and_its_negative_differ_only_in_sign():
    values = torch.randn(300) * 2.0 ** torch.randint(-60, 20, (300,))
    for sample in (values, *values[:40, None]):
        assert torch.equal(deterministic_sum.total(added(-sample)), -deterministic_sum.total(added(sample)))


@pytest.fixture
def deterministic(request):
    torch.use_deterministic_algorithms(request.param == "torch")
    yield {"deterministic": True} if request.param == "option" else None
    torch.use_deterministic_algorithms(False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("deterministic", ["option", "torch"], indirect=True)
def test_deterministic_gradients_through_the_public_call(deterministic):
    table, slope = torch.randn(40, requires_grad=True), torch.tensor([0.3, 0.7], requires_grad=True)

    def bias(s, b, h, q, kv):
        return s * slope[h] + table[q - kv + 20]

    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 20, 20, BLOCK_SIZE=16)
    grads = []
    for _ in range(2):
        out = tritoncp.flex_attention(q, k, v, bias, mask, kernel_options=deterministic)
        grads.append(torch.autograd.grad(out.square().sum(), (table, slope)))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other) and one.dtype == torch.float32
    wide = [x.double() for x in (q, k, v)]
    oracle = dense_attention(*wide, mask, bias).out
    for grad, expected in zip(
        grads[0], torch.autograd.grad(oracle.square().sum(), (table, slope)), strict=True
    ):
        torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-4)


@triton.jit
def jit_scaled(score, b, h, q_idx, kv_idx, caps):
    return score * tl.load(caps[0][0])


@triton.jit
def jit_grad(dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps):
    return dscore * tl.load(caps[0][0])


def test_a_hand_written_gradient_is_refused_under_deterministic():
    scale = torch.ones((), requires_grad=True)
    mod = Mod.from_triton(jit_scaled, jit_grad, [scale], back=jit_grad)
    q = torch.randn(1, 1, 16, 16, requires_grad=True)
    out = tritoncp.flex_attention(q, q, q, mod, kernel_options={"deterministic": True})
    with pytest.raises(ValueError, match=r"hand-written.*atomics.*write it in Python"):
        out.sum().backward()
