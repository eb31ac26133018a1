"""Packed documents on the kernels. On a GPU at the sizes that TransformerEngine tests: batch 2, up to 4096
tokens, 12 heads and 12:2, head dim 128, window (512, 0), causal and not, padding behind each document."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.device import ON_GPU
from tests.kernels.support.harness import QKV, Results, agree, oracle
from tritoncp import varlen_attention, varlen_mask

TOKENS, WINDOW, DIM = ((4077, 0, 2990), (512, 0), 128) if ON_GPU else ((90, 0, 41), (30, 0), 32)
HEADS = ((12, 12), (12, 2)) if ON_GPU else ((2, 2), (2, 1))
ROWS = [-(-n // 16) * 16 for n in TOKENS]
STARTS = [0, *itertools.accumulate(ROWS)]
DOCUMENTS = [slice(start, start + n) for start, n in zip(STARTS, TOKENS) if n]


def cumulative(lengths: tuple[int, ...] | list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Draw q, k, v, and gradients of out and lse, as whole buffers [t, h, d], with NaN in every row of
    padding; and return which rows are padding."""
    padding = torch.ones(sum(ROWS), dtype=torch.bool)
    for rows in DOCUMENTS:
        padding[rows] = False
    x = [torch.randn(sum(ROWS), h, DIM).to(dtype) for h in (heads, kv_heads, kv_heads, heads)]
    x.append(torch.randn(sum(ROWS), heads))
    for tensor in x:
        tensor[padding] = math.nan
    return x, padding


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), WINDOW], ids=["no window", "window"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_each_document_is_as_if_alone(
    heads: tuple[int, int], causal: bool, window: tuple[int, int], dtype: torch.dtype
) -> None:
    x, padding = packed(*heads, dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in x[:3]]
    out, aux = varlen_attention(
        *leaves, cu_seqlens_q=cumulative(TOKENS), cu_seqlens_q_padded=cumulative(ROWS), causal=causal,
        window=window, return_aux=AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    grads = torch.autograd.grad([out, aux.lse], leaves, x[3:])
    results = [out.detach(), aux.lse.detach(), aux.max_scores, *grads]
    for name, tensor in zip(("out", "lse", "max_scores", "dq", "dk", "dv"), results, strict=True):
        assert bool((tensor[padding] == (-math.inf if name in ("lse", "max_scores") else 0)).all()), name
    for rows in DOCUMENTS:
        q, k, v, *start = (tensor[rows].transpose(0, 1)[None] for tensor in x)
        mask = varlen_mask(torch.tensor([0, rows.stop - rows.start]), causal=causal, window=window)
        out, lse, top, *grads = (tensor[rows].transpose(0, 1)[None] for tensor in results)
        agree(Results(out, lse, top, tuple(grads)), oracle(QKV(q, k, v), mask, start=tuple(start)))


def test_megatrons_order_stays_on_the_device() -> None:
    edges, x = cumulative([24, 0, 40]), torch.randn(64, 2, DIM)
    dual = tritoncp.contiguous_to_dual_chunk(x, edges, world_size=4)
    assert dual.device == x.device and not torch.equal(dual, x)
    assert torch.equal(tritoncp.dual_chunk_to_contiguous(dual, edges, world_size=4), x)
