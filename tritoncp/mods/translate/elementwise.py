"""Mods that torch can evaluate for all pairs of a tile without vmap, since they are made of elementwise
operations."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from tritoncp.mods.translate.graph_passes import make_module

aten = torch.ops.aten
# Operations that act on each element, without torch's tag for these.
_UNTAGGED = {
    aten._to_copy.default, aten.detach.default, aten.floor_divide.default, aten.rsub.Tensor,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip

_INTEGERS = torch.int32, torch.int64  # of indices; others are masks
Gather = tuple[fx.Node, list[fx.Node]]


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
    gathers: dict[fx.Node, Gather] = {}

    def spread(x: fx.Node) -> fx.Node:
        """Return the copy of an operand; a 0-d tensor that all pairs share gets four dimensions, as types are
        promoted otherwise for 0-d tensors."""
        if x in of_pairs or not isinstance(x.meta.get("val"), Tensor):
            return copies[x]
        return form.call_function(aten.reshape.default, (copies[x], [1] * 4))

    for place, node in enumerate(graph.graph.nodes):
        if node.op == "output":
            form.output(spread(node.args[0]))
            continue
        if node.op == "placeholder" or of_pairs.isdisjoint(node.all_input_nodes):
            copies[node] = form.node_copy(node, copies.__getitem__)
            of_pairs |= {node} if place < arguments else set()
            continue
        of_pairs.add(node)
        if node.target is aten.clone.default:
            copies[node] = copies[node.args[0]]  # nothing is edited in place
        elif node.target is aten.index.Tensor and (gather := _find_gather(node, gathers, of_pairs)):
            table, indices = gathers[node] = gather
            if _rank(node) == 0:
                operands = copies[table], [spread(index) for index in indices]
                copies[node] = form.call_function(node.target, operands)
        elif _is_elementwise(node):
            operands = fx.map_arg(node.args, spread)
            copies[node] = form.call_function(node.target, operands, fx.map_arg(node.kwargs, spread))
        else:
            return None
        if node in copies:
            copies[node].meta = node.meta
    return make_module(form)


def _find_gather(node: fx.Node, gathers: dict[fx.Node, Gather], of_pairs: set[fx.Node]) -> Gather | None:
    """Return a captured tensor and the indices, one for each of its first dimensions, of what the node reads;
    None if it reads something else. gathers: of earlier nodes, so that table[h][q_idx] is one gather"""
    source, new = cast(Gather, node.args)
    table, indices = gathers.get(source, (source, []))
    indices = [*indices, *new]
    integers = [isinstance(i, fx.Node) and i.meta["val"].dtype in _INTEGERS and not _rank(i) for i in indices]
    return (table, indices) if table not in of_pairs and all(integers) else None


def _is_elementwise(node: fx.Node) -> bool:
    """Return whether an operation on 0-d tensors acts on each element."""
    tags = getattr(node.target, "tags", ())
    is_known = torch.Tag.pointwise in tags or node.target in _UNTAGGED
    return is_known and not any(map(_rank, [node, *node.all_input_nodes]))


def _rank(node: fx.Node) -> int:
    """Return the number of dimensions of a node's result; 0 for a number."""
    return getattr(node.meta.get("val"), "ndim", 0)
