"""Conversion of a graph with symbolic sizes to a graph with constant sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from tritoncp.chunking.report import ChunkingError
from tritoncp.chunking.sizes import Symbols, hint_of, substitute


def concretise(gm: GraphModule) -> GraphModule:
    """Replace the symbolic input sizes of a graph by their hints, in nodes, metadata and inner GraphModules.

    >>> sizes = ({0: torch.export.Dim("rows")},)
    >>> program = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(8, 4),), dynamic_shapes=sizes)
    >>> gm = program.graph_module
    >>> [node.meta["val"].shape for node in concretise(gm).graph.find_nodes(op="placeholder")][-1]
    torch.Size([8, 4])

    Other metadata are kept, and sizes that depend on data remain symbols.

    Args:
        gm: a graph whose input symbols have hints, as from :func:`tritoncp.chunking.mark`.

    Returns:
        A new GraphModule. Each call checks the sizes of its inputs and raises ValueError for other sizes,
        since unbacked sizes have no guards.

    Raises:
        ChunkingError: for a symbol without a hint.
    """
    numbers = {symbol: sympy.Integer(number) for symbol, number in hints(gm).items()}
    result = _concretised(gm, numbers)
    sizes = [_checked_sizes(node.meta.get("val")) for node in result.graph.find_nodes(op="placeholder")]
    result.register_forward_pre_hook(partial(_check_sizes, sizes))
    return result


def hints(gm: GraphModule) -> dict[Any, int]:
    """Return {symbol of an input: its hint}. Raises ChunkingError for a symbol without a hint."""
    numbers: dict[Any, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        for size in [size for size in sizes if isinstance(size, SymInt)]:
            for symbol in size.node.expr.free_symbols:
                number = hint_of(symbol, size.node.shape_env)
                if number is None:
                    raise ChunkingError(
                        f"input {node.name} has the size {symbol} without a hint; mark it with "
                        "tritoncp.chunking.mark before the graph is captured"
                    )
                numbers[symbol] = number
    return numbers


def _checked_sizes(value: Any) -> Any:
    """Return the shape of a tensor input, or a number input itself, for comparison."""
    return tuple(value.shape) if isinstance(value, Tensor) else value if isinstance(value, int) else None


def _check_sizes(sizes: Sequence[Any], module: Any, args: tuple[Any, ...]) -> None:
    """Check the sizes of a graph's inputs: a forward pre-hook."""
    for place, (value, needed) in enumerate(zip(args, sizes, strict=False)):
        given = _checked_sizes(value)
        if needed is not None and given != needed:
            raise ValueError(
                f"input {place} has the size {given}, the graph was made for {needed}: pass inputs of "
                "that size, or cut and concretise a graph of these sizes"
            )


def _concretised(gm: GraphModule, numbers: Symbols) -> GraphModule:
    """Return a copy of a graph, and of the graphs it calls, with numbers in place of symbols."""
    graph = torch.fx.Graph()
    values: dict[Node, Any] = {}

    def replace(node: Node) -> Any:
        return values[node]

    for node in gm.graph.nodes:
        meta = tree_map_only(
            Tensor | SymInt | SymFloat | SymBool, lambda x: substitute(x, numbers), dict(node.meta)
        )
        is_number = isinstance(meta.get("val"), int | float)
        if is_number:
            values[node] = meta["val"]
        if is_number and node.op != "placeholder":
            continue
        is_assertion = node.target is torch.ops.aten._assert_scalar.default
        if is_assertion and not isinstance(map_arg(node.args[0], replace), Node):
            continue  # true for these numbers
        copy = graph.node_copy(node, replace)
        copy.meta = meta
        values.setdefault(node, copy)
    result = GraphModule(gm, graph)
    for name, child in result.named_children():
        if isinstance(child, GraphModule):
            setattr(result, name, _concretised(child, numbers))
    result.meta.update(gm.meta)
    return result
