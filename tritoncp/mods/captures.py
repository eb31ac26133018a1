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


def take_apart(obj: Any) -> tuple[str, Any, list[Any]] | None:
    """Split a container, partial or method into (kind, constant, parts) for ``MAKERS[kind]``, which makes it
    again; None for any other object. Dynamo traces this function."""
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
