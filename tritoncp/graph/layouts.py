"""Layouts: nested tuples of text and ints that list the state of a Python function that a graph has to read.

A layout is made once per graph, from the real objects and the reads in the function's bytecode
(:mod:`tritoncp.mods.bytecode`). Dynamo traces :mod:`.inputs`, which follows the layout, so that tensors
become inputs of the graph and plain values are guarded. A layout has names of code and classes
(:mod:`.constants`). It has no globals: a rebuilt function reads them when it runs.

Forms of a layout:

    ("value",)                     flatten it by its type
    ("is", name)                   a constant object, the same in every call of the graph
    ("unset", name)                an empty closure cell, or an absent attribute
    ("parts", maker, name, ((place, name, layout), ...))
                                   a function, method, object or dict, by the parts that are read;
                                   `inputs.rebuild` makes it again by the maker's name
    ("inside", name)               a function that the graph makes, see :mod:`.variables`
    ("refuse", reason)             it cannot be part of a graph
"""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.graph.constants import register_constant, register_function, register_object
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.mods import Mod
from tritoncp.mods.bytecode import ARGUMENT, CELL, GLOBAL, ITEM, Step, code_reads
from tritoncp.mods.captures import ABSENT, cell_value, take_apart
from tritoncp.mods.fingerprint import HEAP_TYPE, Fingerprint, read_step
from tritoncp.planning.plan import Plan

Layout = tuple[Any, ...]

MADE_INSIDE = "made inside torch.compile; make it outside the compiled function and pass it in"
MAX_PARTS = 512  # max objects and attributes in one layout

VALUE: Layout = ("value",)


class Uncapturable(TypeError):
    """Raised for a mod or mask that cannot be part of a graph; the message has the reason and the remedy."""


def callable_layout(thing: Any, is_called: bool = True) -> Layout:
    """Return the layout of a function, method or object that was made outside of the graph.

    is_called: the object is the mod, so that only state that its call reads counts; else all attributes count

    >>> class Cap:
    ...     value, other = 2.0, None
    ...     def mod(self, score, b, h, q_idx, kv_idx):
    ...         return score * self.value
    >>> function, (place, name, instance) = callable_layout(Cap().mod)[-1]
    >>> name, instance[-1]
    ('__self__', (('attribute', 'value', ('value',)),))
    """
    try:
        layout, reads = _layout(thing, is_called)
        if isinstance(thing, types.FunctionType | types.MethodType):
            check_gradients(thing, reads.captured)
        return layout
    except Uncapturable as error:
        return ("refuse", f"{_name(thing)}: {error}. {REMEDY}")
    except RecursionError:
        return ("refuse", f"{_name(thing)} is nested too deep, or refers to itself. {REMEDY}")


REMEDY = (
    "Capture the tensors and numbers themselves, in local variables of a function around this one; for a "
    "mask, you can also make a Plan outside the compiled function: tritoncp.make_plan(mask, mesh)"
)


def _layout(thing: Any, is_called: bool = True) -> tuple[Layout, _Reads]:
    reads = _Reads()
    if isinstance(thing, types.MethodType) and not is_fixed(thing):
        if not isinstance(thing.__func__, types.FunctionType):
            raise Uncapturable("this is a method of a builtin class")
        owner = _Node(thing.__self__)
        if is_fixed(thing.__func__):
            owner.whole = True
            function = reads.layout(_Node(thing.__func__))
        else:
            function = reads.function(thing.__func__, owner)
        parts = ("attribute", "__func__", function), ("attribute", "__self__", reads.layout(owner))
        return ("parts", "call", register_constant(types.MethodType, types.MethodType), parts), reads
    if isinstance(thing, types.FunctionType) and not is_fixed(thing):
        return reads.function(thing, None), reads
    node = _Node(thing)
    if is_called and not is_fixed(thing):
        reads.call(node)
    else:
        node.whole = True
    return reads.layout(node), reads


def is_fixed(thing: Any) -> bool:
    """Return whether an object is a constant of a graph: it has no state, or only state that is read at run
    time."""
    if isinstance(thing, types.MethodType):  # for example the apply method of an autograd Function
        return is_fixed(thing.__self__) and is_fixed(thing.__func__)
    if isinstance(thing, types.FunctionType):
        is_torch = str(thing.__globals__.get("__name__")).split(".")[0] == "torch"
        return is_torch and set(thing.__code__.co_freevars) <= {"__class__"}  # it captures nothing
    kinds = bool | int | float | complex | str | bytes | type(None) | type(Ellipsis) | range | slice
    if isinstance(thing, kinds | torch.dtype | torch.device | torch.layout | type | types.ModuleType):
        return True
    if isinstance(thing, types.BuiltinFunctionType):
        return thing.__self__ is None or isinstance(thing.__self__, types.ModuleType | type)
    kind = type(thing)
    torch_op = kind.__module__ == "torch._ops" or kind.__module__.split(".")[0] in ("torch", "triton")
    if torch_op and callable(thing) and not isinstance(thing, torch.nn.Module | Tensor):
        return True
    return issubclass(kind, enum.Enum)


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Types that `inputs.flatten_callable` knows how to flatten.
_FLAT = (Tensor, tuple, list, *_FUNCTIONS, Plan, Mask, TracedMask, Mod, MaskMod, BlockMask)


