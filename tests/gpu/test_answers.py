"""Every feature of the kernels against the float64 oracle, by the rounding rule of tests/gpu/support.py."""

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.gpu.support import (
    BF16,
    BLOCK,
    DEVICE,
    FP16,
    FP32,
    MASKS,
    ON_GPU,
    QKV,
    SCORES,
    N,
    block_mask,
    check,
    normal,
    qkv,
    run,
)
from tritoncp.masks import causal, create_block_mask, full_mask, sliding_window


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    check(qkv(), MASKS[mask]())


@pytest.mark.parametrize(
    ("score", "mask"),
    [("softcap", "causal"), ("alibi", "full"), ("relative", "documents"), ("relative", "dilated")],
)
def test_scores_and_gradients_of_what_they_capture(score, mask):
    chosen = SCORES[score]
    check(qkv(), MASKS[mask](), chosen, chosen.captured(2))


CALLS = [  # tensors, mask, options
    *(({"dim": dim}, "causal", {}) for dim in (16, 32, 80, 96, 128, 192, 256)),
    *(({"dim": d, "v_dim": e}, "window", {}) for d, e in ((192, 128), (64, 128), (40, 24))),
    *(({"dim": dim, "dtype": dtype}, "documents", {}) for dim in (64, 128) for dtype in (FP16, FP32)),
    *(({"batch": 3, "heads": q, "kv_heads": kv}, "causal", {}) for q, kv in ((4, 4), (6, 2), (8, 1))),
    *(({}, "causal", {"scale": scale}) for scale in (0.3, -0.2, 0.0)),
    ({"dim": 128}, "documents", {"BLOCK_M": 64, "BLOCK_N": 32}),
    ({"dim": 128}, "documents", {"num_warps": 8, "num_stages": 1}),
]


@pytest.mark.parametrize(("tensors", "mask", "options"), CALLS, ids=str)
def test_shapes_dtypes_and_options(tensors, mask, options):
    check(qkv(**tensors), MASKS[mask](), **options)


@pytest.mark.parametrize(
    ("n", "kv", "block"), [(BLOCK - 3, N, BLOCK), (N, BLOCK + 1, BLOCK), (N, N, (100, 48))]
)
def test_more_keys_than_queries_fewer_and_odd_blocks(n, kv, block):
    mask = create_block_mask(sliding_window(2 * BLOCK, 9), 1, 1, n, kv, BLOCK_SIZE=block)
    check(qkv(n=n, kv=kv), mask)


@pytest.mark.parametrize(("size", "dtype"), [(1e8, BF16), (1e9, FP32)])
def test_gradients_of_large_scores_are_finite(size, dtype):
    x = qkv(dim=24, dtype=FP32)  # a scale that is no power of two
    q, k, v = ((t * s).to(dtype).requires_grad_() for t, s in zip(x[:3], (size**0.5, size**0.5, 1)))
    out = tritoncp.flex_attention(q, k, v, block_mask(causal()), enable_gqa=True)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(bool(t.isfinite().all()) for t in (out, *grads))


@pytest.mark.parametrize("n", [1, 17, BLOCK, 2 * BLOCK + 1])
def test_lengths(n):
    check(qkv(n=n), block_mask(causal(), n))


def test_any_strides():
    """Inputs [B, S, H, D] in memory with every second element, and an expanded output gradient."""
    x = qkv(batch=2)
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:2])
    spread = torch.stack([x.v, x.v], -1).flatten(-2)[..., ::2]
    dout = normal(1, 1, 1, 1).expand_as(x.dout)
    got = run(QKV(*turned, spread, dout, x.dlse), MASKS["causal"]())
    check(x._replace(dout=dout.contiguous()), MASKS["causal"](), got=got)


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


def test_a_mask_and_a_score_know_their_batch_row_and_head():
    table = torch.randint(1, N, (2, 4), device=DEVICE)
    mask = block_mask(lambda b, h, q, kv: (q >= kv) & (kv < table[b, h]), batch=2, heads=4)
    bias = torch.randn(2, 4, device=DEVICE)
    score = SCORES["none"]._replace(of=lambda: lambda s, b, h, q, kv: s * bias[b, h])
    check(qkv(batch=2, heads=4, kv_heads=2), mask, score)


def test_scores_of_minus_infinity():
    score = SCORES["none"]._replace(
        of=lambda: lambda s, b, h, q, kv: torch.where((q - kv) % 2 == 0, s, -float("inf"))
    )
    parity = block_mask(lambda b, h, q, kv: (q - kv) % 2 == 0)
    x = qkv()
    check(x, parity, got=run(x, full_mask(N, N, block=BLOCK), score))


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
