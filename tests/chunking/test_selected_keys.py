"""Chunks of attention to selected keys: graphs and eager chunking, whole indices as inputs and indices that a
chunk computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.chunking.models import compiled
from tests.draws import by_turns
from tritoncp import Selection, causal, create_block_mask, flex_attention, select_keys
from tritoncp.chunking import Eager, chunk, mark
from tritoncp.chunking.report import ChunkingError

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")
B, S, WIDTH, HEADS = 4, 48, 16, 2
MASK = create_block_mask(causal(), None, None, S, S, BLOCK_SIZE=16)


class Layer(nn.Module):
    """Attention of x [B, S, width] to selected keys, with a linear map before and after.

    recent: number of recent keys that the layer selects by itself, from positions [S]; 0: ``indices`` are an
        argument [B, 1, S, n]
    """

    def __init__(self, recent: int, query_block: int = 1) -> None:
        super().__init__()
        self.recent, self.query_block = recent, query_block
        self.before, self.after = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        if self.recent:
            chosen = (chosen[:, None] - torch.arange(self.recent)).clamp(min=-1)[None, None]
        q, k, v = self.before(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = flex_attention(q, k, v, MASK, selected=Selection(chosen, query_block=self.query_block))
        return self.after(out.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.layers[0](x.sin(), chosen)


def model_of(recent: int) -> tuple[nn.Module, Tensor]:
    """Return a model and what it gets besides x."""
    torch.manual_seed(recent)
    indices = torch.randint(-1, S, (B, 1, S, 6), dtype=torch.int32)
    return Layers(Layer(recent)).double(), torch.arange(S) if recent else indices


def step(model: nn.Module, call: Any, chosen: Tensor, dim: int | None = None) -> list[Tensor]:
    """Return the output and all gradients of a step. dim: dimension of x that chunks cut"""
    torch.manual_seed(0)
    x = torch.randn(B, S, WIDTH, dtype=torch.float64).requires_grad_()
    if dim is not None:
        mark(x, dim, 2)
        if dim == 1 or chosen.ndim > 1:
            mark(chosen, 2 * dim if chosen.ndim > 1 else 0, 2)
    out = call(x, chosen)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


def agree(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.long
@pytest.mark.parametrize(("recent", "dim"), by_turns([0, 5], ["seq", "batch"]))
def test_chunks_of_a_graph_attend_to_the_selected_keys(recent: int, dim: str) -> None:
    model, chosen = model_of(recent)
    want = step(model, model, chosen)
    reports: list[Any] = []
    call = compiled(model, lambda gm: reports.append(chunk(gm, dim=dim, chunks=2)))
    agree(step(model, call, chosen.clone(), ("batch", "seq").index(dim)), want)
    assert reports and bool(reports[0])


@pytest.mark.parametrize("dim", ["seq", "batch"])
@pytest.mark.parametrize("recent", [0, 5])
def test_eager_chunks_attend_to_the_selected_keys(recent: int, dim: str) -> None:
    model, chosen = model_of(recent)
    want, eager = step(model, model, chosen), copy.deepcopy(model)
    eager.layers[0] = Eager(eager.layers[0], 2, dim)
    agree(step(eager, eager, chosen), want)


@pytest.mark.parametrize("dim", ["seq", "batch"])
def test_eager_chunks_of_an_empty_batch_are_empty(dim: str) -> None:
    model, chosen = model_of(0)
    x = torch.randn(0, S, WIDTH, dtype=torch.float64, requires_grad=True)
    model.layers[0] = Eager(model.layers[0], 2, dim)
    out = model(x, chosen[:0])
    grads = torch.autograd.grad(out.sum(), [x, *model.parameters()])
    assert out.shape == x.shape and grads[0].shape == x.shape
    assert all(not grad.any() for grad in grads[1:])


@pytest.mark.long
def test_a_region_without_a_row_for_each_query_is_refused() -> None:
    model = Layers(Layer(0, query_block=8)).double()
    chosen = torch.randint(-1, S, (B, 1, S // 8, 6), dtype=torch.int32)
    call = compiled(model, lambda gm: chunk(gm, dim="seq", chunks=2))
    with pytest.raises(Exception, match="a row for each query that is cut"):
        step(model, call, chosen, 1)


@pytest.mark.long
def test_a_region_that_chooses_keys_is_refused() -> None:

    class Choosing(Layer):
        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            index = x[:, None]
            own = select_keys(index, index, top=4, block_mask=MASK).indices
            return super().forward(x, own)

    model = Layers(Choosing(0)).double()
    call = compiled(model, lambda gm: chunk(gm, dim="seq", chunks=2))
    with pytest.raises(Exception, match=r"select_keys.*move it out of the region"):
        step(model, call, torch.arange(S), 1)
    model.layers[0] = Eager(model.layers[0], 2, "seq")
    with pytest.raises(ChunkingError, match=r"select_keys inside the module .* before the module"):
        step(model, model, torch.arange(S), 1)
