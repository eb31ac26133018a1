"""Tests of dK and dV of keys that are selected one by one, by chunks of queries, against dense float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tritoncp import causal, create_block_mask, document
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods
from tritoncp.planning.build import build
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.planning.step_tables import BackwardStep
from tritoncp.reference.dense import dense_attention
from tritoncp.selection import key_gradients
from tritoncp.selection.selection import Selection
from tritoncp.selection.triton_engine import SelectedTritonEngine
from tritoncp.selection.visible import VisiblePairs

S, DIM, V_DIM = 40, 8, 12
MASK = create_block_mask(causal() & document(lengths=[25, S - 25]), 1, 1, S, S, BLOCK_SIZE=16)


class Gradients:
    """dK and dV of one KV head, whose two query heads select keys of their own.

    step, engine: prepared for tensors of ``dtype``; exact: dK and dV in float64
    """

    def __init__(self, dtype: torch.dtype, query_block: int = 1) -> None:
        g = torch.Generator().manual_seed(7)
        shapes = (1, 2, S, DIM), (1, 1, S, DIM), (1, 1, S, V_DIM), (1, 2, S, V_DIM)
        q, k, v, dout = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
        indices = torch.randint(-1, S, (1, 2, S // query_block, 6), generator=g).int()
        chosen = Selection(indices, 1, query_block)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        visible = MASK.to_dense(1, 2) & chosen.to_dense(S)
        want = dense_attention(*leaves, visible)
        self.exact = torch.autograd.grad(want.out, leaves[1:], dout.double())
        stats = torch.float64 if dtype == torch.float64 else torch.float32
        delta = (want.out.detach() * dout.double()).sum(-1)
        plan = build(MASK, 1)
        lse = want.lse.detach().to(stats).contiguous()
        self.step = BackwardStep(q, k, v, dout, lse, delta.to(stats), plan.tables("cpu", 1, 2))
        rows = SelectedRows(*chosen.unique(), plan.positions, 2, 2, 2)
        base = TritonEngine(Mods(), DIM**-0.5)
        self.engine = SelectedTritonEngine(base, rows, VisiblePairs(MASK, MASK.mask_mod))

    def launches(self, dk: Tensor, dv: Tensor, add: bool = False) -> Any:
        return self.engine.dkdv(self.step, dk, dv, self.step.q, add=add)

    def results(self, dtype: torch.dtype) -> list[Tensor]:
        """Make the tensors of dK and dV, with NaN in each element."""
        return [torch.full_like(x, torch.nan, dtype=dtype) for x in (self.step.k, self.step.v)]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut queries into chunks of 16."""
    monkeypatch.setattr(key_gradients, "LEAST_ROWS", 1)
    monkeypatch.setattr(key_gradients, "ROWS_OF_KEY", 1)


@pytest.mark.long
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("query_block", [1, 2])
def test_chunks_add_up_to_the_gradients_of_all_queries(query_block: int) -> None:
    gradients = Gradients(torch.float64, query_block)
    results = gradients.results(torch.float64)
    launches = gradients.launches(*results)
    assert len(launches.parts) == 2 * -(-S // query_block // 16)
    launches()
    for x, exact in zip(results, gradients.exact, strict=True):
        torch.testing.assert_close(x, exact, rtol=0, atol=1e-12)
    if query_block == 2:
        gradients.launches(*results, add=True)()
        for x, exact in zip(results, gradients.exact, strict=True):
            torch.testing.assert_close(x, 2 * exact, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.usefixtures("chunks")
def test_sums_of_chunks_are_rounded_once() -> None:
    gradients = Gradients(torch.bfloat16)
    wide, narrow = gradients.results(torch.float32), gradients.results(torch.bfloat16)
    gradients.launches(*wide)()
    gradients.launches(*narrow)()
    for x, y, exact in zip(wide, narrow, gradients.exact, strict=True):
        torch.testing.assert_close(y.float(), x, rtol=2**-7, atol=0)  # Triton's interpreter truncates
        assert float((x - exact).abs().max() / exact.abs().max()) < 0.02