class _Node:
    """An object that a function reads.

    parts: its parts that are read, by (kind, name). whole: whether it is read as a whole
    """

    def __init__(self, thing: Any) -> None:
        self.thing, self.whole = thing, False
        self.parts: dict[tuple[str, Any], _Node] = {}

    def part(self, kind: str, name: Any, value: Any) -> _Node:
        return self.parts.setdefault((kind, name), _Node(value))


class _Reads:
    """Collects the state that a function reads, also in the methods and properties that it calls."""

    def __init__(self) -> None:
        self.captured: set[int] = set()  # ids of tensors that become inputs of the graph
        self._functions: set[tuple[int, int]] = set()
        self._count = 0

    def function(self, fn: types.FunctionType, owner: _Node | None) -> Layout:
        """Collect the reads of a function and return its layout. owner: the object bound to its first
        argument"""
        values = zip(fn.__code__.co_freevars, map(cell_value, fn.__closure__ or ()), strict=True)
        cells = {name: None if value is ABSENT else _Node(value) for name, value in values}
        self._follow_function(fn, owner, cells)
        defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
        for value in (*defaults, *keywords.values()):
            self._note(value)
        contents = [_unset() if node is None else self.layout(node) for node in cells.values()]
        parts: list[tuple[str, Any, Layout]] = [("cell", i, part) for i, part in enumerate(contents)]
        parts += [("default", i, VALUE) for i in range(len(defaults))]
        parts += [("keyword", name, VALUE) for name in keywords]
        name = register_function(fn.__code__, fn.__globals__, tuple(keywords))
        return "parts", "function", name, tuple(parts)

    def _follow_function(
        self, fn: types.FunctionType, owner: _Node | None, cells: dict[str, _Node | None]
    ) -> None:
        """Collect the reads of a function. cells: objects in its closure; empty for a method of an object"""
        name = id(fn), 0 if owner is None else id(owner)
        if name in self._functions:
            return
        self._functions.add(name)
        reads = code_reads(fn.__code__)
        if reads.obstacle or (owner is not None and "__class__" in fn.__code__.co_freevars):
            raise Uncapturable(f"{fn.__qualname__} {reads.obstacle or 'calls super()'}")
        for chain, _ in reads.chains:
            if chain.kind == GLOBAL and chain.name in ("getattr", "hasattr"):
                raise Uncapturable(f"{fn.__qualname__} calls {chain.name}()")
            if chain.kind == CELL and (node := cells.get(chain.name)) is not None:
                self._follow(node, chain.steps)
            elif chain.kind == ARGUMENT and owner is not None:
                self._follow(owner, chain.steps)

    def _follow(self, node: _Node, steps: tuple[Step, ...]) -> None:
        """Collect the attributes and items that are read from an object."""
        for step, name in steps:
            obj = node.thing
            if is_fixed(obj) or isinstance(obj, _FLAT):
                break
            if isinstance(obj, torch.nn.Module) and step == ITEM:
                break
            getter = None if step == ITEM else getattr(type(obj), name, None)
            if type(getter) is property and isinstance(getter.fget, types.FunctionType):
                return self._follow_function(getter.fget, node, {})
            value = read_step(obj, step, name)
            if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
                if value.__self__ is obj and not is_fixed(value.__func__):
                    return self._follow_function(value.__func__, node, {})
                break
            if isinstance(value, types.BuiltinMethodType) and value.__self__ is obj:
                break
            kind = "absent" if value is ABSENT else "item" if step == ITEM else "attribute"
            node = node.part(kind, name, value)
        node.whole = True
        return None

    def call(self, node: _Node) -> None:
        """Collect the reads of a call of an object."""
        kind = type(node.thing)
        name = "forward" if isinstance(node.thing, torch.nn.Module) else "__call__"
        call = getattr(kind, name, None)
        if name == "forward":
            _check_hooks(node.thing)
        if isinstance(call, types.FunctionType) and not is_fixed(call):
            self._follow_function(call, node, {})
            if name == "forward":
                node.part("attribute", "training", node.thing.training)
        else:
            node.whole = True

    def layout(self, node: _Node) -> Layout:
        """Return the layout of an object with the parts that were collected."""
        thing = node.thing
        if isinstance(thing, _FLAT) and not is_fixed(thing):
            self._note(thing)
            return VALUE
        if is_fixed(thing):
            if isinstance(thing, int | float):
                return VALUE
            state = (thing.start, thing.stop, thing.step) if isinstance(thing, slice) else thing
            return "is", register_constant((type(thing), state), thing)
        if type(thing) is dict and node.whole:
            self._note(thing)
            return VALUE
        if node.whole:
            _add_all_parts(node)
        kinds = _parts_of_class(thing, tuple(node.parts))
        parts = []
        for (kind, name), part in node.parts.items():
            self._count += 1
            if self._count > MAX_PARTS:
                raise Uncapturable(f"it reads more than {MAX_PARTS} attributes")
            parts.append((kind, name, _unset() if kind == "absent" else self.layout(part)))
        return "parts", "object", register_object(type(thing), kinds), tuple(parts)

    def _note(self, value: Any) -> None:
        """Record the tensors of a value that is flattened by its type."""
        if isinstance(value, Tensor):
            self.captured.add(id(value))
        elif isinstance(value, types.FunctionType | types.MethodType):
            self.captured |= set() if is_fixed(value) else _layout(value)[1].captured
        elif isinstance(value, MaskMod | Mod):
            self._note([*vars(value).values()])
        elif (container := take_apart(value)) is not None:
            for part in container[2]:
                self._note(part)


