"""Fingerprint of a Python function: a hashable key of its code and of all state that the code can read.

Two functions with equal fingerprints trace to the same graph. :mod:`.bytecode` lists the chains of attributes
and subscripts that a function reads. Each chain is evaluated, and its value enters the key: a number, a text,
a tensor, a container of these, or a function, whose reads enter the key too.

A function that reads other state is *incomparable* and has no key: an object that is passed or called as a
whole, since any of its attributes may be read, or state without a value to compare (a file, the clock, an
iterator). A function that edits the state it reads has no key either.

Tensors enter the key by dtype, shape, device and requires_grad, never by identity or contents.
"""

from __future__ import annotations

import builtins
import functools
import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from tritoncp.core.host_copy import is_dtensor
from tritoncp.mods.bytecode import ARGUMENT, ATTRIBUTE, CELL, GLOBAL, IMPORT, Chain, code_reads
from tritoncp.mods.captures import ABSENT, cell_value, take_apart

MAX_VALUES = 1024  # values per fingerprint; beyond this, a recording of the function takes less time
HEAP_TYPE = 1 << 9  # a bit of a class's __flags__; not set for static types, which are written in C

_tensor_facts = attrgetter("dtype", "shape", "requires_grad", "device")
_COMPUTED = object()  # the result of a function whose reads enter the key
_ATOMS = frozenset(
    {bool, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), type(ABSENT), range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_NUMBERS = frozenset({int, float})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_CONTAINERS = frozenset({tuple, list, dict, functools.partial, torch.Size})
_PURE_MODULES = frozenset(
    {"builtins", "math", "cmath", "operator", "_operator", "itertools", "functools", "_functools"}
)
_IMPURE_BUILTINS = frozenset(
    {"__import__", "compile", "delattr", "dir", "eval", "exec", "getattr", "globals", "hasattr", "hash", "id"}
    | {"input", "locals", "open", "setattr", "vars"}
)
_EDITS = frozenset(  # methods of containers; `format` reads attributes that its text names
    {"append", "appendleft", "add", "clear", "discard", "extend", "format", "format_map", "insert", "pop"}
    | {"popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update", "__setitem__"}
)
# Names in torch whose results are Python values that depend on tensor contents or on settings.
_IMPURE_TORCH = re.compile(
    r"equal|allclose|is_nonzero|data_ptr|_version|grad|is_leaf|get_.*|are_.*|is_\w+_enabled|initial_seed"
    r"|current_\w+|stride|is_contiguous|\w*storage\w*"
)


class Incomparable(Exception):
    """Raised where a function reads state that cannot be compared between calls."""


@dataclass(eq=False)
class ModState:
    """The state of a mask_mod or score_mod at one moment.

    key: hashable; equal keys mean equal graphs. None if the function can neither be compared nor recorded
    tensors: captured tensors in a fixed order
    numbers: Python ints and floats that the function reads
    incomparable: description of the state that has no key; empty if there is none
    """

    key: Any
    tensors: Sequence[torch.Tensor]
    numbers: Sequence[int | float]
    incomparable: str = ""


class Fingerprint(ModState):
    """The state that a function, method, partial or callable object reads, evaluated at construction.

    key: a tuple of (path, value) pairs; None if some state is incomparable
    tensors: in order of first use

    >>> class Config:
    ...     slope = 0.5
    >>> bias = lambda score, b, h, q_idx, kv_idx: score - Config.slope * (q_idx - kv_idx)
    >>> before = Fingerprint(bias)
    >>> Config.slope = 0.25
    >>> before.numbers, Fingerprint(bias).key == before.key
    ([0.5], False)
    """

    def __init__(self, fn: object) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[int | float] = []
        self.key: Any = None
        self.incomparable = ""
        self._entries: list[tuple[str, Any]] = []
        self._places: dict[Any, tuple[int, object]] = {}  # by id; keeps the object alive
        self._count = 0
        try:
            if type(fn) is types.FunctionType:
                key = self._function("the function", fn, None)
            elif type(call := read_step(type(fn), ATTRIBUTE, "__call__")) is types.FunctionType and (
                not _is_closed_form(fn)
            ):
                key = "callable", self._function("the function", call, fn)
            else:
                key = self._value("the function", fn)
            self.key = *self._entries, ("the function", key)
        except Incomparable as error:
            self.incomparable = str(error)
        except RecursionError:
            self.incomparable = "state is nested too deep to compare"
        except Exception as error:  # raised by the user's classes, for example by a property
            self.incomparable = f"reading its state raised {type(error).__name__}: {error}"

    # -- values ------------------------------------------------------------------------------------------

    def _value(self, path: str, obj: Any) -> Any:
        """Return the key of a value that the function reads."""
        self._count += 1
        if self._count > MAX_VALUES:
            raise Incomparable(f"{path} has more than {MAX_VALUES} values")
        kind = type(obj)
        if kind in _TENSORS:
            return self._tensor(path, obj)
        if kind in _NUMBERS:
            self.numbers.append(obj)
            return kind.__name__, repr(obj)
        if kind in _ATOMS:
            return kind, obj
        if kind is types.FunctionType:
            return self._function(path, obj, None)
        if (visited := self._places.get(id(obj))) is not None:
            return "again", visited[0]
        self._places[id(obj)] = len(self._places), obj
        return self._compound(path, obj, kind)

    def _tensor(self, path: str, tensor: torch.Tensor) -> Any:
        if (visited := self._places.get(id(tensor))) is not None:
            place = visited[0]
        else:
            place = len(self.tensors)
            self._places[id(tensor)] = place, tensor
            self.tensors.append(tensor)
            # torch.compile sets attributes on tensors, which no mod reads.
            read = tensor.__dict__ and {
                n: x for n, x in tensor.__dict__.items() if not n.startswith("_dynamo_")
            }
            if read:
                self._entries.append((path, self._value(f"an attribute of {path}", read)))
        return "tensor", place, type(tensor), _tensor_facts(tensor)

    def _compound(self, path: str, obj: Any, kind: type) -> Any:
        if is_dtensor(obj):
            self.tensors.append(obj)  # refused where the state is read
            return "DTensor"
        if kind is types.MethodType and isinstance(obj.__func__, types.FunctionType):
            return "method", self._function(path, obj.__func__, obj.__self__)
        if kind in _CONTAINERS and (container := take_apart(obj)) is not None:
            name, constant, parts = container
            return name, constant, tuple([self._value(path, part) for part in parts])
        if kind in (set, frozenset):
            return kind, frozenset([self._value(path, item) for item in obj])
        is_array = kind.__module__ == "numpy" and hasattr(obj, "tobytes")
        if is_array and obj.size <= MAX_VALUES and not obj.dtype.hasobject:
            return kind, str(obj.dtype), obj.shape, obj.tobytes()
        if _is_closed_form(obj):
            return kind, tuple([(name, self._value(path, field)) for name, field in vars(obj).items()])
        owner = getattr(obj, "__self__", None) if kind is types.BuiltinFunctionType else None
        if owner is not None and not isinstance(owner, types.ModuleType):
            if isinstance(owner, torch.Tensor):
                _refuse_impure(path, [obj.__name__])
            elif obj.__name__ in _EDITS:
                raise Incomparable(f"{path}() edits a container, or reads attributes by a format string")
            return "method", obj.__name__, self._value(path, owner)
        if not is_of_library(obj, kind):
            raise Incomparable(f"{path} is {_describe(obj)}, any state of which may be read")
        return obj

    # -- functions ---------------------------------------------------------------------------------------

    def _function(self, path: str, fn: types.FunctionType, owner: Any) -> Any:
        """Return the key of a function. owner: the object bound to its first argument, or None"""
        name = id(fn), id(owner)
        if (visited := self._places.get(name)) is not None:
            return "function", visited[0]
        place = len(self._places)
        self._places[name] = place, (fn, owner)
        if f"{fn.__globals__.get('__name__')}.".startswith("torch."):
            return self._torch_function(path, fn, owner)
        code = fn.__code__
        reads = code_reads(code)
        if reads.obstacle or (owner is not None and "__class__" in code.co_freevars):
            raise Incomparable(f"{fn.__qualname__} {reads.obstacle or 'calls super()'}")
        if reads.attributes:
            _refuse_impure("a tensor", reads.attributes)
        self._entries.append((path, code))
        if fn.__defaults__ is not None or fn.__kwdefaults__ is not None:
            defaults = self._value("a default", (fn.__defaults__, fn.__kwdefaults__))
            self._entries.append(("a default", defaults))
        if fn.__dict__:
            self._entries.append((path, self._value(f"an attribute of {path}", fn.__dict__)))
        for chain, chain_path in reads.chains:
            value = root_of(chain, fn, owner)
            if chain.steps:
                value = self._follow(chain, chain_path, value)
            if value is not _COMPUTED:
                self._entries.append((chain_path, self._value(chain_path, value)))
        return "function", place

    def _torch_function(self, path: str, fn: types.FunctionType, owner: Any) -> Any:
        """Return the key of a torch function: itself, and values of its closure that are not from torch, for
        example the mask_mods that `and_masks` joins, or a function decorated with `torch.no_grad`."""
        if owner is not None:
            raise Incomparable(f"{path} is a method of a {type(owner).__qualname__}")
        _refuse_impure(path, [fn.__name__])
        for cell in fn.__closure__ or ():
            value = cell_value(cell)
            if not _is_of_torch(getattr(value, "__self__", value)):
                self._entries.append((path, self._value(path, value)))
        return fn

    def _follow(self, chain: Chain, path: str, value: Any) -> Any:
        """Evaluate a chain; return _COMPUTED where a property or a tensor computes the value."""
        for position, (step, name) in enumerate(chain.steps):
            if value is ABSENT:
                break
            if isinstance(value, torch.Tensor) and name not in value.__dict__:
                self._entries.append((path, self._value(path, value)))  # dtype, shape, a method
                value = _COMPUTED
            if value is _COMPUTED:
                _refuse_impure(
                    "a tensor", [name for kind, name in chain.steps[position:] if kind == ATTRIBUTE]
                )
                break
            owner, value = value, read_step(value, step, name)
            if isinstance(value, torch.Tensor) and value is not read_step(owner, step, name):
                getter = getattr(type(owner), str(name), None)
                if type(getter) is not property or type(getter.fget) is not types.FunctionType:
                    raise Incomparable(f"{path} is a new tensor at each read")
                self._entries.append((path, self._function(path, getter.fget, owner)))
                value = _COMPUTED
        return value


def root_of(chain: Chain, fn: types.FunctionType, owner: Any) -> Any:
    """Return the value of a chain's variable. Raises Incomparable for modules imported in the function,
    except torch and math."""
    if chain.kind == GLOBAL:
        value = fn.__globals__.get(chain.name, ABSENT)
        return getattr(builtins, chain.name, ABSENT) if value is ABSENT else value
    if chain.kind == CELL:
        return cell_value((fn.__closure__ or ())[fn.__code__.co_freevars.index(chain.name)])
    if chain.kind == IMPORT and chain.name.split(".")[0] not in ("torch", "math"):
        raise Incomparable(f"the module {chain.name!r} is imported when the function runs")
    return owner if chain.kind == ARGUMENT and owner is not None else _COMPUTED


def read_step(obj: Any, step: str, name: Any) -> Any:
    """Return ``obj.name`` or ``obj[name]``; ABSENT if it does not exist."""
    try:
        return getattr(obj, name) if step == ATTRIBUTE else obj[name]
    except (AttributeError, LookupError, TypeError):
        return ABSENT


def _refuse_impure(path: str, names: Iterable[str]) -> None:
    for name in sorted(names):
        if _IMPURE_TORCH.fullmatch(name):
            raise Incomparable(f"{path} calls {name}, which depends on tensor contents or settings")


def is_of_library(obj: Any, kind: type) -> bool:
    """Return whether a value is a stateless module, class or function of Python or torch."""
    module = obj.__name__ if kind is types.ModuleType else getattr(obj, "__module__", None) or ""
    package = module.split(".")[0]
    if kind is types.ModuleType:
        return package in ("torch", "math")
    if isinstance(obj, type):
        return package == "torch" or (
            module == "builtins" and obj is not super and not obj.__flags__ & HEAP_TYPE
        )
    if kind is not types.BuiltinFunctionType and kind.__module__ != "torch._ops":
        return False
    if package == "torch":
        return not _IMPURE_TORCH.fullmatch(obj.__name__)
    return module in _PURE_MODULES and obj.__name__ not in _IMPURE_BUILTINS


def _describe(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    return str(name) if name else f"a {type(obj).__qualname__}"


def _is_of_torch(obj: Any) -> bool:
    """Return whether a value is a class of torch, or an instance of one other than a tensor."""
    cls = obj if isinstance(obj, type) else type(obj)
    return cls.__module__.split(".")[0] == "torch" and not issubclass(cls, torch.Tensor)


def _is_closed_form(obj: Any) -> bool:
    """Return whether a value is a closed-form mask of this package, whose methods only read its fields."""
    return type(obj).__module__.split(".")[0] == "tritoncp" and hasattr(obj, "__dict__")
