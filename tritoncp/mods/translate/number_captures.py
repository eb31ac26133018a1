"""Captured numbers among the constants of a traced graph, which become runtime arguments.

Every constant that equals a captured number becomes an argument: if they are equal by chance, the argument
still has the right value. Other constants stay in the emitted source. The function is traced again for each
new value of a number, as it may branch on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

# Operations whose operands may be runtime arguments; shapes, dims and exponents may not.
_NUMBER_OPS = frozenset(
    {"add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "maximum", "minimum", "clamp"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "where", "scalar_tensor", "full"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor"}
)


def lift_numbers(graph: fx.Graph, captured: Sequence[int | float]) -> tuple[int | float, ...]:
    """Replace constants that are captured numbers by inputs n0, n1, ...; return these numbers in order.

    0 and 1 remain constants, since equality with them is mostly chance. So do integers in addresses of
    captured tensors, mostly sizes and offsets: with one as an argument, the forward kernel of a bias table
    spilled 32 bytes, instead of none with 241 registers.
    """
    inputs: dict[tuple[type, int | float], fx.Node] = {}
    addresses, values = _address_nodes(graph), {(type(number), number) for number in captured}
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes) if values else ():
        for place, constant in enumerate(node.args):
            value = type(constant), constant
            if type(constant) not in (int, float) or constant in (0, 1) or value not in values:
                continue
            is_offset = type(constant) is int and node in addresses
            if is_offset or not _takes_number(node, place, constant):
                continue
            if value not in inputs:
                with graph.inserting_after(last_input):
                    last_input = inputs[value] = graph.placeholder(f"n{len(inputs)}")
                last_input.meta["number"] = constant
            node.update_arg(place, inputs[value])
    return tuple(number for _, number in inputs)


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
        return -(2**63) <= number < 2**63
    return torch.float64 not in dtypes  # a kernel's float arguments are float32
