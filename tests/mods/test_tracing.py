"""Tests of tracing on the host: equal to torch's tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from tritoncp.mods.tracing import TensorIndexing, graph_of

IDS = torch.arange(64) // 10
TABLE = torch.arange(64 * 4).view(64, 4) % 7
FLAGS = IDS % 2 == 0


def edits_in_place(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    x = q.clone()
    x += kv
    return x > 3


MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "numbers": lambda b, h, q, kv: (q - kv < 4) & (q * 2 + 1 >= kv / 3.5),
    "batch": lambda b, h, q, kv: IDS[b] >= kv,
    "gather": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & FLAGS[q],
    "two indices": lambda b, h, q, kv: TABLE[q, kv % 4] > 2,
    "number and tensor": lambda b, h, q, kv: TABLE[3, q % 4] > 2,
    "row, then column": lambda b, h, q, kv: TABLE[q][kv % 4] > 2,
    "row and sum": lambda b, h, q, kv: TABLE[q].sum() > 2,
    "slice": lambda b, h, q, kv: TABLE[:, 1][q] > 2,
    "where": lambda b, h, q, kv: torch.where(q > 5, kv > 3, FLAGS[q]),
    "where of numbers": lambda b, h, q, kv: torch.where(q > 5, 1, 0) == 1,
    "constant": lambda b, h, q, kv: torch.ones((), dtype=torch.bool),
    "tensor of numbers": lambda b, h, q, kv: torch.tensor([1, 2, 3])[q % 3] > 1,
    "value of a capture": lambda b, h, q, kv: q > int(IDS.max()) if False else q > int(IDS[9]),
    "two results": lambda b, h, q, kv: torch.topk(TABLE[q], 2)[0][0] > kv,
    "same length": lambda b, h, q, kv: q.new_full((), 3) >= kv,
    "matrix": lambda b, h, q, kv: (torch.stack([q, kv]) @ TABLE[:2].t()[0, :2]) > 3,
    "reads nothing": lambda b, h, q, kv: FLAGS.any(),
    "in place": edits_in_place,
    "number": lambda b, h, q, kv: True,
    "branch": lambda b, h, q, kv: q > 3 if q > kv else q < 3,
    "item": lambda b, h, q, kv: q >= kv.item(),
    "wrong": lambda b, h, q, kv: IDS[q].nope,
}


def lines(graph: torch.fx.GraphModule | None) -> list[Any] | None:
    """Return the operations of a graph, numbered, with their arguments and the type of their results."""
    if graph is None:
        return None
    numbers: dict[Any, Any] = {}
    result: list[Any] = []
    for node in graph.graph.nodes:
        if node.op == "get_attr":  # make_fx has one for each use
            numbers[node] = getattr(graph, str(node.target)).tolist()
            continue
        numbers[node] = f"%{len(result)}"
        args = torch.fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        val = node.meta.get("val") if node.op == "call_function" else None
        kind = (val.dtype, val.shape) if isinstance(val, Tensor) else None
        target = "" if node.op == "placeholder" else node.target
        result.append((node.op, target, repr(args), kind))
    return result


def graph_of_torch(mask_mod: Callable[..., Any]) -> torch.fx.GraphModule | None:
    """Trace like `graph_of`, by torch's tracer and indexing."""
    try:
        with torch.no_grad(), TransformGetItemToIndex():
            graph = make_fx(mask_mod)(*torch.zeros(4, dtype=torch.int64))
    except Exception:
        return None
    graph.graph.eliminate_dead_code()
    return graph


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_is_traced_to_the_graph_of_make_fx(name: str) -> None:
    assert lines(graph_of(MASKS[name])) == lines(graph_of_torch(MASKS[name]))


def test_inference_mode_changes_no_graph() -> None:
    with torch.inference_mode():
        for name in ("gather", "where", "matrix"):
            assert lines(graph_of(MASKS[name])) == lines(graph_of_torch(MASKS[name]))


@pytest.mark.parametrize(
    "read",
    [
        lambda table, q, kv: table[q, kv],
        lambda table, q, kv: table[q][kv],
        lambda table, q, kv: table[1, kv],
        lambda table, q, kv: table[0, 1] * kv,
        lambda table, q, kv: table[q].sum(),
        lambda table, q, kv: table[:, 0][q] + table[None, 0, kv].sum(),
    ],
)
def test_vmapped_indexing_has_the_results_and_gradients_of_single_elements(
    read: Callable[..., Tensor],
) -> None:
    table = torch.arange(12.0).view(3, 4).requires_grad_()
    q, kv = torch.tensor([0, 2, 2, 1]), torch.tensor([3, 1, 1, 0])
    with TensorIndexing():
        out = torch.vmap(read, (None, 0, 0))(table, q, kv)
    singles = torch.stack([read(table, *pair) for pair in zip(q, kv)])
    for results in (out, singles), *[[torch.autograd.grad(x.sin().sum(), table)[0] for x in (out, singles)]]:
        torch.testing.assert_close(*results, rtol=0, atol=1e-6)
