"""Captured numbers among the constants of a traced graph, which become runtime arguments.

A constant that equals a captured number is taken for that number: equality by chance makes an argument of the
same value, which is right. Other constants stay in the emitted source. Each new value of a number is traced
on its own, as the function may branch on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

# Where a Python number may be a runtime argument: operands of these, never shapes, dims or exponents.
_NUMBER_OPS = frozenset(
    {"add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "maximum", "minimum", "clamp"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "where", "scalar_tensor", "full"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor"}
)

Place = tuple[int, int]  # (node, argument), both counted from 0


def number_places(
    graph: fx.Graph, captured: Sequence[int | float], read: Sequence[int | float]
) -> dict[Place, int]:
    """Map places of constants to the positions in `[*captured, *read]` of the numbers that they equal.

    captured: numbers in closures, defaults and partial arguments
    read: numbers from globals and attributes

    0 and 1 stay constants: equality with them is mostly chance. So do integers of `read` in the address of
    a captured tensor, mostly sizes and offsets: as an argument, one took the forward kernel of a bias table
    from 241 registers to 32 spilled bytes.
    """
    places: dict[Place, int] = {}
    addresses = _address_nodes(graph)
    values = [(type(number), number) for number in (*captured, *read)]
    for i, node in enumerate(graph.nodes if values else ()):
        for key, constant in enumerate(node.args):
            value = type(constant), constant
            if type(constant) not in (int, float) or constant in (0, 1) or value not in values:
                continue
            position = values.index(value)
            if type(constant) is int and node in addresses and position >= len(captured):
                continue
            if _takes_number(node, key, constant):
                places[i, key] = position
    return places


def _address_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Collect the nodes that an index into a tensor is computed from."""
    nodes: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if "index" in str(node.target) or "gather" in str(node.target) or "scatter" in str(node.target):
            fx.node.map_arg(node.args[1:], nodes.add)
        if node in nodes:
            nodes.update(node.all_input_nodes)
    return nodes


def _takes_number(node: fx.Node, key: int, number: int | float) -> bool:
    """Whether a kernel may compute this argument of an operation from a number that it is given."""
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
