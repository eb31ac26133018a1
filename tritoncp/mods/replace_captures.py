"""The same Python function around other tensors, the user's own left untouched."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def with_tensors(thing: Any, new: Mapping[int, Tensor]) -> Any:
    """`thing` with every tensor t that it captures replaced by new[id(t)], where there is one.

    Follows closures, defaults, globals, attributes of objects, containers and partials; not attributes of
    classes, which every user of the class shares.

    >>> import torch
    >>> table = torch.zeros(2)
    >>> lookup = lambda q_idx: table[q_idx]
    >>> other = with_tensors(lookup, {id(table): torch.ones(2)})
    >>> float(other(1)), float(lookup(1))
    (1.0, 0.0)
    """
    return _Move(new).of(thing)


class _Move:
    def __init__(self, new: Mapping[int, Tensor]) -> None:
        self.new = new
        self.done: dict[int, Any] = {}
        self.alive: list[Any] = []  # so that no id in `done` comes back as another object's

    def of(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return self.new.get(id(thing), thing)
        if id(thing) in self.done:
            return self.done[id(thing)]
        if not any(id(t) in self.new for t in _tensors(thing, set())):
            return thing
        self.alive.append(thing)
        moved = self._compound(thing)
        self.done[id(thing)] = moved
        return moved

    def _compound(self, thing: Any) -> Any:
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, types.MethodType):
            return types.MethodType(self.of(thing.__func__), self.of(thing.__self__))
        if isinstance(thing, functools.partial):
            return functools.partial(
                self.of(thing.func), *map(self.of, thing.args), **self._dict(thing.keywords)
            )
        if isinstance(thing, tuple):
            items = [self.of(item) for item in thing]
            return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
        if isinstance(thing, list):
            return type(thing)(self.of(item) for item in thing)
        if isinstance(thing, dict):
            return self._dict(thing)
        return self._object(thing)

    def _dict(self, thing: dict[Any, Any]) -> dict[Any, Any]:
        return {name: self.of(value) for name, value in thing.items()}

    def _object(self, thing: Any) -> Any:
        moved = copy.copy(thing)
        self.done[id(thing)] = moved
        for name, value in _fields(thing).items():
            object.__setattr__(moved, name, self.of(value))  # frozen ones too
        return moved

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        scope = dict(fn.__globals__)
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        moved = types.FunctionType(fn.__code__, scope, fn.__name__, None, cells or None)
        self.done[id(fn)] = moved  # it may refer to itself
        names = code_names(fn.__code__)
        for name in names & scope.keys():
            value = scope[name]
            scope[name] = (
                self._module(value, names) if isinstance(value, types.ModuleType) else self.of(value)
            )
        moved.__defaults__ = None if fn.__defaults__ is None else tuple(map(self.of, fn.__defaults__))
        moved.__kwdefaults__ = None if fn.__kwdefaults__ is None else self._dict(fn.__kwdefaults__)
        moved.__module__, moved.__qualname__ = fn.__module__, fn.__qualname__
        for cell, old in zip(cells, fn.__closure__ or ()):
            if _is_set(old):
                cell.cell_contents = self.of(old.cell_contents)
        return moved

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> types.ModuleType:
        """A stand-in where the function reads a moved tensor as an attribute of a module."""
        attributes = {name: vars(module)[name] for name in names & vars(module).keys()}
        moved = {name: self.new[id(value)] for name, value in attributes.items() if id(value) in self.new}
        if not moved:
            return module
        stand_in = types.ModuleType(module.__name__)
        stand_in.__dict__.update(vars(module) | moved)
        return stand_in


@functools.lru_cache(4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """Global and attribute names that a code object and the functions defined inside it may read."""
    inner = [code_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _fields(thing: Any) -> dict[str, Any]:
    """An object's attributes, those in slots included."""
    slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**getattr(thing, "__dict__", {}), **{n: getattr(thing, n) for n in slots if hasattr(thing, n)}}


def _tensors(thing: Any, visited: set[int]) -> Iterator[Tensor]:
    """The tensors that `with_tensors` would come to."""
    if isinstance(thing, Tensor):
        yield thing
        return
    if id(thing) in visited or isinstance(thing, str | bytes | int | float | type):
        return
    visited.add(id(thing))
    for part in _parts(thing):
        yield from _tensors(part, visited)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, types.FunctionType):
        if (thing.__module__ or "").split(".")[0] == "torch":
            return
        names = code_names(thing.__code__)
        for value in [thing.__globals__[name] for name in names & thing.__globals__.keys()]:
            if isinstance(value, types.ModuleType):
                yield from (vars(value)[name] for name in names & vars(value).keys())
            else:
                yield value
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        yield from (cell.cell_contents for cell in thing.__closure__ or () if _is_set(cell))
    elif isinstance(thing, types.MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, tuple | list | set | frozenset):
        yield from thing
    elif not isinstance(thing, types.ModuleType | types.BuiltinFunctionType):
        yield from _fields(thing).values()
        if isinstance(call := getattr(type(thing), "__call__", None), types.FunctionType):  # noqa: B004
            yield call


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # the variable is not bound yet
        return False
    return True
