"""Fingerprint of a Python function: a hashable key of its code and of all state that the code can read.

Two functions with equal fingerprints trace to the same graph. The bytecode (:mod:`.bytecode`) says which
chains of attributes and subscripts a function reads; each is followed through instances, modules, classes
(along the MRO), dictionaries and lists, and the value at its end enters the key. Functions that are read are
followed in turn. An object that is passed on instead of being read *escapes*: each attribute that any of the
functions names, and each special method of its class, is taken to be read from it.

Tensors enter the key by dtype, shape, device and requires_grad, never by identity or contents. State that has
no value to compare (a file, a generator, the clock) makes the function *incomparable*: it has no key.
"""

from __future__ import annotations

import builtins
import enum
import functools
import importlib.util
import operator
import re
import sys
import types
from collections import defaultdict
from typing import Any

import torch

from .attributes import (
    ABSENT,
    CONTAINERS,
    DESCRIPTORS,
    PLAIN_BASES,
    SEQUENCES,
    Getter,
    attribute_of,
    definitions_of,
    has_hidden_state,
    implicit_methods,
    in_class,
    is_library_class,
    is_of_torch,
    is_torch,
    item_of,
)
from .bytecode import ARGUMENT, CELL, GLOBAL, ITEM, Chain, code_reads

MOST_VALUES = 1024  # in one fingerprint: past that, running the function is quicker than comparing its state

