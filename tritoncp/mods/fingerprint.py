"""Fingerprint of a Python function: a hashable key of its code and of all state that the code can read.

Two functions with equal fingerprints trace to the same graph. The bytecode (:mod:`.bytecode`) says which
chains of attributes and subscripts a function reads. Each is followed through plain objects, modules,
classes (along the MRO), dictionaries and lists, and the value at its end enters the key: a number, a text, a
tensor, a container of these, or a function, which is followed in turn.

Everything else makes the function *incomparable*, and it has no key: an object that is passed on or called as
a whole, since any of its state may then be read; attributes that other code computes; state that has no value
(a file, the clock, an iterator); and functions that edit the state that they read.

Tensors enter the key by dtype, shape, device and requires_grad, never by identity or contents.
"""

from __future__ import annotations

import builtins
import decimal
import enum
import fractions
import functools
import importlib.util
import re
import sys
import types
from collections import deque
from typing import Any

import torch

from tritoncp.mods.attributes import ABSENT, Getter, Incomparable, attribute_of, in_class, item_of
from tritoncp.mods.bytecode import ARGUMENT, CELL, GLOBAL, ITEM, Chain, code_reads

MOST_VALUES = 1024  # in one fingerprint: past that, running the function is quicker than comparing its state

_COMPUTED = object()  # a value that a function computes, whose own reads enter the key
_ATOMS = frozenset(
    {bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
    | {decimal.Decimal, fractions.Fraction, re.Pattern}
)
_NUMBERS = frozenset({int, float, complex})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_SEQUENCES = frozenset({tuple, list, deque, torch.Size})
_PURE_MODULES = frozenset(
    {"builtins", "math", "cmath", "operator", "_operator", "itertools", "functools", "_functools"}
)
_IMPURE_BUILTINS = frozenset(
    {"__import__", "compile", "delattr", "dir", "eval", "exec", "getattr", "globals", "hasattr", "hash", "id"}
    | {"input", "locals", "open", "setattr", "vars"}
)
_EDITS = frozenset(  # methods of containers; `format` reads attributes that a text names
    {"append", "appendleft", "add", "clear", "discard", "extend", "format", "format_map", "insert", "pop"}
    | {"popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update", "__setitem__"}
)
# Names in torch that give a Python value which depends on the contents of tensors or on settings.
_IMPURE_TORCH = re.compile(
    r"equal|allclose|is_nonzero|data_ptr|_version|grad|is_leaf|get_.*|are_.*|is_\w+_enabled|initial_seed"
    r"|current_\w+|stride|is_contiguous|\w*storage\w*"
)


class Identity:
    """Hashable by identity, keeping its object alive, so that a freed id cannot come back as another."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.thing is self.thing

    def __repr__(self) -> str:
        return getattr(self.thing, "__qualname__", None) or repr(self.thing)


class Fingerprint:
    """The state that a function, method, partial or callable object reads, as of now.

    key: hashable, a tuple of (path, value) pairs; None if some state is incomparable
    reason: which state that is
    tensors: captured tensors in the order in which they were met, each once
    numbers: Python numbers read from globals and attributes

    >>> class Config:
    ...     slope = 0.5
    >>> bias = lambda score, b, h, q_idx, kv_idx: score - Config.slope * (q_idx - kv_idx)
    >>> before = Fingerprint(bias)
    >>> Config.slope = 0.25
    >>> before.numbers, Fingerprint(bias).key == before.key
    ([0.5], False)
    """

    __slots__ = (
        "_alive", "_count", "_entries", "_places", "_tensor_places", "key", "numbers", "reason", "tensors",
    )  # fmt: skip

    def __init__(self, fn: object) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[int | float] = []
        self.key: Any = None
        self.reason = ""
        self._entries: list[tuple[str, Any]] = []
        self._places: dict[Any, int] = {}
        self._tensor_places: dict[int, int] = {}
        self._alive: list[object] = []
        self._count = 0
        try:
            self._entries.append(("the function", self._called("the function", fn)))
            self.key = tuple(self._entries)
        except Incomparable as error:
            self.reason = str(error)
        except RecursionError:
            self.reason = "state is nested too deep to compare"
        except Exception as error:  # of the user's classes: of a key's __eq__, say
            self.reason = f"reading its state raised {type(error).__name__}: {error}"

    def _called(self, path: str, fn: Any) -> Any:
        """The function itself, or the method that makes an object callable."""
        call = in_class(type(fn), "__call__")
        if isinstance(call, types.FunctionType) and not _is_closed_form(fn):
            return "callable", self._function(path, call, fn)
        return self._value(path, fn)

    # -- values ------------------------------------------------------------------------------------------

    def _value(self, path: str, thing: Any) -> Any:
        """The key of a value that the function gets hold of."""
        self._count += 1
        if self._count > MOST_VALUES:
            raise Incomparable(f"{path} has more than {MOST_VALUES} values")
        kind = type(thing)
        if kind in _TENSORS:
            return self._tensor(path, thing)
        if kind in _NUMBERS:
            return kind.__name__, repr(thing)
        if kind in _ATOMS:
            return kind, thing
        if kind is types.FunctionType:
            return self._function(path, thing, None)
        if kind is types.BuiltinFunctionType:
            return self._builtin(path, thing)
        if (place := self._places.get(id(thing))) is not None:
            return "again", place
        self._remember(id(thing), thing)
        return self._compound(path, thing, kind)

    def _remember(self, key: Any, thing: Any) -> int:
        self._alive.append(thing)
        return self._places.setdefault(key, len(self._places))

    def _tensor(self, path: str, tensor: torch.Tensor) -> Any:
        place = self._tensor_places.get(id(tensor))
        if place is None:
            place = self._tensor_places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            if tensor.__dict__:
                self._entries.append((path, self._value(f"an attribute of {path}", tensor.__dict__)))
        return "tensor", place, type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device

    def _compound(self, path: str, thing: Any, kind: type) -> Any:
        if kind is types.MethodType and isinstance(thing.__func__, types.FunctionType):
            return "method", self._function(path, thing.__func__, thing.__self__)
        if kind is functools.partial:
            parts = thing.func, thing.args, thing.keywords, thing.__dict__
            return "partial", tuple([self._value(path, part) for part in parts])
        if kind in _SEQUENCES:
            return kind, tuple([self._value(path, item) for item in thing])
        if kind is dict:
            return kind, tuple([(self._value(path, k), self._value(path, v)) for k, v in thing.items()])
        if kind in (set, frozenset):
            return kind, frozenset([self._value(path, item) for item in thing])
        if kind is slice:
            return kind, self._value(path, (thing.start, thing.stop, thing.step))
        if isinstance(thing, type):
            return self._class(path, thing)
        if isinstance(thing, enum.Enum) and _is_plain_enum(kind):
            return Identity(thing), self._value(path, vars(thing))
        if kind is types.ModuleType and thing.__name__.split(".")[0] in ("torch", "math"):
            return Identity(thing)
        if _is_torch_function(thing):
            _refuse_impure(path, [getattr(thing, "__name__", "")])
            return Identity(thing)
        if kind.__module__ == "numpy":
            return _array(path, thing)
        if _is_closed_form(thing):
            return kind, tuple([(name, self._value(path, field)) for name, field in vars(thing).items()])
        raise Incomparable(f"{path} is a {kind.__qualname__}, of which any state may be read")

    def _class(self, path: str, cls: type) -> Any:
        """A class that is called or compared with: of the built-in ones and torch's."""
        ours = cls.__module__.split(".")[0] == "torch" or cls.__module__ == "builtins"
        if not ours or cls is super or (cls.__flags__ & _HEAP_TYPE and cls.__module__ == "builtins"):
            raise Incomparable(f"{path} is the class {cls.__qualname__}, of which any state may be read")
        return Identity(cls)

    def _builtin(self, path: str, thing: Any) -> Any:
        owner, name = thing.__self__, thing.__name__
        if owner is not None and not isinstance(owner, types.ModuleType):
            if isinstance(owner, torch.Tensor):
                _refuse_impure(path, [name])
            elif name in _EDITS:
                raise Incomparable(f"{path}() edits what the function reads, or reads what a text names")
            return "method", name, self._value(path, owner)
        if _is_torch_function(thing):
            _refuse_impure(path, [name])
        elif thing.__module__ not in _PURE_MODULES or name in _IMPURE_BUILTINS:
            raise Incomparable(f"{path} is {thing.__module__}.{name}(), which reads state of its own")
        return Identity(thing)

    # -- functions ---------------------------------------------------------------------------------------

    def _function(self, path: str, fn: types.FunctionType, owner: Any) -> Any:
        """owner: the object that the first argument is bound to, None where there is none."""
        name = id(fn), id(owner)
        if (place := self._places.get(name)) is not None:
            return "function", place
        if str(fn.__globals__.get("__name__")).split(".")[0] == "torch":
            if owner is not None:
                raise Incomparable(f"{path} is a method of a {type(owner).__qualname__}")
            _refuse_impure(path, [fn.__name__])
            return Identity(fn)
        place = self._remember(name, (fn, owner))
        code = fn.__code__
        reads = code_reads(code)
        if reads.obstacle or (owner is not None and "__class__" in code.co_freevars):
            raise Incomparable(f"{fn.__qualname__} {reads.obstacle or 'calls super()'}")
        _refuse_impure("a tensor", reads.attributes)
        self._entries.append((path, code))
        if fn.__defaults__ is not None or fn.__kwdefaults__ is not None:
            defaults = self._value("a default", (fn.__defaults__, fn.__kwdefaults__))
            self._entries.append(("a default", defaults))
        if fn.__dict__:
            self._entries.append((path, self._value(f"an attribute of {path}", fn.__dict__)))
        for chain in reads.chains:
            value = self._follow(chain, fn, owner)
            if value is _COMPUTED:
                continue
            if type(value) in (int, float) and (chain.kind != CELL or chain.steps):
                self.numbers.append(value)
            self._entries.append((chain.path, self._end(chain, value)))
        return "function", place

    def _end(self, chain: Chain, value: Any) -> Any:
        """The key of the value at the end of a chain."""
        if value is ABSENT:
            return value
        if (value is getattr or value is hasattr) and chain.kind == GLOBAL and not chain.steps:
            return Identity(value)  # of constant names: others are obstacles
        return self._value(chain.path, value)

    def _follow(self, chain: Chain, fn: types.FunctionType, owner: Any) -> Any:
        """The value at the end of a chain; _COMPUTED where a property or a tensor computes it."""
        value = _root(chain, fn, owner)
        for position, (step, name) in enumerate(chain.steps):
            if value is ABSENT:
                return value
            if value is _COMPUTED:  # a tensor, say
                _refuse_impure("a tensor", [name for step, name in chain.steps[position:] if step != ITEM])
                return value
            try:
                value = self._step(chain, value, step, name)
            except Incomparable as error:
                raise Incomparable(f"{chain.path} {error}") from None
        return value

    def _step(self, chain: Chain, thing: Any, step: str, name: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            if step != ITEM and name in thing.__dict__:
                return thing.__dict__[name]
            if type(thing) not in _TENSORS:
                raise Incomparable(f"is an attribute of a {type(thing).__qualname__}")
            if step != ITEM:
                _refuse_impure("a tensor", [name])
            self._entries.append((chain.path, self._value(chain.path, thing)))  # its dtype, shape, a method
            return _COMPUTED
        value = item_of(thing, name) if step == ITEM else attribute_of(thing, name)
        if type(value) is Getter:
            self._entries.append((chain.path, self._function(chain.path, value.fn, value.owner)))
            return _COMPUTED
        return value


_MAKES_MEMBERS = ("__init__", "__new__")  # of an enumeration, once
_HEAP_TYPE = 1 << 9  # of a type's flags: not one that is written in C as a constant


def _root(chain: Chain, fn: types.FunctionType, owner: Any) -> Any:
    """The value of the variable that a chain begins at."""
    if chain.kind == GLOBAL:
        value = fn.__globals__.get(chain.name, ABSENT)
        return getattr(builtins, chain.name, ABSENT) if value is ABSENT else value
    if chain.kind == ARGUMENT:
        return _COMPUTED if owner is None else owner
    if chain.kind == CELL:
        try:
            return (fn.__closure__ or ())[fn.__code__.co_freevars.index(chain.name)].cell_contents
        except ValueError:  # not bound yet
            return ABSENT
    try:
        package = fn.__globals__.get("__package__") or ""
        return sys.modules.get(importlib.util.resolve_name(chain.name, package), ABSENT)
    except ImportError:
        return ABSENT


def _refuse_impure(path: str, names: Any) -> None:
    for name in sorted(names):
        if _IMPURE_TORCH.fullmatch(name):
            raise Incomparable(f"{path} is asked for {name}, which contents of tensors or settings decide")


def _is_torch_function(thing: Any) -> bool:
    """Whether it is a function of torch, as `torch.tanh` or `torch.ops.aten.add`: no object with state."""
    kind = type(thing)
    if kind is types.BuiltinFunctionType:
        place = thing.__module__
    else:
        place = kind.__module__ if callable(thing) and not hasattr(thing, "_modules") else None
        place = None if hasattr(thing, "__dict__") and place != "torch._ops" else place
    return isinstance(place, str) and place.split(".")[0] == "torch"


def _is_closed_form(thing: Any) -> bool:
    """Whether it is a mask of this package, whose methods read nothing but its fields."""
    return type(thing).__module__.split(".")[0] == "tritoncp" and hasattr(thing, "__dict__")


def _is_plain_enum(kind: type) -> bool:
    """Whether members of an enumeration hold nothing but their fields."""
    fields = [item for base in kind.__mro__ if base.__module__ != "enum" for item in vars(base).items()]
    return not any(
        type(field) is property
        or (type(field) is types.FunctionType and field.__module__ != "enum" and name not in _MAKES_MEMBERS)
        for name, field in fields
    )


def _array(path: str, thing: Any) -> Any:
    """The key of NumPy's scalars, small arrays and functions."""
    kind = type(thing)
    if kind.__name__ == "ufunc":
        return Identity(thing)
    if hasattr(thing, "tobytes") and thing.size <= MOST_VALUES and not thing.dtype.hasobject:
        return kind, str(thing.dtype), thing.shape, thing.tobytes()
    raise Incomparable(f"{path} is a {kind.__qualname__}")
