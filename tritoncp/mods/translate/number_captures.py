"""Captured numbers among the constants of a traced graph, which become runtime arguments.

A constant that equals a captured number becomes an argument, unless the source of its operation shows that it
is another one: if they are equal by chance, the argument still has the right value. Other constants stay in
the emitted source. The function is traced again for each new value of a number, as it may branch on it.

*Offsets* are integers in the addresses of captured tensors, captured or computed, as ``n - 1`` in
``bias[q_idx - kv_idx + n - 1]``. As arguments they make kernels spill (dK/dV of a learned table, 128
channels, sm_90: 88 bytes), so that they become arguments only where they change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tritoncp.core.opaque_integers import LARGE
from tritoncp.mods.user_code import Operands

# Operations whose operands may be runtime arguments; shapes, dims and exponents may not.
_NUMBER_OPS = frozenset(
    {"add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "maximum", "minimum", "clamp"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "where", "scalar_tensor", "full"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor"}
)


def lift_numbers(graph: fx.Graph, captured: Sequence[int | float]) -> tuple[int | float, ...]:
    """Replace constants that are captured numbers and no offsets by inputs n0, n1, ...; return these numbers
    in order.

    Equal numbers have an input each if their operations name other operands, so that a graph does not depend
    on which numbers are equal.
    """
    inputs: dict[tuple[Any, ...], fx.Node] = {}
    values = {(type(number), repr(number)) for number in captured}
    for node, place, constant, operands, is_address in _constants(graph) if values else ():
        value = type(constant), repr(constant)
        if value in values and operands.may_be_captured(constant) and not is_address:
            key = *value, operands.names
            if key not in inputs:
                inputs[key] = _add_input(graph, constant)
            node.update_arg(place, inputs[key])
    return tuple([node.meta["number"] for node in inputs.values()])


def lift_offsets(graph: fx.Graph) -> tuple[int, ...]:
    """Replace offsets by an input each, after those of :func:`lift_numbers`; return the offsets in order."""
    offsets: list[int] = []
    for node, place, constant, operands, is_address in _constants(graph):
        if is_address and (type(constant), repr(constant)) not in operands.literals:
            node.update_arg(place, _add_input(graph, constant))
            offsets.append(constant)
    return tuple(offsets)


def _constants(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, Any, Operands, bool]]:
    """Yield the constants that may be kernel arguments: node, place among its arguments, number, operands in
    the source, and whether it is an integer in an address."""
    addresses = _address_nodes(graph)
    for node in list(graph.nodes):
        operands = node.meta.get("operands", Operands())
        for place, constant in enumerate(node.args):
            if type(constant) in (int, float) and _takes_number(node, place, constant):
                yield node, place, constant, operands, type(constant) is int and node in addresses


def _add_input(graph: fx.Graph, number: int | float) -> fx.Node:
    """Add an input for a number behind the other inputs."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        added = graph.placeholder(f"n{sum('number' in node.meta for node in inputs)}")
    added.meta["number"] = number
    return added


def _address_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes from which indices into tensors are computed."""
    nodes: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if "index" in str(node.target) or "gather" in str(node.target) or "scatter" in str(node.target):
            fx.node.map_arg(node.args[1:], nodes.add)
        if node in nodes:
            nodes.update(node.all_input_nodes)
    return nodes


def _takes_number(node: fx.Node, key: int, number: int | float) -> bool:
    """Return whether this argument of an operation may be a kernel argument."""
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "").rstrip("_")
    if name not in _NUMBER_OPS or key > 2 or (isinstance(number, float) and number != number):
        return False
    if name in ("scalar_tensor", "full") and key != (0 if name == "scalar_tensor" else 1):
        return False
    dtypes = [
        n.meta["val"].dtype for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), Tensor)
    ]
    if isinstance(number, int):
        return -LARGE <= number < LARGE
    return torch.float64 not in dtypes  # a kernel's float arguments are float32