_COMPUTED = object()  # a value that a function computes, whose own reads enter the key
_ATOMS = frozenset(
    {bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_NAMING_CLASSES = operator.attrgetter, operator.methodcaller
_NUMBERS = frozenset({int, float, complex})
_CACHED = type(functools.cache(len))
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PURE_MODULES = frozenset(
    {"builtins", "math", "cmath", "operator", "_operator", "itertools", "functools", "_functools"}
)
_IMPURE_BUILTINS = frozenset(
    {"__import__", "compile", "delattr", "dir", "eval", "exec", "globals", "hash", "id", "input", "locals"}
    | {"open", "setattr", "vars"}
)
# Names in torch that give a Python value which depends on the contents of tensors or on settings.
_IMPURE_TORCH = re.compile(
    r"equal|allclose|is_nonzero|data_ptr|_version|grad|is_leaf|get_.*|are_.*|is_\w+_enabled|initial_seed"
    r"|current_\w+|stride|is_contiguous|\w*storage\w*"
)


class Incomparable(Exception):
    """State that a function reads cannot be compared with its value at another call."""


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
        "_alive", "_attributes", "_count", "_entries", "_escaped", "_places", "_tensor_places", "key",
        "numbers", "reason", "tensors",
    )  # fmt: skip

    def __init__(self, fn: object) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[int | float] = []
        self.key: Any = None
        self.reason = ""
        self._entries: list[tuple[str, Any]] = []
        self._attributes: set[str] = set()  # names read from values that no chain leads to
        self._escaped: list[tuple[str, Any]] = []
        self._places: dict[Any, int] = {}
        self._tensor_places: dict[int, int] = {}
        self._alive: list[object] = []
        self._count = 0
        try:
            self._entries.append(("the function", self._value("the function", fn)))
            if self._escaped:
                self._read_escaped()
            self._refuse_impure("a tensor", self._attributes)
            self.key = tuple(self._entries)
        except Incomparable as error:
            self.reason = str(error)
        except RecursionError:
            self.reason = "state is nested too deep to compare"

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
        if isinstance(thing, torch.Tensor):
            return self._tensor(path, thing)
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
            if tensor.__dict__ or type(tensor) not in _TENSORS:
                self._escaped.append((path, tensor))
        return "tensor", place, type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device

    def _compound(self, path: str, thing: Any, kind: type) -> Any:
        if kind is types.MethodType:
            return "method", self._bound(path, thing.__func__, thing.__self__)
        if kind is functools.partial:
            parts = thing.func, thing.args, thing.keywords
            return "partial", tuple([self._value(path, part) for part in parts])
        if kind is type and thing in _NAMING_CLASSES:
            raise Incomparable(f"{path} is operator.{thing.__name__}, which reads attributes by name")
        if isinstance(thing, enum.Enum | types.ModuleType | type):
            self._escaped.append((path, thing))
            return Identity(thing)
        if isinstance(thing, types.MethodWrapperType):
            return "method", thing.__name__, self._value(path, thing.__self__)
        if is_torch(thing) and callable(thing) and not isinstance(thing, torch.nn.Module):
            self._refuse_impure(path, [getattr(thing, "__name__", "")])
            return Identity(thing)
        if kind is slice:
            return kind, self._value(path, (thing.start, thing.stop, thing.step))
        if kind.__module__ == "numpy" or isinstance(thing, DESCRIPTORS):
            return self._foreign(path, thing, kind)
        if isinstance(thing, staticmethod | classmethod):
            return kind, self._value(path, thing.__func__)
        if kind is _CACHED:
            return kind, self._value(path, thing.__wrapped__)
        contents = self._contents(path, thing)
        return (kind, contents) if kind in CONTAINERS else self._object(path, thing, kind, contents)

    def _contents(self, path: str, thing: Any) -> Any:
        """The items of a container, the value of a number or text that has attributes, else None."""
        if isinstance(thing, SEQUENCES):
            return tuple([self._value(path, item) for item in thing])
        if isinstance(thing, dict | types.MappingProxyType):
            pairs = thing.items()
            items = tuple([(self._value(path, name), self._value(path, value)) for name, value in pairs])
            return items, self._value(path, thing.default_factory) if isinstance(thing, defaultdict) else None
        if isinstance(thing, set | frozenset):
            return frozenset([self._value(path, item) for item in thing])
        if isinstance(thing, int | float | complex | str | bytes):
            plain: Any = next(base for base in type(thing).__mro__ if base in PLAIN_BASES)
            return plain.__repr__(thing)
        return None

    def _object(self, path: str, thing: Any, kind: type, contents: Any) -> Any:
        if has_hidden_state(kind):
            raise Incomparable(f"{path} is a {kind.__qualname__}")
        if kind.__module__.split(".")[0] == "tritoncp" and hasattr(thing, "__dict__"):
            # Closed forms of masks: their methods read nothing but their fields.
            return kind, tuple([(name, self._value(path, value)) for name, value in vars(thing).items()])
        self._escaped.append((path, thing))
        return Identity(kind), contents

    def _builtin(self, path: str, thing: Any) -> Any:
        owner = thing.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            if isinstance(owner, torch.Tensor):
                self._refuse_impure(path, [thing.__name__])
            return "method", thing.__name__, self._value(path, owner)
        if (trouble := _impurity(thing)) is not None:
            raise Incomparable(f"{path} {trouble}")
        return Identity(thing)

    def _foreign(self, path: str, thing: Any, kind: type) -> Any:
        """NumPy's scalars, small arrays and functions; descriptors read from a class."""
        if kind.__name__ == "ufunc" or kind.__module__ != "numpy":
            return Identity(thing)
        if hasattr(thing, "tobytes") and thing.size <= MOST_VALUES and not thing.dtype.hasobject:
            return kind, str(thing.dtype), thing.shape, thing.tobytes()
        raise Incomparable(f"{path} is a {kind.__qualname__}")

    def _refuse_impure(self, path: str, names: Any) -> None:
        for name in sorted(names):
            if _IMPURE_TORCH.fullmatch(name):
                raise Incomparable(f"{path} {_TENSORS_DECIDE.format(name)}")

    # -- functions ---------------------------------------------------------------------------------------

    def _bound(self, path: str, fn: Any, owner: Any) -> Any:
        if not isinstance(fn, types.FunctionType):
            return self._value(path, fn), self._value(path, owner)
        key = self._function(path, fn, owner)
        if type(key) is Identity:  # torch's own: it reads what its object holds
            self._read_fields(path, owner)
        return key

    def _function(self, path: str, fn: types.FunctionType, owner: Any) -> Any:
        """owner: the object that the first argument is bound to, None where there is none."""
        name = id(fn), id(owner)
        if (place := self._places.get(name)) is not None:
            return "function", place
        if (fn.__module__ or "").split(".")[0] == "torch":
            self._refuse_impure(path, [fn.__name__])
            return Identity(fn)
        place = self._remember(name, (fn, owner))
        code = fn.__code__
        reads = code_reads(code)
        if reads.obstacle:
            raise Incomparable(f"{fn.__qualname__} {reads.obstacle}")
        self._entries.append((path, code))
        if reads.attributes:
            self._attributes |= reads.attributes
        if fn.__defaults__ is not None or fn.__kwdefaults__ is not None:
            defaults = self._value("a default", (fn.__defaults__, fn.__kwdefaults__))
            self._entries.append(("a default", defaults))
        if "__class__" in code.co_freevars and owner is not None:  # super() reads it and names neither
            self._escaped.append((path, owner))
        for chain in reads.chains:
            value = self._follow(chain, fn, owner)
            if value is _COMPUTED:
                continue
            if type(value) in (int, float) and (chain.kind != CELL or chain.steps):
                self.numbers.append(value)
            self._entries.append((chain.path, ABSENT if value is ABSENT else self._value(chain.path, value)))
        return "function", place

    def _follow(self, chain: Chain, fn: types.FunctionType, owner: Any) -> Any:
        """The value at the end of a chain; _COMPUTED where a function computes it or a value on the way."""
        value = _root(chain, fn, owner)
        for position, (step, name) in enumerate(chain.steps):
            if value is ABSENT:
                return ABSENT
            if value is not _COMPUTED:
                read = self._item if step == ITEM else self._attribute
                value = read(chain.path, value, name)
            if value is _COMPUTED:
                self._attributes.update(name for step, name in chain.steps[position:] if step != ITEM)
                return _COMPUTED
        return value

    def _attribute(self, path: str, thing: Any, name: str) -> Any:
        if isinstance(thing, torch.Tensor) and name not in thing.__dict__ and is_of_torch(type(thing), name):
            self._refuse_impure(path, [name])
            self._entries.append((path, self._value(path, thing)))  # its dtype and shape, or a method of it
            return _COMPUTED
        return self._resolve(path, attribute_of(thing, name))

    def _resolve(self, path: str, value: Any) -> Any:
        if type(value) is not Getter:
            return value
        self._escaped += [(path, thing) for thing in value.touches]
        self._entries.append((path, self._bound(path, value.fn, value.owner)))
        return _COMPUTED

    def _item(self, path: str, thing: Any, key: Any) -> Any:
        value = item_of(thing, key)
        if value is not ABSENT:
            return value
        self._entries.append((path, self._value(path, thing)))
        return _COMPUTED

    # -- escaped objects -----------------------------------------------------------------------------------

    def _read_escaped(self) -> None:
        """Read from every escaped object each attribute that a function names, until no new one appears."""
        read: dict[int, set[str]] = {}
        size = None
        while size != (len(self._escaped), len(self._attributes)):
            size = len(self._escaped), len(self._attributes)
            for path, thing in list(self._escaped):
                if is_torch(thing) and not isinstance(thing, torch.Tensor | torch.nn.Module):
                    continue
                if id(thing) not in read:
                    self._alive.append(thing)
                    read[id(thing)] = set()
                    self._read_implicit(path, thing)
                for name in sorted(self._attributes - read[id(thing)]):
                    read[id(thing)].add(name)
                    self._read_definitions(f"{path}.{name}", thing, name)

    def _read_definitions(self, path: str, thing: Any, name: str) -> None:
        if isinstance(thing, torch.Tensor) and name not in thing.__dict__ and is_of_torch(type(thing), name):
            return
        for value in definitions_of(thing, name):
            resolved = self._resolve(path, value)
            if resolved is not _COMPUTED and resolved is not ABSENT:
                self._entries.append((path, self._value(path, resolved)))

    def _read_implicit(self, path: str, thing: Any) -> None:
        for name, method, owner in implicit_methods(thing):
            self._function(f"{path}.{name}", method, owner)
        if isinstance(thing, torch.nn.Module):
            self._bound(f"{path}.forward", in_class(type(thing), "forward"), thing)
            for hooks in ("_forward_hooks", "_forward_pre_hooks"):
                self._entries.append((f"{path}.{hooks}", self._value(path, dict(getattr(thing, hooks)))))
        elif is_library_class(type(thing)):
            self._read_fields(path, thing)

    def _read_fields(self, path: str, thing: Any) -> None:
        """Read the fields of a library object; of a user's nn.Module, those that torch reads."""
        if isinstance(thing, type | types.ModuleType | torch.Tensor | enum.Enum):
            return
        fields = getattr(thing, "__dict__", {})
        if not is_library_class(type(thing)):
            fields = {
                name: fields[name] for name in ("_parameters", "_buffers", "_modules") if name in fields
            }
        for name, value in fields.items():
            self._entries.append((f"{path}.{name}", self._value(f"{path}.{name}", value)))


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


_TENSORS_DECIDE = "is asked for {}, which contents of tensors or settings of torch decide"


def _impurity(thing: types.BuiltinFunctionType) -> str | None:
    """Why the result of a built-in function may differ between calls with equal arguments."""
    if is_torch(thing):
        return _TENSORS_DECIDE.format(thing.__name__) if _IMPURE_TORCH.fullmatch(thing.__name__) else None
    if thing.__module__ not in _PURE_MODULES or thing.__name__ in _IMPURE_BUILTINS:
        return f"is {thing.__module__}.{thing.__name__}(), which reads state of its own"
    return None