def _unset() -> Layout:
    return "unset", register_constant(ABSENT, ABSENT)


MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_MODULE_FIELDS = frozenset(vars(torch.nn.Module())) - {"training"}


def _add_all_parts(node: _Node) -> None:
    """Add all attributes of an object to its parts, as wholes."""
    thing, kind = node.thing, type(node.thing)
    if kind is OrderedDict:
        for key, value in thing.items():
            node.part("item", key, value).whole = True
        return
    fields = _fields_of(thing)
    if isinstance(thing, torch.nn.Module):
        _check_hooks(thing)
        tables = {name: value for table in MODULE_TABLES for name, value in fields[table].items()}
        fields = {name: value for name, value in fields.items() if name not in _MODULE_FIELDS} | tables
    for name in fields:
        node.part("attribute", name, getattr(thing, name)).whole = True


def _fields_of(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its slots and its __dict__."""
    slots = [base.__dict__.get("__slots__", ()) for base in type(obj).__mro__]
    names = [name for group in slots for name in ((group,) if isinstance(group, str) else group)]
    own = ("__dict__", "__weakref__")
    held = {name: getattr(obj, name) for name in names if name not in own and hasattr(obj, name)}
    return {**held, **getattr(obj, "__dict__", {})}


def _check_hooks(module: torch.nn.Module) -> None:
    if any(name.endswith("_hooks") and vars(module).get(name) for name in _MODULE_FIELDS):
        raise Uncapturable(f"it calls a {type(module).__qualname__} that has hooks")


def _parts_of_class(thing: Any, parts: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Return (place, name) of each part of a copy by `stand_in`: an attribute, an item, or a table of an
    nn.Module."""
    kind = type(thing)
    builtin = [base for base in kind.__mro__ if base is not object and not base.__flags__ & HEAP_TYPE]
    if builtin and kind not in (dict, OrderedDict):
        raise Uncapturable(f"it reads a {kind.__qualname__}, whose state Python cannot list")
    if kind.__module__.split(".")[0] == "torch" and not isinstance(thing, torch.nn.Module):
        raise Uncapturable(f"it reads a {kind.__module__}.{kind.__qualname__}")
    if not isinstance(thing, torch.nn.Module):
        return parts
    fields = vars(thing)
    place = {name: table for table in MODULE_TABLES for name in fields[table]}
    return tuple([(place.get(name, part), name) for part, name in parts])


def stand_in(constant: tuple[Any, tuple[tuple[str, Any], ...]], values: list[Any]) -> Any:
    """Make a partial copy of an object: of the same class, with the parts that a function reads."""
    kind, parts = constant
    copy = kind() if kind in (dict, OrderedDict) else object.__new__(kind)
    if isinstance(copy, torch.nn.Module):
        torch.nn.Module.__init__(copy)
    for (place, name), value in zip(parts, values, strict=True):
        if place == "item":
            copy[name] = value
        elif place in MODULE_TABLES:
            vars(copy)[place][name] = value
        elif place == "attribute":
            object.__setattr__(copy, name, value)
    return copy


def check_gradients(fn: Any, captured: AbstractSet[int]) -> None:
    """Raise Uncapturable if a function reads a tensor that requires grad but is not an input of the graph.

    captured: ids of the tensors that are inputs
    """
    for tensor in Fingerprint(fn).tensors:
        if tensor.requires_grad and id(tensor) not in captured:
            raise Uncapturable(
                f"it reads a tensor {tuple(tensor.shape)} that requires grad from a global or a class; "
                "inside torch.compile it would get no gradient"
            )


def _name(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or f"a {type(thing).__qualname__}"
