"""Captures of a mod: the parts of a function and of the containers in it, and copies around other parts.

Every copy of a user's function is made here: around other numbers, to trace it a second time
(`with_numbers`); around other tensors (`with_tensors`); and from the inputs of a compiled graph
(`ops.graph.inputs.rebuild`).
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from tritoncp.mods.attributes import ABSENT, fields_of
from tritoncp.mods.bytecode import GLOBAL, ITEM, code_reads

Number = int | float


def with_numbers(fn: Any, replace: Callable[[Number], Number]) -> Any:
    """Copy a function, with `replace` applied to the numbers in its closures, defaults and partial arguments.

    Ints and floats are visited in a fixed order; bools, globals and attributes of objects stay as they are.
    """
    return _Copier(lambda leaf: type(leaf) in (int, float), replace, is_deep=False).copy(fn)


def captured_numbers(fn: Any) -> list[Number]:
    """Collect the numbers that `with_numbers` visits, in its order."""
    numbers: list[Number] = []

    def collect(number: Number) -> Number:
        numbers.append(number)
        return number

    with_numbers(fn, collect)
    return numbers


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
    return _Copier(lambda leaf: id(leaf) in new, lambda tensor: new[id(tensor)], is_deep=True).copy(obj)


def cell_value(cell: types.CellType) -> Any:
    """Return the value of a closure's variable; ABSENT before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def function_parts(fn: types.FunctionType) -> list[Any]:
    """Return the values of a function's cells, its positional and its keyword defaults."""
    cells = map(cell_value, fn.__closure__ or ())
    return [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def empty_function(code: types.CodeType, scope: dict[str, Any], name: str) -> types.FunctionType:
    """Make a function without values in its cells. scope: its globals"""
    return types.FunctionType(code, scope, name, None, tuple([types.CellType() for _ in code.co_freevars]))


def fill_function(fn: types.FunctionType, keywords: tuple[str, ...], parts: list[Any]) -> types.FunctionType:
    """Set the `function_parts` of an empty function, and return it. keywords: names of the last of them"""
    cells, split = fn.__closure__ or (), len(parts) - len(keywords)
    for cell, part in zip(cells, parts):
        if part is not ABSENT:
            cell.cell_contents = part
    fn.__defaults__ = tuple(parts[len(cells) : split]) or None
    fn.__kwdefaults__ = dict(zip(keywords, parts[split:])) or None
    return fn


def take_apart(obj: Any) -> tuple[str, Any, list[Any]] | None:
    """Return the kind of a container, partial or method, and the constant and the parts from which
    ``MAKERS[kind]`` makes it again; None for any other object. Dynamo traces this."""
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


class _Copier:
    """Copies of objects in which leaves are replaced; an object without such a leaf stays itself.

    is_deep: whether to follow globals of functions and attributes of objects too
    """

    def __init__(
        self, is_replaced: Callable[[Any], bool], replace: Callable[[Any], Any], is_deep: bool
    ) -> None:
        self.is_replaced, self.replace, self.is_deep = is_replaced, replace, is_deep
        self.copies: dict[int, tuple[Any, Any]] = {}  # (object, its copy); the id of a live object is its own

    def copy(self, obj: Any) -> Any:
        if id(obj) in self.copies:
            return self.copies[id(obj)][1]
        if _is_leaf(obj):
            return self.replace(obj) if self.is_replaced(obj) else obj
        if not any(map(self.is_replaced, self._leaves(obj, set()))):
            return obj
        if isinstance(obj, types.FunctionType):
            return self._copy_function(obj)
        if (container := take_apart(obj)) is None:
            return self._copy_object(obj)
        kind, constant, parts = container
        return MAKERS[kind](constant, [self.copy(part) for part in parts])

    def _copy_object(self, obj: Any) -> Any:
        clone = copy.copy(obj)
        self.copies[id(obj)] = obj, clone
        for name, value in fields_of(obj).items():
            object.__setattr__(clone, name, self.copy(value))  # of frozen dataclasses too
        for key in obj if isinstance(obj, dict) else ():
            clone[key] = self.copy(obj[key])
        return clone

    def _copy_function(self, fn: types.FunctionType) -> types.FunctionType:
        scope = dict(fn.__globals__) if self.is_deep else fn.__globals__
        clone = empty_function(fn.__code__, scope, fn.__name__)
        self.copies[id(fn)] = fn, clone  # before its globals and cells, which may contain it
        for name, value in self._globals(fn).items():
            is_module = isinstance(value, types.ModuleType)
            scope[name] = self._copy_module(value, _names(fn)) if is_module else self.copy(value)
        clone.__module__, clone.__qualname__ = fn.__module__, fn.__qualname__
        return fill_function(clone, tuple(fn.__kwdefaults__ or ()), [*map(self.copy, function_parts(fn))])

    def _copy_module(self, module: types.ModuleType, names: frozenset[str]) -> types.ModuleType:
        """Copy a module if the function reads a replaced tensor from it."""
        tensors = {
            name: self.replace(value)
            for name, value in vars(module).items()
            if name in names and self.is_replaced(value)
        }
        if not tensors:
            return module
        clone = types.ModuleType(module.__name__)
        clone.__dict__.update(vars(module) | tensors)
        return clone

    def _leaves(self, obj: Any, visited: set[int]) -> Iterator[Any]:
        """The leaves that `copy` visits, and those that only a method of a class or a set holds."""
        if _is_leaf(obj):
            yield obj
        elif id(obj) not in visited:
            visited.add(id(obj))
            for part in self._parts(obj):
                yield from self._leaves(part, visited)

    def _parts(self, obj: Any) -> Iterator[Any]:
        if isinstance(obj, types.FunctionType):
            if self.is_deep and (obj.__module__ or "").split(".")[0] == "torch":
                return
            for value in self._globals(obj).values():
                is_module = isinstance(value, types.ModuleType)
                yield from (vars(value).get(name) for name in _names(obj)) if is_module else (value,)
            yield from function_parts(obj)
        elif self.is_deep or type(obj) in (tuple, list, functools.partial):
            if (container := take_apart(obj)) is not None:
                yield from container[2]
            elif isinstance(obj, dict | set | frozenset):
                yield from obj.values() if isinstance(obj, dict) else obj
            elif not isinstance(obj, types.ModuleType | types.BuiltinFunctionType):
                yield from fields_of(obj).values()
                if isinstance(call := getattr(type(obj), "__call__", None), types.FunctionType):  # noqa: B004
                    yield call

    def _globals(self, fn: types.FunctionType) -> dict[str, Any]:
        """The globals that a function reads, if they are followed."""
        names = _names(fn) & fn.__globals__.keys() if self.is_deep else ()
        return {name: fn.__globals__[name] for name in names}


def _is_leaf(obj: Any) -> bool:
    return isinstance(obj, Tensor | str | bytes | int | float | type)


def _names(fn: types.FunctionType) -> frozenset[str]:
    """Names of the globals and attributes that a function may read."""
    reads = code_reads(fn.__code__)
    steps = [name for chain in reads.chains for step, name in chain.steps if step != ITEM]
    return reads.attributes.union(steps, [chain.name for chain in reads.chains if chain.kind == GLOBAL])
