"""Calls with selected keys on compiled code, against float64 attention: ``pytest --compiled sm_90``."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tritoncp import Selection, causal, create_block_mask, flex_attention
from tritoncp.kernels.tiles import INTERPRETED
from tritoncp.reference.dense import dense_attention

S = 70


class SelectedCase(NamedTuple):
    """A call of ``group`` query heads for each of two KV heads. shares: heads of the selection"""

    dtype: torch.dtype = torch.bfloat16
    dim: int = 64
    group: int = 4
    shares: int = 1
    block_size: int = 1
    query_block: int = 1
    scored: bool = False


CASES = {
    "tokens": SelectedCase(),
    "a key head of its own": SelectedCase(dim=128, shares=2, group=2),
    "scores": SelectedCase(scored=True, dtype=torch.float16),
    "blocks": SelectedCase(block_size=16, query_block=16, group=1),
    "blocks of heads": SelectedCase(block_size=32, shares=2, dtype=torch.float16, scored=True),
    "rows of more queries than a tile": SelectedCase(
        dtype=torch.float32, dim=32, group=1, block_size=16, query_block=70
    ),
    "float32": SelectedCase(dtype=torch.float32, dim=32, group=1, shares=2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "tokens")) for name in CASES]
)
def test_selected_keys_on_compiled_code(name: str) -> None:
    case = CASES[name]
    g = torch.Generator().manual_seed(2)
    heads = 2 * case.group
    shapes = (1, heads, S, case.dim), (1, 2, S, case.dim), (1, 2, S, case.dim), (1, heads, S, case.dim)
    q, k, v, dout = (torch.randn(shape, generator=g).to(case.dtype) for shape in shapes)
    rows, blocks = -(-S // case.query_block), -(-S // case.block_size)
    indices = torch.randint(-1, blocks, (1, case.shares, rows, min(9, blocks)), generator=g).int()
    chosen = Selection(indices, case.block_size, case.query_block)
    mask = create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16)
    slopes = torch.linspace(0.1, 0.9, heads)

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s - slopes[h] * (q_idx - kv_idx)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mod = score if case.scored else None
    out = flex_attention(*leaves, mod, mask, enable_gqa=True, selected=chosen)
    got = out, *torch.autograd.grad(out, leaves, dout)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    visible = mask.to_dense(1, heads) & chosen.to_dense(S, S).repeat_interleave(heads // case.shares, 1)
    want = dense_attention(*exact, visible, mod).out
    want_all = want, *torch.autograd.grad(want, exact, dout.double())
    step = torch.finfo(case.dtype).eps if case.dtype != torch.float32 else 1e-5
    for x, exactly in zip(got, want_all, strict=True):
        error = (x.double() - exactly).abs().max() / exactly.abs().max()
        assert error <= 4 * step
    assert not INTERPRETED
