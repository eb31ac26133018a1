"""Large scores, offsets and NaN against the float64 oracle; test_cases.py has every other feature."""

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.gpu.support import (
    BF16,
    DEVICE,
    FP32,
    MASKS,
    ON_GPU,
    QKV,
    SCORES,
    N,
    block_mask,
    check,
    qkv,
    run,
)
from tritoncp.masks import causal


@pytest.mark.parametrize(("size", "dtype"), [(1e8, BF16), (1e9, FP32)])
def test_gradients_of_large_scores_are_finite(size, dtype):
    x = qkv(dim=24, dtype=FP32)  # a scale that is no power of two
    q, k, v = ((t * s).to(dtype).requires_grad_() for t, s in zip(x[:3], (size**0.5, size**0.5, 1)))
    out = tritoncp.flex_attention(q, k, v, block_mask(causal()), enable_gqa=True)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(bool(t.isfinite().all()) for t in (out, *grads))


@pytest.mark.bar(9)
def test_offsets_beyond_two_to_the_31():
    stride = 2**31 + 64 if ON_GPU else 2**14 + 64
    memory = torch.zeros(stride + N * 64, dtype=BF16, device=DEVICE)
    x = qkv(heads=2, kv_heads=2)
    far = memory.as_strided((1, 2, N, 64), (2 * stride, stride, 64, 1))
    for part in range(3):
        with torch.no_grad():
            far.copy_(x[part])
        moved = QKV(*(far if i == part else t for i, t in enumerate(x)))
        check(x, MASKS["causal"](), got=run(moved, MASKS["causal"]()))


@pytest.mark.parametrize("score", ["none", "softcap"])
def test_a_nan_is_in_every_answer_that_saw_it(score):
    """On a GPU, unlike the CPU, a maximum drops NaN."""
    x, key = qkv(heads=4, kv_heads=2), N // 2
    with torch.no_grad():
        x.q[0, 0, 5] = torch.nan
        x.k[0, 1, key] = torch.nan
    mod = None if score == "none" else SCORES[score].of()
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out, aux = tritoncp.flex_attention(
        *leaves, mod, block_mask(causal()), enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    for answer in (out[..., 0], aux.lse, aux.max_scores):
        want = torch.zeros_like(answer, dtype=torch.bool)
        want[0, 0, 5] = want[0, 2:, key:] = True
        assert torch.equal(answer.isnan(), want)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert bool(dq[0, 0, 5].isnan().all() and dq[0, 2:, key:].isnan().all())
    assert bool(dk[0, 0, :6].isnan().all() and dv[0, 0, :6].isnan().all())
