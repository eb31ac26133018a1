"""Probabilities of selected keys on compiled code, against float64 attention: ``pytest --compiled sm_90``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tritoncp import Selection, SelectionAuxRequest, causal, create_block_mask, flex_attention
from tritoncp.kernels.tiles import INTERPRETED
from tritoncp.reference.dense import dense_attention

S, GROUP, KV_HEADS = 40, 4, 2
CASES = {  # (dtype, head dim, heads of the selection, block_size, query_block, whether there is a score_mod)
    "tokens": (torch.bfloat16, 64, 1, 1, 1, False),
    "scores, KV heads": (torch.float16, 64, 2, 1, 1, True),
    "blocks": (torch.float32, 32, 1, 16, 8, False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "tokens")) for name in CASES]
)
def test_probabilities_on_compiled_code(name: str) -> None:
    dtype, dim, shares, block_size, query_block, scored = CASES[name]
    g, heads = torch.Generator().manual_seed(2), GROUP * KV_HEADS
    q, k, v = (torch.randn(1, n, S, dim, generator=g).to(dtype) for n in (heads, KV_HEADS, KV_HEADS))
    blocks = -(-S // block_size)
    indices = torch.stack([torch.randperm(blocks, generator=g)[:3] for _ in range(shares * S // query_block)])
    chosen = Selection(indices.view(1, shares, -1, 3).int(), block_size, query_block)
    mask = create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16)
    slopes = torch.linspace(0.1, 0.9, heads)

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s - slopes[h] * (q_idx - kv_idx)

    mod = score if scored else None
    aux = flex_attention(
        q, k, v, mod, mask, enable_gqa=True, selected=chosen,
        return_aux=SelectionAuxRequest(probabilities=True),
    )[1]  # fmt: skip
    visible = mask.to_dense(1, heads) & chosen.to_dense(S, S).repeat_interleave(heads // shares, 1)
    identity = torch.eye(S, dtype=torch.float64).expand(1, KV_HEADS, S, S)
    pairs = dense_attention(q.double(), k.double(), identity, visible, mod).out.unflatten(1, (shares, -1))
    columns = torch.nn.functional.pad(pairs.sum(2), (0, blocks * block_size - S)).unflatten(3, (blocks, -1))
    want = columns.sum(4).gather(3, chosen.indices.long().repeat_interleave(query_block, 2))
    error = (aux.probabilities.double() - want).abs().max() / want.max()
    assert error <= 4 * (torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5)
    assert not INTERPRETED
