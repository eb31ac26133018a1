"""Captures of a mod: listing the parts of functions and containers, and replacing captured tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class _Absent:
    """The value of an attribute or variable that does not exist."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def captured_numbers(fn: Any) -> list[int | float]:
    """Return the ints and floats in a function's closures, defaults and partial arguments."""
    numbers: list[int | float] = []
    visited: set[int] = set()

    def collect(obj: Any) -> None:
        if type(obj) in (int, float):
            numbers.append(obj)
        elif type(obj) in (tuple, list, functools.partial, types.FunctionType) and id(obj) not in visited:
            visited.add(id(obj))
            is_function = isinstance(obj, types.FunctionType)
            for part in function_parts(obj) if is_function else take_apart(obj)[2]:  # type: ignore[index]
                collect(part)

    collect(fn)
    return numbers


class TensorReplacement(TorchFunctionMode):
    """Torch function mode that replaces tensor t by new[id(t)] in the arguments of operations.

    >>> import torch
    >>> table = torch.zeros(2)
    >>> with TensorReplacement({id(table): torch.ones(2)}):
    ...     float(table[1])
    1.0
    """

    def __init__(self, new: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.new = new

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self.replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    def replace(self, value: Any) -> Any:
        return self.new.get(id(value), value)


def cell_value(cell: types.CellType) -> Any:
    """Return the value of a closure cell; ABSENT if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def function_parts(fn: types.FunctionType) -> list[Any]:
    """Return the values of a function's cells, its positional and its keyword defaults."""
    cells = map(cell_value, fn.__closure__ or ())
    return [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def empty_function(code: types.CodeType, scope: dict[str, Any], name: str) -> types.FunctionType:
    """Make a function with empty closure cells. scope: its globals"""
    return types.FunctionType(code, scope, name, None, tuple([types.CellType() for _ in code.co_freevars]))


def fill_function(fn: types.FunctionType, keywords: tuple[str, ...], parts: list[Any]) -> types.FunctionType:
    """Set the `function_parts` of an empty function and return it. keywords: names of the last parts"""
    cells, split = fn.__closure__ or (), len(parts) - len(keywords)
    for cell, part in zip(cells, parts):
        if part is not ABSENT:
            cell.cell_contents = part
    fn.__defaults__ = tuple(parts[len(cells) : split]) or None
    fn.__kwdefaults__ = dict(zip(keywords, parts[split:])) or None
    return fn


def take_apart(obj: Any) -> tuple[str, Any, list[Any]] | None:
    """Split a container, partial or method into (kind, constant, parts), from which ``MAKERS[kind]`` makes it
    again; None for any other object. Dynamo traces this."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return "call", type(obj), [*obj]
    if isinstance(obj, tuple | list):
        return "sequence", type(obj), [*obj]
    if type(obj) is dict:
        return "dict", tuple(obj), [*obj.values()]
    if isinstance(obj, functools.partial):
        return "partial", tuple(obj.keywords), [obj.func, *obj.args, *obj.keywords.values()]
    if isinstance(obj, types.MethodType):
        return "call", types.MethodType, [obj.__func__, obj.__self__]
    return None


def _make_partial(names: tuple[str, ...], parts: list[Any]) -> Any:
    split = len(parts) - len(names)
    fn, *arguments = parts[:split]
    return functools.partial(fn, *arguments, **dict(zip(names, parts[split:], strict=True)))


MAKERS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "call": lambda make, parts: make(*parts),
    "sequence": lambda make, parts: make(parts),
    "dict": lambda keys, parts: dict(zip(keys, parts, strict=True)),
    "partial": _make_partial,
}
