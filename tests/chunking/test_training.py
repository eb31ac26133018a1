"""Training of the demo's model in chunks, ordered after the partitioner, against eager chunking."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule
from torch.nn import functional as F

from tritoncp import causal, flex_attention
from tritoncp.chunking import Eager, chunk, mark, order
from tritoncp.demo.corpus import IGNORE, window, windows
from tritoncp.demo.model import ModelShape, Transformer
from tritoncp.masks.named import alibi
from tritoncp.ops import engine_factory
from tritoncp.planning.cost import hardware_of

ROWS = 64
SHAPE = ModelShape(width=32, heads=4, kv_heads=2, head_dim=8, hidden=32)
BIAS = alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625]))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, BIAS, causal(), enable_gqa=True)


def losses(steps: int, model: torch.nn.Module, call: Callable[..., Tensor], prepare: Any) -> list[float]:
    """Train and return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    results = []
    for text in windows(ROWS, steps).unbind():
        tokens, labels, _ = window(text)
        places = torch.arange(ROWS)[None]
        prepare(tokens, places)
        optimizer.zero_grad()
        logits = call(tokens, places, attend)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return results


def in_chunks(model: torch.nn.Module) -> tuple[Callable[..., Tensor], list[Any]]:
    """Compile a model whose joint graph is cut, and whose forward and backward graphs are ordered."""
    reports: list[Any] = []

    def partition(gm: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        reports.append(chunk(gm, dim="seq"))
        return default_partition(gm, inputs, **kwargs)

    def compiler(gm: GraphModule, inputs: Any) -> Any:
        reports.append(order(gm, hardware_of(8)))
        return gm

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    return torch.compile(model, backend=backend, fullgraph=True), reports


@pytest.mark.long
def test_ordered_chunks_train_with_the_losses_of_eager_chunking(monkeypatch):
    monkeypatch.setattr(engine_factory, "uses_triton", lambda device: False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    eager = copy.deepcopy(model)
    for i, layer in enumerate(eager.layers):
        eager.layers[i] = Eager(layer, 2, "seq")
    call, reports = in_chunks(model)
    run = losses(20, model, call, lambda *inputs: [mark(x, 1, 2) for x in inputs])
    assert run == pytest.approx(losses(20, eager, eager, lambda *inputs: None), rel=1e-5)
    assert run[-1] < run[0]
    report, *orders = reports  # one compilation serves all steps
    assert report.regions == ("layers.0", "layers.1") and report.keys == (1, 2)
    assert [one.after.makespan <= one.before.makespan for one in orders] == [True, True]
