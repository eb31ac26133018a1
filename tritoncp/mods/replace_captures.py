"""Copies of Python functions with other captured tensors."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def with_tensors(obj: Any, new: Mapping[int, Tensor]) -> Any:
    """Copy a function, replacing each captured tensor t by new[id(t)] if present; `obj` itself is unchanged.

    Follows closures, defaults, globals, attributes of objects, containers and partials; not attributes of
    classes, which every user of the class shares.

    >>> import torch
    >>> table = torch.zeros(2)
    >>> lookup = lambda q_idx: table[q_idx]
    >>> other = with_tensors(lookup, {id(table): torch.ones(2)})
    >>> float(other(1)), float(lookup(1))
    (1.0, 0.0)
    """
    return _TensorReplacer(new).replace(obj)


class _TensorReplacer:
    def __init__(self, new: Mapping[int, Tensor]) -> None:
        self.new = new
        self.copies: dict[int, Any] = {}
        self.references: list[Any] = []  # to the keys of `copies`, whose ids must not be reused

    def replace(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return self.new.get(id(obj), obj)
        if id(obj) in self.copies:
            return self.copies[id(obj)]
        if not any(id(t) in self.new for t in _tensors(obj, set())):
            return obj
        self.references.append(obj)
        clone = self._compound(obj)
        self.copies[id(obj)] = clone
        return clone

    def _compound(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, types.MethodType):
            return types.MethodType(self.replace(obj.__func__), self.replace(obj.__self__))
        if isinstance(obj, functools.partial):
            return functools.partial(
                self.replace(obj.func), *map(self.replace, obj.args), **self._dict(obj.keywords)
            )
        if isinstance(obj, tuple):
            items = [self.replace(item) for item in obj]
            return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
        if isinstance(obj, list):
            return type(obj)(self.replace(item) for item in obj)
        if isinstance(obj, dict):
            return self._dict(obj)
        return self._object(obj)

    def _dict(self, obj: dict[Any, Any]) -> dict[Any, Any]:
        return {name: self.replace(value) for name, value in obj.items()}

    def _object(self, obj: Any) -> Any:
        clone = copy.copy(obj)
        self.copies[id(obj)] = clone
        for name, value in _fields(obj).items():
            object.__setattr__(clone, name, self.replace(value))  # of frozen dataclasses too
        return clone

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        scope = dict(fn.__globals__)
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        clone = types.FunctionType(fn.__code__, scope, fn.__name__, None, cells or None)
        self.copies[id(fn)] = clone  # before its globals, which may contain it
        names = code_names(fn.__code__)
        for name in names & scope.keys():
            value = scope[name]
            scope[name] = (
                self._module(value, names) if isinstance(value, types.ModuleType) else self.replace(value)
            )
        clone.__defaults__ = None if fn.__defaults__ is None else tuple(map(self.replace, fn.__defaults__))
        clone.__kwdefaults__ = None if fn.__kwdefaults__ is None else self._dict(fn.__kwdefaults__)
        clone.__module__, clone.__qualname__ = fn.__module__, fn.__qualname__
        for cell, old in zip(cells, fn.__closure__ or ()):
            if _is_set(old):
                cell.cell_contents = self.replace(old.cell_contents)
        return clone

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> types.ModuleType:
        """Copy a module if the function reads a replaced tensor from it."""
        attributes = {name: vars(module)[name] for name in names & vars(module).keys()}
        tensors = {name: self.new[id(value)] for name, value in attributes.items() if id(value) in self.new}
        if not tensors:
            return module
        copied_module = types.ModuleType(module.__name__)
        copied_module.__dict__.update(vars(module) | tensors)
        return copied_module


@functools.lru_cache(4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """Global and attribute names that a code object and the functions defined inside it may read."""
    inner = [code_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _fields(obj: Any) -> dict[str, Any]:
    """An object's attributes, those in slots included."""
    slots = [name for cls in type(obj).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**getattr(obj, "__dict__", {}), **{n: getattr(obj, n) for n in slots if hasattr(obj, n)}}


def _tensors(obj: Any, visited: set[int]) -> Iterator[Tensor]:
    """The tensors that `with_tensors` visits."""
    if isinstance(obj, Tensor):
        yield obj
        return
    if id(obj) in visited or isinstance(obj, str | bytes | int | float | type):
        return
    visited.add(id(obj))
    for part in _parts(obj):
        yield from _tensors(part, visited)


def _parts(obj: Any) -> Iterator[Any]:
    if isinstance(obj, types.FunctionType):
        if (obj.__module__ or "").split(".")[0] == "torch":
            return
        names = code_names(obj.__code__)
        for value in [obj.__globals__[name] for name in names & obj.__globals__.keys()]:
            if isinstance(value, types.ModuleType):
                yield from (vars(value)[name] for name in names & vars(value).keys())
            else:
                yield value
        yield from (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values())
        yield from (cell.cell_contents for cell in obj.__closure__ or () if _is_set(cell))
    elif isinstance(obj, types.MethodType):
        yield from (obj.__func__, obj.__self__)
    elif isinstance(obj, functools.partial):
        yield from (obj.func, *obj.args, *obj.keywords.values())
    elif isinstance(obj, dict):
        yield from obj.values()
    elif isinstance(obj, tuple | list | set | frozenset):
        yield from obj
    elif not isinstance(obj, types.ModuleType | types.BuiltinFunctionType):
        yield from _fields(obj).values()
        if isinstance(call := getattr(type(obj), "__call__", None), types.FunctionType):  # noqa: B004
            yield call


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # the variable is not bound yet
        return False
    return True
