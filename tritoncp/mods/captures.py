"""Numbers in a function's closure, and copies of the function with other numbers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

Replace = Callable[[int | float], int | float]


def rebuild(obj: Any, replace: Replace) -> Any:
    """Copy a function, with `replace` applied to the numbers in its closures, defaults and partial arguments.

    Ints and floats are visited in a fixed order; bools, globals and attributes of objects stay as they are.
    """
    return _rebuild(obj, replace, {})


def _rebuild(obj: Any, replace: Replace, copies: dict[int, Any]) -> Any:
    if type(obj) in (int, float):
        return replace(obj)
    if type(obj) in (tuple, list):
        return type(obj)(_rebuild(item, replace, copies) for item in obj)
    if isinstance(obj, functools.partial):
        keywords = {name: _rebuild(value, replace, copies) for name, value in obj.keywords.items()}
        return functools.partial(
            _rebuild(obj.func, replace, copies), *_rebuild(obj.args, replace, copies), **keywords
        )
    if isinstance(obj, types.FunctionType):
        if id(obj) not in copies:
            copies[id(obj)] = obj  # a recursive function calls its original
            copies[id(obj)] = _rebuild_function(obj, replace, copies)
        return copies[id(obj)]
    return obj


def _rebuild_function(fn: types.FunctionType, replace: Replace, copies: dict[int, Any]) -> types.FunctionType:
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(types.CellType(_rebuild(cell.cell_contents, replace, copies)))
        except ValueError:
            cells.append(cell)
    defaults = _rebuild(fn.__defaults__, replace, copies) if fn.__defaults__ else fn.__defaults__
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, defaults, tuple(cells) or None)
    copy.__kwdefaults__ = {
        k: _rebuild(v, replace, copies) for k, v in (fn.__kwdefaults__ or {}).items()
    } or None
    copy.__module__ = fn.__module__
    return copy


def captured_numbers(fn: Any) -> list[int | float]:
    """Collect the numbers that `rebuild` visits, in its order."""
    numbers: list[int | float] = []

    def collect(number: int | float) -> int | float:
        numbers.append(number)
        return number

    rebuild(fn, collect)
    return numbers
