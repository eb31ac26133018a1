"""Which constants of a traced graph are captured numbers, and may so become runtime arguments.

The function is traced again with its numbers changed. Where the graph keeps its structure, a constant that
was the number and became the changed number is the number. Anything else stays a constant of the source.
The caller traces anew for every new value, so a branch on a number is never taken for another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tritoncp.mods.captures import rebuild

# Where a Python number may be a runtime argument: operands of these, never shapes, dims or exponents.
_TAKES_NUMBERS = frozenset(
    {"add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "maximum", "minimum", "clamp"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "where", "scalar_tensor", "full"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor"}
)

Number = int | float
Path = tuple[int, int | str]  # (node, argument position or keyword)
_MOST_TRIED = 8


def number_places(
    first: fx.GraphModule, fn: Any, values: Sequence[Number], run: Callable[[Any], fx.GraphModule]
) -> dict[Path, int]:
    """{place in the graph: which of `values`}, where `values` are those of `captured_numbers(fn)`.

    All are changed at once; where that changes the graph's structure, one at a time.
    """
    if not values:
        return {}
    everything = _places(first, fn, values, range(len(values)), run)
    if everything is not None:
        return everything
    places: dict[Path, int] = {}
    for i in range(min(len(values), _MOST_TRIED) if len(values) > 1 else 0):
        places |= _places(first, fn, values, [i], run) or {}
    return places


def _places(
    first: fx.GraphModule,
    fn: Any,
    values: Sequence[Number],
    group: Sequence[int],
    run: Callable[[Any], fx.GraphModule],
) -> dict[Path, int] | None:
    """The places of the numbers in `group`; None where the graph depends on them in other ways."""
    changed = [_perturb(v, i) if i in group else v for i, v in enumerate(values)]
    changes = iter(changed)
    try:
        second = run(rebuild(fn, lambda _: next(changes)))
    except Exception:  # the changed number broke the user's function: it is no free parameter
        return None
    return _differences(first, second, values, changed)


def constant_places(
    graph: fx.GraphModule, numbers: Sequence[Number], first: int, excluded: Mapping[Path, int]
) -> dict[Path, int]:
    """{place in the graph: first + which of `numbers`}, where a constant equals a number that was read from a
    global or an attribute, which cannot be changed for a second trace.

    A constant that is equal by chance becomes an argument too, with its own value: that is right, and no
    slower than any captured number. 0 and 1 stay constants: most that are equal to them are so by chance. So
    do whole numbers in the address of a captured tensor, sizes and offsets mostly: as an argument, one took
    the forward kernel of a table of biases from 241 registers to 32 spilled bytes.
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
    """The nodes of which an index into a tensor is computed."""
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
    one: fx.GraphModule, two: fx.GraphModule, values: Sequence[Number], changed: Sequence[Number]
) -> dict[Path, int] | None:
    nodes, others = list(one.graph.nodes), list(two.graph.nodes)
    order, other_order = ({node: i for i, node in enumerate(ns)} for ns in (nodes, others))
    if len(nodes) != len(others):
        return None
    places: dict[Path, int] = {}
    for i, (a, b) in enumerate(zip(nodes, others, strict=True)):
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target) or not _same_value(a, b):
            return None
        if a.op == "get_attr" and getattr(one, str(a.target)) is not getattr(two, str(b.target)):
            return None
        for key, x, y in _arguments(a, b):
            x, y = _numbered(x, order), _numbered(y, other_order)
            if type(x) is type(y) and repr(x) == repr(y):
                continue
            which = _which(x, y, values, changed)
            if which is None and isinstance(x, int | float) and isinstance(y, int | float):
                continue  # derived from a number: stays a constant of the graph
            if which is None:
                return None
            if _takes_number(a, key, values[which]):
                places[i, key] = which
    return places


def _arguments(a: fx.Node, b: fx.Node) -> list[tuple[int | str, Any, Any]]:
    if len(a.args) != len(b.args) or a.kwargs.keys() != b.kwargs.keys():
        return [("", a, None)]
    pairs: list[tuple[int | str, Any, Any]] = [
        (i, *xy) for i, xy in enumerate(zip(a.args, b.args, strict=True))
    ]
    return pairs + [(name, a.kwargs[name], b.kwargs[name]) for name in a.kwargs]


def _numbered(argument: Any, order: dict[fx.Node, int]) -> Any:
    return fx.node.map_arg(argument, lambda node: ("node", order[node]))


def _same_value(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype
    return type(x) is type(y)


def _which(x: Any, y: Any, values: Sequence[Number], changed: Sequence[Number]) -> int | None:
    if type(x) not in (int, float) or type(y) is not type(x):
        return None
    for i, (v, w) in enumerate(zip(values, changed, strict=True)):
        if v != w and type(v) is type(x) and (x, y) == (v, w):
            return i
    return None


def _takes_number(node: fx.Node, key: int | str, number: Number) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "").rstrip("_")
    if name not in _TAKES_NUMBERS or key not in (0, 1, 2) or (isinstance(number, float) and number != number):
        return False
    if name in ("scalar_tensor", "full") and key != (0 if name == "scalar_tensor" else 1):
        return False
    dtypes = [
        n.meta["val"].dtype for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), Tensor)
    ]
    if isinstance(number, int):
        return -(2**63) <= number < 2**63
    return torch.float64 not in dtypes  # a kernel's float arguments are float32
