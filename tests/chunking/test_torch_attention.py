"""torch's flex attention in chunks of the batch: bits of a loop over the chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex

from tests.chunking.models import compiled
from tests.chunking.test_trainers import Model, results
from tritoncp.chunking import chunk, mark, torch_attention

S, WIDTH = 32, 16
IDS = torch.randint(3, (5, S), generator=torch.Generator().manual_seed(0))
TEMPERATURES = torch.rand(5, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def gradients_on_cpu(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """torch refuses gradients of flex attention on CPUs, though its dense form has them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)


def block_mask(batch: int | None, rows: int, first: int = 0) -> Any:
    """Make a causal mask, of documents if it has a batch, for ``rows`` batch rows from ``first`` on."""

    def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (IDS[b + first, q] == IDS[b + first, kv])

    mod = documents if batch else (lambda b, h, q, kv: q >= kv)
    return torch_flex.create_block_mask(mod, batch and rows, None, S, S, device="cpu", BLOCK_SIZE=16)


class Layer(nn.Module):
    """Attention of two heads, whose score_mod reads a parameter, and b if ``by_row``."""

    def __init__(self, mask: Any, by_row: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.slopes = nn.Parameter(torch.rand(2))
        self.mask, self.by_row, self.first = mask, by_row, 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

        def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            score = score - self.slopes[h] * (q_idx - kv_idx)
            return score * TEMPERATURES[b + self.first] if self.by_row else score

        out = torch_flex.flex_attention(q, k, v, score_mod=score, block_mask=self.mask)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Loop(nn.Module):
    """A layer that runs once a chunk of the batch."""

    def __init__(self, layer: Layer, chunks: int, batch: int | None) -> None:
        super().__init__()
        self.layer, self.chunks, self.batch = layer, chunks, batch

    def forward(self, x: Tensor) -> Tensor:
        outs, first = [], 0
        for part in x.chunk(self.chunks):
            self.layer.first, self.layer.mask = first, block_mask(self.batch, len(part), first)
            outs.append(self.layer(part.contiguous()))
            first += len(part)
        return torch.cat(outs)


CASES = (
    ("of all rows", False, 4, 2),
    pytest.param("of each row", True, 5, 3, marks=pytest.mark.long),
    pytest.param("of marked rows", True, 5, 3, marks=pytest.mark.long),
)


@pytest.mark.long
@pytest.mark.parametrize(("mask", "by_row", "rows", "chunks"), CASES)
def test_chunks_of_the_batch_have_the_bits_of_a_loop(mask, by_row, rows, chunks):
    batch = None if mask == "of all rows" else rows
    model, x = Model(Layer(block_mask(batch, rows), by_row)), torch.randn(rows, S, WIDTH)
    loop = copy.deepcopy(model)
    loop.layers[0] = Loop(loop.layers[0], chunks, batch)
    want = results(loop, loop, x)
    lists = model.layers[0].mask.as_tuple() if mask == "of marked rows" else ()
    for tensor in (x, *(one for one in lists if isinstance(one, Tensor))):
        mark(tensor, 0, chunks)
    reports, rows_of_lists = [], []

    def rewrite(gm: torch.fx.GraphModule) -> None:
        reports.append(chunk(gm, dim="batch", chunks=chunks))
        for node in gm.graph.find_nodes(op="call_function", target=torch_attention.forward_op):
            lists = [x for x in node.args[torch_attention.BLOCKS] if isinstance(x, torch.fx.Node)]
            own = node.args[0].meta["val"].shape[0] if batch else 1
            rows_of_lists.append([str(x.meta["val"].shape[0]) == str(own) for x in lists if "val" in x.meta])

    got = results(model, compiled(model, rewrite), x)
    assert len(rows_of_lists) == chunks and all(are_own and all(are_own) for are_own in rows_of_lists)
    assert all(map(torch.equal, got, want)) and len(got) == 6
    assert reports[0].live_outs == {"cat": 2, "sum": 3}


@pytest.mark.long
def test_cutting_torchs_attention_by_sequence_is_refused_with_the_reason():
    model, x = Model(Layer(None, False)).requires_grad_(False), torch.randn(4, S, WIDTH)
    mark(x, 1, 2)
    with pytest.raises(
        Exception, match=r"node flex_attention .*cannot be cut by sequence.*call tritoncp.flex_attention"
    ):
        compiled(model, lambda gm: chunk(gm, dim="seq"))(x)
