"""Mods that torch can evaluate for all pairs of a tile without vmap, since they are made of elementwise
operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tritoncp.mods.translate.graph_passes import make_module

aten = torch.ops.aten
# Operations that act on each element, without torch's tag for these.
_UNTAGGED = {
    aten._to_copy.default, aten.detach.default, aten.floor_divide.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip


def elementwise_form(graph: fx.GraphModule, arguments: int) -> fx.GraphModule | None:
    """Return a form of a mod's graph for 4-d tensors that broadcast, in place of 0-d ones; None if an
    operation is not elementwise. The result may have fewer elements than the arguments together.

    It takes a fraction of the time of torch.vmap, and either returns or raises for any arguments: a gather
    checks its indices.

    graph:     of 0-d arguments and captures, without edits in place
    arguments: the number of arguments; the other inputs are captures

    >>> from tritoncp import mods
    >>> graph = mods.score_mod(lambda score, b, h, q, kv: score + torch.tensor([5, 7])[h] * kv).graph
    >>> form = elementwise_form(graph, 5)
    >>> at = [torch.arange(n).view(shape) for n, shape in ((2, (1, 2, 1, 1)), (3, (1, 1, 1, 3)))]
    >>> form.forward(torch.zeros(1, 2, 1, 3), None, at[0], None, at[1], torch.tensor([5, 7])).tolist()
    [[[[0.0, 5.0, 10.0]], [[0.0, 7.0, 14.0]]]]
    """
    if "elementwise" not in graph.meta:
        graph.meta["elementwise"] = _make_form(graph, arguments)
    return graph.meta["elementwise"]


def _make_form(graph: fx.GraphModule, arguments: int) -> fx.GraphModule | None:
    form, copies, of_pairs = fx.Graph(), dict[fx.Node, Any](), set[fx.Node]()

    def spread(x: Any) -> Any:
        """Return the copy of an operand; a 0-d tensor that all pairs share gets four dimensions, as types are
        promoted otherwise for 0-d tensors."""
        is_tensor = isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor)
        if not is_tensor or x in of_pairs:
            return copies[x] if isinstance(x, fx.Node) else x
        return form.call_function(aten.reshape.default, (copies[x], [1] * 4))

    for place, node in enumerate(graph.graph.nodes):
        if node.op == "output":
            form.output(spread(node.args[0]))
        elif node.op == "placeholder" or of_pairs.isdisjoint(node.all_input_nodes):
            copies[node] = form.node_copy(node, copies.__getitem__)
            of_pairs |= {node} if place < arguments else set()
        elif node.target is aten.clone.default:
            copies[node] = copies[node.args[0]]  # nothing is edited in place
            of_pairs.add(node)
        elif _is_gather(node, of_pairs) or _is_elementwise(node):
            table = node.args[:1] if node.target is aten.index.Tensor else ()
            arguments_of = [copies[x] if x in table else fx.map_arg(x, spread) for x in node.args]
            copies[node] = form.call_function(
                node.target, tuple(arguments_of), fx.map_arg(node.kwargs, spread)
            )
            copies[node].meta = node.meta
            of_pairs.add(node)
        else:
            return None
    return make_module(form)


def _is_elementwise(node: fx.Node) -> bool:
    """Return whether an operation on 0-d tensors acts on each element."""
    tensors = [node, *node.all_input_nodes]
    tags = getattr(node.target, "tags", ())
    return (torch.Tag.pointwise in tags or node.target in _UNTAGGED) and all(map(_is_scalar, tensors))


def _is_gather(node: fx.Node, of_pairs: set[fx.Node]) -> bool:
    """Return whether the node reads one element of a captured tensor for each pair."""
    if node.target is not aten.index.Tensor or node.args[0] in of_pairs:
        return False
    indices = node.args[1]
    integers = [
        isinstance(i, fx.Node) and _is_scalar(i) and i.meta["val"].dtype != torch.bool for i in indices
    ]
    return all(integers) and len(indices) == node.args[0].meta["val"].ndim


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.ndim == 0
