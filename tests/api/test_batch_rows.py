"""Tests of batch_offset: graphs, plans of rows and errors; `tests/test_fuzz.py` has its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp
from tritoncp import and_masks, causal, create_block_mask, document

pytestmark = pytest.mark.usefixtures("cpu_engine")
B, HEADS, S, D = 3, 2, 40, 8
BITS = torch.rand(B, S, S, generator=torch.Generator().manual_seed(3)) < 0.4
IDS = torch.randint(0, 3, (B, S), generator=torch.Generator().manual_seed(4)).sort(1).values


def bits(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return BITS[b, q, kv]


def listed(mod: Callable[..., Tensor], heads: int = 1) -> Any:
    return create_block_mask(mod, B, heads, S, S, BLOCK_SIZE=32)


def whole_batch() -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Return q, k and v of a whole batch, and a score_mod that captures a number for each row."""
    table = torch.randn(B, S, dtype=torch.float64)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * (b + 1) + table[b, q]

    return [torch.randn(B, HEADS, S, D, dtype=torch.float64) for _ in range(3)], score


@pytest.mark.long
def test_one_graph_serves_every_offset() -> None:
    (qkv, score), plan = whole_batch(), tritoncp.make_plan(listed(bits, heads=HEADS))
    counted = torch._dynamo.testing.CompileCounter()

    def call(x: list[Tensor], batch_offset: int) -> Tensor:
        return tritoncp.flex_attention(*x, score, plan, batch_offset=batch_offset)

    torch._dynamo.reset()
    fast = torch.compile(call, backend=counted, fullgraph=True)
    whole = call(qkv, 0)
    for first in (2, 1, 0):
        out = fast([x[first : first + 1] for x in qkv], first)
        torch.testing.assert_close(out, whole[first : first + 1], rtol=1e-10, atol=1e-10)
    assert counted.frame_count <= 3  # a first graph, and the graphs for 0 and 1, which torch always makes


def test_a_plan_of_rows_needs_no_other_plan() -> None:
    """A plan of batch rows places and numbers rows as a call with an offset does."""
    qkv, score = whole_batch()
    plan = tritoncp.make_plan(listed(and_masks(causal(), document(ids=IDS))))
    x = [t[1:3] for t in qkv]
    part = plan.batch_rows(1, 2)
    want = tritoncp.flex_attention(*x, score, plan, batch_offset=1)
    assert torch.equal(tritoncp.flex_attention(*x, score, part), want)
    last = tritoncp.flex_attention(*(t[1:] for t in x), score, part.batch_rows(1, 1))
    torch.testing.assert_close(last, want[1:], rtol=1e-13, atol=1e-13)  # products of one row, and of two
    assert plan.batch_rows(1, 1).digest != plan.batch_rows(2, 1).digest


def test_one_plan_serves_every_offset_of_a_mask_that_does_not_read_the_row() -> None:
    x = [torch.randn(1, HEADS, S, D) for _ in range(3)]
    for mask in (causal(), torch_block_mask(bits, B, HEADS, S, S, device="cpu", BLOCK_SIZE=32), None):
        tritoncp.plan_cache_clear()
        for offset in range(3):
            tritoncp.flex_attention(*x, mask, batch_offset=offset)
        assert tritoncp.plan_cache_info().misses == 1
