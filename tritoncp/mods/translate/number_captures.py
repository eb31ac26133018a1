"""Search for captured numbers among the constants of a traced graph, to make them runtime arguments.

The function is traced again with other numbers. Where both graphs have the same structure, a constant that
equals the old number in one and the new number in the other is that number. Other constants stay in the
emitted source. Each new value of a number is traced on its own, as the function may branch on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tritoncp.mods.captures import with_numbers

# Where a Python number may be a runtime argument: operands of these, never shapes, dims or exponents.
_NUMBER_OPS = frozenset(
    {"add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "maximum", "minimum", "clamp"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "where", "scalar_tensor", "full"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor"}
)

Number = int | float
Path = tuple[int, int | str]  # (node, argument position or keyword)
_MAX_SINGLE_TRIALS = 8


def number_places(
    first: fx.GraphModule, fn: Any, values: Sequence[Number], run: Callable[[Any], fx.GraphModule]
) -> dict[Path, int]:
    """Map places of the graph to positions in `values`, the numbers of `captured_numbers(fn)`.

    All numbers are changed at once; where that changes the graph's structure, each alone.

    run: traces a copy of the function
    """
    if not values:
        return {}
    if (all_places := _places(first, fn, values, range(len(values)), run)) is not None:
        return all_places
    places: dict[Path, int] = {}
    for i in range(min(len(values), _MAX_SINGLE_TRIALS) if len(values) > 1 else 0):
        places |= _places(first, fn, values, [i], run) or {}
    return places


def _places(
    first: fx.GraphModule,
    fn: Any,
    values: Sequence[Number],
    group: Sequence[int],
    run: Callable[[Any], fx.GraphModule],
) -> dict[Path, int] | None:
    """The places of the numbers in `group`; None where the structure of the graph depends on them."""
    new_values = [_perturb(v, i) if i in group else v for i, v in enumerate(values)]
    replacements = iter(new_values)
    try:
        second = run(with_numbers(fn, lambda _: next(replacements)))
    except Exception:  # the changed number broke the user's function: it is no free parameter
        return None
    return _differences(first, second, values, new_values)


def constant_places(
    graph: fx.GraphModule, numbers: Sequence[Number], first: int, excluded: Mapping[Path, int]
) -> dict[Path, int]:
    """Map places of constants that equal one of `numbers` to `first` plus its position.

    numbers: read from globals and attributes, which cannot be changed for a second trace
    excluded: places of other captured numbers

    A constant that is equal by chance becomes an argument of the same value, which is right. 0 and 1 stay
    constants: equality with them is mostly chance. So do integers in the address of a captured tensor, mostly
    sizes and offsets: as an argument, one took the forward kernel of a bias table from 241 registers to 32
    spilled bytes.
    """
    places: dict[Path, int] = {}
    addresses = _address_nodes(graph)
    values = [(type(number), number) for number in numbers]
    for i, node in enumerate(graph.graph.nodes if numbers else ()):
        for key, constant in [*enumerate(node.args), *node.kwargs.items()]:
            if type(constant) not in (int, float) or constant in (0, 1) or (i, key) in excluded:
                continue
            if type(constant) is int and node in addresses:
                continue
            value = type(constant), constant
            if value in values and node.op == "call_function" and _takes_number(node, key, constant):
                places[i, key] = first + values.index(value)
    return places


def _address_nodes(graph: fx.GraphModule) -> set[fx.Node]:
    """Collect the nodes that an index into a tensor is computed from."""
    nodes: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        if "index" in str(node.target) or "gather" in str(node.target) or "scatter" in str(node.target):
            fx.node.map_arg(node.args[1:], nodes.add)
        if node in nodes:
            nodes.update(node.all_input_nodes)
    return nodes


def _perturb(number: Number, i: int) -> Number:
    return number + 7 + 2 * i if isinstance(number, int) else number * 1.25 + 0.0625 * (i + 1)


def _differences(
    one: fx.GraphModule, two: fx.GraphModule, values: Sequence[Number], new_values: Sequence[Number]
) -> dict[Path, int] | None:
    nodes, other_nodes = list(one.graph.nodes), list(two.graph.nodes)
    order, other_order = ({node: i for i, node in enumerate(ns)} for ns in (nodes, other_nodes))
    if len(nodes) != len(other_nodes):
        return None
    places: dict[Path, int] = {}
    for i, (a, b) in enumerate(zip(nodes, other_nodes, strict=True)):
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target) or not _same_value(a, b):
            return None
        if a.op == "get_attr" and getattr(one, str(a.target)) is not getattr(two, str(b.target)):
            return None
        for key, x, y in _arguments(a, b):
            x, y = _number_nodes(x, order), _number_nodes(y, other_order)
            if type(x) is type(y) and repr(x) == repr(y):
                continue
            position = _matching_number(x, y, values, new_values)
            if position is None and isinstance(x, int | float) and isinstance(y, int | float):
                continue  # derived from a number: stays a constant of the graph
            if position is None:
                return None
            if _takes_number(a, key, values[position]):
                places[i, key] = position
    return places


def _arguments(a: fx.Node, b: fx.Node) -> list[tuple[int | str, Any, Any]]:
    if len(a.args) != len(b.args) or a.kwargs.keys() != b.kwargs.keys():
        return [("", a, None)]
    pairs: list[tuple[int | str, Any, Any]] = [
        (i, *xy) for i, xy in enumerate(zip(a.args, b.args, strict=True))
    ]
    return pairs + [(name, a.kwargs[name], b.kwargs[name]) for name in a.kwargs]


def _number_nodes(argument: Any, order: dict[fx.Node, int]) -> Any:
    return fx.node.map_arg(argument, lambda node: ("node", order[node]))


def _same_value(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype
    return type(x) is type(y)


def _matching_number(x: Any, y: Any, values: Sequence[Number], new_values: Sequence[Number]) -> int | None:
    if type(x) not in (int, float) or type(y) is not type(x):
        return None
    for i, (v, w) in enumerate(zip(values, new_values, strict=True)):
        if v != w and type(v) is type(x) and (x, y) == (v, w):
            return i
    return None


def _takes_number(node: fx.Node, key: int | str, number: Number) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "").rstrip("_")
    if name not in _NUMBER_OPS or key not in (0, 1, 2) or (isinstance(number, float) and number != number):
        return False
    if name in ("scalar_tensor", "full") and key != (0 if name == "scalar_tensor" else 1):
        return False
    dtypes = [
        n.meta["val"].dtype for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), Tensor)
    ]
    if isinstance(number, int):
        return -(2**63) <= number < 2**63
    return torch.float64 not in dtypes  # a kernel's float arguments are float32
