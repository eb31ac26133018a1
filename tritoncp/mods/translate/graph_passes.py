"""Passes over the aten graph of a mod: removal of side effects, lifting of captures, splitting of outputs."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import graph_module

from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.translate.number_captures import Path

aten = torch.ops.aten


def node_line(node: fx.Node, default: str) -> str:
    """Return file:line of the user's code behind a node; `default` for backward nodes, which have none."""
    return node.stack_trace or default


def remove_score_detach(graph: fx.GraphModule) -> None:
    """Remove detach operations on graph inputs, so that the torch form can be differentiated.

    Only the traced function's own detach of the score takes an input: a user's detach takes the copy of it.
    """
    for node in [n for n in graph.graph.nodes if n.target is aten.detach.default]:
        if node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def make_pure(graph: fx.GraphModule, origin: str) -> None:
    """Turn `torch.tensor(3)` inside the function into scalar_tensor, and edits in place into pure operations.

    origin: file:line of the function, for errors
    """
    for node in list(graph.graph.nodes):
        if node.target is aten.lift_fresh_copy.default and node.args[0].op == "get_attr":
            value = getattr(graph, str(node.args[0].target))
            if value.ndim == 0:
                node.target, node.args = aten.scalar_tensor.default, (value.item(),)
                node.kwargs = {"dtype": value.dtype, "device": value.device}
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            _replace_edit(graph.graph, node, origin)
    _erase_unused_nodes(graph.graph)


def _replace_edit(graph: fx.Graph, node: fx.Node, origin: str) -> None:
    """Replace add_ by add and a cast to the dtype of the edited tensor.

    Tracing has already turned later uses of the edited tensor into uses of the result.
    """
    target: Any = node.target
    packet = getattr(aten, target.overloadpacket.__name__.removesuffix("_"), None)
    pure = getattr(packet, target._overloadname, None)
    if pure is None:
        raise Untranslatable(str(target), node_line(node, origin), "there is no rule for it")
    node.target = pure
    result = node.meta["val"]
    operands: list[Any] = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:2]]
    numeric = all(isinstance(o, Tensor | int | float) for o in operands) and len(operands) == 2
    promoted = torch.result_type(*operands) if numeric else result.dtype
    if promoted != result.dtype and packet is not aten.masked_fill:
        with graph.inserting_after(node):
            cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": result.dtype})
        cast.meta.update(node.meta)
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
        node.meta["val"] = result.to(promoted)


def _erase_unused_nodes(graph: fx.Graph) -> None:
    """Erase operations that no output needs; operations of a mod have no side effects."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


# -- captures --------------------------------------------------------------------------------------------


def rename_inputs(graph: fx.Graph, names: Sequence[str]) -> None:
    """Rename the graph's inputs, in order."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(inputs, names, strict=True):
        node.name = node.target = name


def lift_captures(
    graph: fx.GraphModule, values: Sequence[int | float], places: dict[Path, int]
) -> tuple[tuple[Tensor, ...], tuple[int | float, ...]]:
    """Make captured tensors inputs t0, t1, ... and captured numbers inputs n0, n1, ...; return both in order.

    places: where the graph uses values[i] as a constant; nodes are numbered as before the call
    """
    nodes = list(graph.graph.nodes)
    last_input = next(node for node in reversed(nodes) if node.op == "placeholder")
    tensors: list[Tensor] = []
    inputs: list[fx.Node] = []
    for node in nodes:
        if node.op != "get_attr":
            continue
        tensor = getattr(graph, str(node.target))
        position = next((i for i, other in enumerate(tensors) if other is tensor), len(tensors))
        if position == len(tensors):
            tensors.append(tensor)
            last_input = _insert_input(
                graph.graph, last_input, f"t{position}", val=node.meta.get("val", tensor)
            )
            inputs.append(last_input)
        node.replace_all_uses_with(inputs[position])
        graph.graph.erase_node(node)
    return tuple(tensors), _lift_numbers(graph.graph, nodes, last_input, values, places)


def _lift_numbers(
    graph: fx.Graph,
    nodes: list[fx.Node],
    last_input: fx.Node,
    values: Sequence[int | float],
    places: dict[Path, int],
) -> tuple[int | float, ...]:
    inputs: dict[int, fx.Node] = {}
    for (position, argument), number in places.items():
        if number not in inputs:
            last_input = _insert_input(graph, last_input, f"n{len(inputs)}", number=values[number])
            inputs[number] = last_input
        node = nodes[position]
        if isinstance(argument, int):
            node.update_arg(argument, inputs[number])
        else:
            node.update_kwarg(argument, inputs[number])
    return tuple(values[number] for number in inputs)


def _insert_input(graph: fx.Graph, previous: fx.Node, name: str, **meta: Any) -> fx.Node:
    with graph.inserting_after(previous):
        node = graph.placeholder(name)
    node.meta.update(meta)
    return node


# -- outputs ---------------------------------------------------------------------------------------------


def split_outputs(
    graph: fx.Graph, is_score: bool, order: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Split a graph of (out, dscore, *gradients) into one of out and one of the rest, None for masks.

    order: positions of the gradients that the second graph gives
    """
    root = torch.nn.Module()
    if not is_score:
        return _graph_module(root, graph), None
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    out, dscore, *grads = outputs
    forward, joint = fx.Graph(), fx.Graph()
    for part, result in ((forward, out), (joint, (dscore, *(grads[i] for i in order)))):
        copies: dict[fx.Node, fx.Node] = {}
        part.graph_copy(graph, copies)
        part.output(fx.node.map_arg(result, copies.__getitem__))
        _erase_unused_nodes(part)
    for node in list(forward.nodes):
        if node.name == "dscore":
            forward.erase_node(node)
    return _graph_module(root, forward), _graph_module(root, joint)


def _graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    module = fx.GraphModule(root, graph)
    release_source(module)
    return module


def release_source(module: fx.GraphModule) -> None:
    """Remove a graph's Python source from linecache and from torch's cache, which keeps it for ever.

    Tracebacks alone use these copies; ``module.code`` has the source too.
    """
    name = type(module).forward.__code__.co_filename
    linecache.cache.pop(name, None)
    graph_module._loader.eval_cache.pop(name, None)
