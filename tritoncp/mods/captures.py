"""Captures of a mod: the parts of a function and of the containers in it, and copies around other parts.

Every copy of a user's function is made here: around other tensors (`with_tensors`), and from the inputs of a
compiled graph (`ops.graph.inputs.rebuild`).
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


def captured_numbers(fn: Any) -> list[int | float]:
    """Collect the ints and floats in a function's closures, defaults and partial arguments."""
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
    return _Copier(new).copy(obj)


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
    """Copies of objects around other tensors, see `with_tensors`; an object without any stays itself."""

    def __init__(self, new: Mapping[int, Tensor]) -> None:
        self.new = new
        self.copies: dict[int, tuple[Any, Any]] = {}  # (object, its copy); the id of a live object is its own

    def copy(self, obj: Any) -> Any:
        if id(obj) in self.new:
            return self.new[id(obj)]
        if id(obj) in self.copies:
            return self.copies[id(obj)][1]
        if not self._holds_tensor(obj, set()):
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
        scope = dict(fn.__globals__)
        clone = empty_function(fn.__code__, scope, fn.__name__)
        self.copies[id(fn)] = fn, clone  # before its globals and cells, which may contain it
        names = _names(fn)
        for name in names & scope.keys():
            value = scope[name]
            is_module = isinstance(value, types.ModuleType)
            scope[name] = self._copy_module(value, names) if is_module else self.copy(value)
        clone.__module__, clone.__qualname__ = fn.__module__, fn.__qualname__
        return fill_function(clone, tuple(fn.__kwdefaults__ or ()), [*map(self.copy, function_parts(fn))])

    def _copy_module(self, module: types.ModuleType, names: frozenset[str]) -> types.ModuleType:
        """Copy a module if the function reads a replaced tensor from it."""
        tensors = {
            name: self.new[id(value)]
            for name, value in vars(module).items()
            if name in names and id(value) in self.new
        }
        if not tensors:
            return module
        clone = types.ModuleType(module.__name__)
        clone.__dict__.update(vars(module) | tensors)
        return clone

    def _holds_tensor(self, obj: Any, visited: set[int]) -> bool:
        """Whether an object leads to a tensor to replace, perhaps by a method of its class or by a set."""
        if id(obj) in self.new:
            return True
        if id(obj) in visited or isinstance(obj, Tensor | str | bytes | int | float | type):
            return False
        visited.add(id(obj))
        return any(self._holds_tensor(part, visited) for part in _parts(obj))


def _parts(obj: Any) -> Iterator[Any]:
    """The objects that a function, container or object holds or reads."""
    if isinstance(obj, types.FunctionType):
        if (obj.__module__ or "").split(".")[0] == "torch":
            return
        names = _names(obj)
        for value in [obj.__globals__[name] for name in names & obj.__globals__.keys()]:
            is_module = isinstance(value, types.ModuleType)
            yield from (vars(value).get(name) for name in names) if is_module else (value,)
        yield from function_parts(obj)
    elif (container := take_apart(obj)) is not None:
        yield from container[2]
    elif isinstance(obj, dict | set | frozenset):
        yield from obj.values() if isinstance(obj, dict) else obj
    elif not isinstance(obj, types.ModuleType | types.BuiltinFunctionType):
        yield from fields_of(obj).values()
        if isinstance(call := getattr(type(obj), "__call__", None), types.FunctionType):  # noqa: B004
            yield call


def _names(fn: types.FunctionType) -> frozenset[str]:
    """Names of the globals and attributes that a function may read."""
    reads = code_reads(fn.__code__)
    steps = [name for chain in reads.chains for step, name in chain.steps if step != ITEM]
    return reads.attributes.union(steps, [chain.name for chain in reads.chains if chain.kind == GLOBAL])
