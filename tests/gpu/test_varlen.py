"""Packed documents at the sizes that TransformerEngine tests: batch 2, up to 4096 tokens, 12 heads and 12:2,
head dim 128, window (512, 0), causal and not, padding at the end of each document."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.gpu.support import BF16, DEVICE, FP32, ON_GPU, check, normal
from tests.kernels.support.harness import QKV, Results
from tritoncp import varlen_attention, varlen_mask

TOKENS = (4077, 0, 2990) if ON_GPU else (90, 0, 41)
ROWS = tuple(-(-n // 16) * 16 for n in TOKENS)
WINDOW = (512, 0) if ON_GPU else (30, 0)
DIM = 128 if ON_GPU else 32
AUX = AuxRequest(lse=True, max_scores=True)


def cumulative(lengths):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)


EDGES = {"cu_seqlens_q": cumulative(TOKENS), "cu_seqlens_q_padded": cumulative(ROWS)}
FIRST = [sum(ROWS[:i]) for i in range(len(ROWS))]
DOCUMENTS = [slice(first, first + n) for first, n in zip(FIRST, TOKENS) if n]


def packed(heads, kv_heads, dtype=BF16):
    """Whole buffers [t, h, d], NaN in every row of padding."""
    t = sum(ROWS)
    x = [normal(t, h, DIM, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads)] + [
        normal(t, heads, dtype=FP32)
    ]
    padding = torch.ones(t, dtype=torch.bool, device=DEVICE)
    for rows in DOCUMENTS:
        padding[rows] = False
    for tensor in x:
        tensor[padding] = math.nan
    return x, padding


def by_document(results, x, padding, **options):
    """Check zeros (-inf) in padding, and each document against the oracle of that document alone."""
    for name, tensor in zip(("out", "lse", "max_scores", "dq", "dk", "dv"), results):
        assert bool((tensor[padding] == (-math.inf if name in ("lse", "max_scores") else 0)).all()), name
    for rows in DOCUMENTS:
        parts = [tensor[rows].transpose(0, 1)[None] for tensor in x]
        alone = varlen_mask(torch.tensor([0, rows.stop - rows.start]), **options)
        got = [tensor[rows].transpose(0, 1)[None] for tensor in results]
        check(QKV(*parts[:3]), alone, got=Results(*got[:3], tuple(got[3:])), start=tuple(parts[3:]))


CASES = [
    pytest.param(heads, causal, window, id=f"{heads[0]}-{heads[1]}-{causal}-{window[0]}")
    for heads in ([(12, 12), (12, 2)] if ON_GPU else [(2, 2), (2, 1)])
    for causal in (True, False)
    for window in ((-1, -1), WINDOW)
]


@pytest.mark.parametrize(("heads", "causal", "window"), CASES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_document_at_a_time(heads, causal, window, dtype):
    x, padding = packed(*heads, dtype=dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in x[:3]]
    out, more = varlen_attention(*leaves, **EDGES, causal=causal, window=window, return_aux=AUX)
    grads = torch.autograd.grad([out, more.lse], leaves, x[3:])
    results = [out.detach(), more.lse.detach(), more.max_scores, *grads]
    by_document(results, x, padding, causal=causal, window=window)


def test_megatrons_order_on_the_device():
    edges = cumulative([8 * n for n in (3, 0, 5)])
    x = normal(64, 2, DIM)
    dual = tritoncp.contiguous_to_dual_chunk(x, edges, world_size=4)
    assert dual.device == x.device and not torch.equal(dual, x)
    assert torch.equal(tritoncp.dual_chunk_to_contiguous(dual, edges, world_size=4), x)
