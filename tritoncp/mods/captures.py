"""Numbers in a Python function's closure, and the same function around other numbers; names for messages."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

Replace = Callable[[int | float], int | float]


def rebuild(thing: Any, replace: Replace) -> Any:
    """`thing` with every int and float in its closures, defaults and partial arguments passed to `replace`.

    Slots are visited in a fixed order; bools, globals and attributes of objects stay as they are.
    """
    return _rebuild(thing, replace, {})


def _rebuild(thing: Any, replace: Replace, done: dict[int, Any]) -> Any:
    if type(thing) in (int, float):
        return replace(thing)
    if type(thing) in (tuple, list):
        return type(thing)(_rebuild(item, replace, done) for item in thing)
    if isinstance(thing, functools.partial):
        keywords = {name: _rebuild(value, replace, done) for name, value in thing.keywords.items()}
        return functools.partial(
            _rebuild(thing.func, replace, done), *_rebuild(thing.args, replace, done), **keywords
        )
    if isinstance(thing, types.FunctionType):
        if id(thing) not in done:
            done[id(thing)] = thing  # a function that refers to itself keeps its own, unreplaced, self
            done[id(thing)] = _rebuild_function(thing, replace, done)
        return done[id(thing)]
    return thing


def _rebuild_function(fn: types.FunctionType, replace: Replace, done: dict[int, Any]) -> types.FunctionType:
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(types.CellType(_rebuild(cell.cell_contents, replace, done)))
        except ValueError:
            cells.append(cell)
    defaults = _rebuild(fn.__defaults__, replace, done) if fn.__defaults__ else fn.__defaults__
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, defaults, tuple(cells) or None)
    copy.__kwdefaults__ = {
        k: _rebuild(v, replace, done) for k, v in (fn.__kwdefaults__ or {}).items()
    } or None
    copy.__module__ = fn.__module__
    return copy


def captured_numbers(fn: Any) -> list[int | float]:
    """The numbers `rebuild` would visit, in its order."""
    found: list[int | float] = []

    def note(number: int | float) -> int | float:
        found.append(number)
        return number

    rebuild(fn, note)
    return found


def origin(fn: Any) -> str:
    """Return file:line of a function's definition, or a description of another callable."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else describe(fn)


def describe(fn: Any) -> str:
    """A printable name for messages and comments: never raw text from `__name__`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = (
        getattr(fn, "__qualname__", type(fn).__qualname__)
        .replace("<locals>.", "")
        .replace("<lambda>", "lambda")
    )
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.") else "_" for c in str(name))[:80] or "mod"
