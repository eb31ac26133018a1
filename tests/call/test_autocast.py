"""Tests under autocast: q, k and v are cast to its dtype before anything else, as torch's attention does."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import tritoncp
from tritoncp import causal, create_block_mask, document, make_plan, simulate

S = 32
LOW = torch.bfloat16

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")


def qkv(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(2, 4, S, 16).to(dtype).requires_grad_() for dtype in dtypes]


def autocast(dtype: torch.dtype = LOW) -> torch.autocast:
    return torch.autocast("cpu", dtype)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "dtypes"), [(LOW, [torch.float32] * 3), (torch.float16, [LOW, torch.float32, torch.float16])]
)
def test_a_call_under_autocast_equals_a_call_of_cast_tensors(dtype, dtypes, engine):
    """Out and lse are equal bit for bit; gradients have the dtypes of the tensors."""
    x = qkv(*dtypes)
    with autocast(dtype):
        out, lse = tritoncp.flex_attention(*x, causal(), return_lse=True)
    cast = [t.detach().to(dtype).requires_grad_() for t in x]
    want, want_lse = tritoncp.flex_attention(*cast, causal(), return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    grads = torch.autograd.grad(out.float().square().sum(), x)
    want_grads = torch.autograd.grad(want.float().square().sum(), cast)
    for grad, want_grad, tensor in zip(grads, want_grads, x, strict=True):
        assert grad.dtype == tensor.dtype
        assert torch.equal(grad, want_grad.to(tensor.dtype))


def test_float64_tensors_and_other_devices_are_not_cast():
    x = qkv(*[torch.float64] * 3)
    with autocast():
        assert tritoncp.flex_attention(*x).dtype == torch.float64
    x = qkv(*[torch.float32] * 3)
    with torch.autocast("cuda", LOW):
        assert tritoncp.flex_attention(*x).dtype == torch.float32


def products(bias: torch.Tensor):
    """Make a score_mod whose values differ if autocast reaches it."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (bias[h] * 1.2345678).exp() * 0.1

    return score_mod


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.usefixtures("eager_flex")
def test_captured_tensors_keep_their_dtype_and_get_gradients_in_it(dtype):
    bias, x = torch.randn(4).to(dtype).requires_grad_(), qkv(*[torch.float32] * 3)
    with autocast():
        out = tritoncp.flex_attention(*x, products(bias))
    want = tritoncp.flex_attention(*[t.to(LOW) for t in x], products(bias))
    assert torch.equal(out, want)
    (grad,) = torch.autograd.grad(out.float().sum(), [bias])
    assert grad.dtype == dtype
    with autocast():
        reference = torch_flex.flex_attention(*[t.detach() for t in x], score_mod=products(bias.detach()))
    assert reference.dtype == out.dtype
    torch.testing.assert_close(out, reference, rtol=0.02, atol=0.02)


def test_masks_are_made_the_same_under_autocast():
    """A product of matrices in a mask_mod is computed in the matrices' dtype."""
    vectors = torch.randn(S, 8)
    mod = lambda b, h, q, kv: vectors[q] @ vectors[kv] > 0.25  # noqa: E731
    with autocast():
        mask = create_block_mask(mod, 1, 1, S, S, BLOCK_SIZE=16)
        dense = mask.to_dense()[0, 0]
    assert torch.equal(dense, create_block_mask(mod, 1, 1, S, S, BLOCK_SIZE=16).to_dense()[0, 0])


@pytest.mark.parametrize("schedule", ["ring", "allgather", "ulysses"])
def test_ranks_cast_before_they_send(schedule):
    """Results equal results of cast shards, so that messages have the low precision."""
    world = simulate(2)
    plan = world.make_plan(create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16), schedule=schedule)
    x = [world.shard(t.detach(), plan, dim=2) for t in qkv(torch.float32, LOW, torch.float32)]
    with autocast():
        outs = world.flex_attention(*x, plan)
    wants = world.flex_attention(*[[t.to(LOW) for t in xs] for xs in x], plan)
    for out, want in zip(outs, wants, strict=True):
        assert out.dtype == LOW
        assert torch.equal(out, want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_call_casts_under_autocast(inside):
    torch._dynamo.reset()
    mask = make_plan(create_block_mask(document(lengths=[20, 12]), 1, 1, S, S, BLOCK_SIZE=16))

    def layer(q, k, v):
        with torch.autocast("cpu", LOW, enabled=inside):
            return tritoncp.flex_attention(q, k, v, mask)

    fast = torch.compile(layer if inside else tritoncp.flex_attention, backend="aot_eager", fullgraph=True)
    x = qkv(torch.float32, LOW, torch.float32)
    with autocast():
        out = fast(*x) if inside else fast(*x, mask)
        want = tritoncp.flex_attention(*x, mask)
    assert out.dtype == LOW
    assert torch.equal(out, want)
    grads = torch.autograd.grad(out.float().sum(), x)
    assert [grad.dtype for grad in grads] == [t.dtype for t in x]
    for grad, want_grad in zip(grads, torch.autograd.grad(want.float().sum(), x), strict=True):
        assert torch.equal(grad, want_grad)


def test_varlen_attention_casts_under_autocast():
    x = [torch.randn(S, 4, 16).to(dtype) for dtype in (LOW, torch.float32, torch.float32)]
    with autocast():
        out = tritoncp.varlen_attention(*x, torch.tensor([0, 20, S]), causal=True)
    assert out.dtype == LOW
