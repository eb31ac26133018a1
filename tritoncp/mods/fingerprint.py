"""Fingerprint of a Python function: a hashable key of its code and of all state that the code can read.

Two functions with equal fingerprints trace to the same graph. :mod:`.bytecode` lists the chains of attributes
and subscripts that a function reads. Each is followed through plain objects, modules, classes (along the
MRO), dictionaries and lists, and the value at its end enters the key: a number, a text, a tensor, a container
of these, or a function, whose own reads enter the key too.

A function that reads other state is *incomparable* and has no key. Such state is: an object that is passed or
called as a whole, since any of its attributes may then be read; attributes that other code computes; state
that has no value (a file, the clock, an iterator). A function that edits the state that it reads has no key.

Tensors enter the key by dtype, shape, device and requires_grad, never by identity or contents.
"""

from __future__ import annotations

import builtins
import decimal
import enum
import fractions
import functools
import re
import types
from collections import deque
from typing import Any

import torch

from tritoncp.mods.attributes import ABSENT, HEAP_TYPE, Getter, Incomparable, attribute_of, in_class, item_of
from tritoncp.mods.bytecode import ARGUMENT, CELL, GLOBAL, IMPORT, ITEM, Chain, code_reads
from tritoncp.mods.captures import cell_value

MAX_VALUES = 1024  # in one fingerprint: a recording of the function takes less time than comparing more

_COMPUTED = object()  # result of a function whose own reads enter the key
_ATOMS = frozenset(
    {bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented), type(ABSENT), range}
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
_EDITS = frozenset(  # methods of containers; `format` reads attributes that its text names
    {"append", "appendleft", "add", "clear", "discard", "extend", "format", "format_map", "insert", "pop"}
    | {"popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update", "__setitem__"}
)
# Names in torch that give a Python value which depends on the contents of tensors or on settings.
_IMPURE_TORCH = re.compile(
    r"equal|allclose|is_nonzero|data_ptr|_version|grad|is_leaf|get_.*|are_.*|is_\w+_enabled|initial_seed"
    r"|current_\w+|stride|is_contiguous|\w*storage\w*"
)


class Identity:
    """A hashable reference to an object, equal by identity. It keeps the object, and so its id, alive."""

    __slots__ = ("obj",)

    def __init__(self, obj: object) -> None:
        self.obj = obj

    def __hash__(self) -> int:
        return id(self.obj)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.obj is self.obj

    def __repr__(self) -> str:
        return getattr(self.obj, "__qualname__", None) or repr(self.obj)


class Fingerprint:
    """The state that a function, method, partial or callable object reads, when this is constructed.

    key: hashable, a tuple of (path, value) pairs; None if some state is incomparable
    reason: the incomparable state, in words; empty if there is a key
    tensors: captured tensors in order of first use
    numbers: Python numbers read from globals and attributes

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
        self.reason = ""
        self._entries: list[tuple[str, Any]] = []
        self._places: dict[Any, int] = {}
        self._tensor_places: dict[int, int] = {}
        self._references: list[object] = []
        self._count = 0
        try:
            self._entries.append(("the function", self._callable_key("the function", fn)))
            self.key = tuple(self._entries)
        except Incomparable as error:
            self.reason = str(error)
        except RecursionError:
            self.reason = "state is nested too deep to compare"
        except Exception as error:  # of the user's classes: of a key's __eq__, say
            self.reason = f"reading its state raised {type(error).__name__}: {error}"

    def _callable_key(self, path: str, fn: Any) -> Any:
        """The key of the function, or of the `__call__` method of an object."""
        call = in_class(type(fn), "__call__")
        if isinstance(call, types.FunctionType) and not _is_closed_form(fn):
            return "callable", self._function(path, call, fn)
        return self._value(path, fn)

    # -- values ------------------------------------------------------------------------------------------

    def _value(self, path: str, obj: Any) -> Any:
        """The key of a value that the function reads."""
        self._count += 1
        if self._count > MAX_VALUES:
            raise Incomparable(f"{path} has more than {MAX_VALUES} values")
        kind = type(obj)
        if kind in _TENSORS:
            return self._tensor(path, obj)
        if kind in _NUMBERS:
            return kind.__name__, repr(obj)
        if kind in _ATOMS:
            return kind, obj
        if kind is types.FunctionType:
            return self._function(path, obj, None)
        if kind is types.BuiltinFunctionType:
            return self._builtin(path, obj)
        if (place := self._places.get(id(obj))) is not None:
            return "again", place
        self._remember(id(obj), obj)
        return self._compound(path, obj, kind)

    def _remember(self, key: Any, obj: Any) -> int:
        self._references.append(obj)
        return self._places.setdefault(key, len(self._places))

    def _tensor(self, path: str, tensor: torch.Tensor) -> Any:
        place = self._tensor_places.get(id(tensor))
        if place is None:
            place = self._tensor_places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            # Compiled calls leave notes on tensors, which no mod reads.
            read = {name: value for name, value in tensor.__dict__.items() if not name.startswith("_dynamo_")}
            if read:
                self._entries.append((path, self._value(f"an attribute of {path}", read)))
        return "tensor", place, type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device

    def _compound(self, path: str, obj: Any, kind: type) -> Any:
        if kind is types.MethodType and isinstance(obj.__func__, types.FunctionType):
            return "method", self._function(path, obj.__func__, obj.__self__)
        if kind is functools.partial:
            parts = obj.func, obj.args, obj.keywords, obj.__dict__
            return "partial", tuple([self._value(path, part) for part in parts])
        if kind in _SEQUENCES:
            return kind, tuple([self._value(path, item) for item in obj])
        if kind is dict:
            return kind, tuple([(self._value(path, k), self._value(path, v)) for k, v in obj.items()])
        if kind in (set, frozenset):
            return kind, frozenset([self._value(path, item) for item in obj])
        if kind is slice:
            return kind, self._value(path, (obj.start, obj.stop, obj.step))
        if isinstance(obj, type):
            return self._class(path, obj)
        if isinstance(obj, enum.Enum) and _is_plain_enum(kind):
            return Identity(obj), self._value(path, vars(obj))
        if kind is types.ModuleType and obj.__name__.split(".")[0] in ("torch", "math"):
            return Identity(obj)
        if _is_torch_function(obj):
            _refuse_impure(path, [getattr(obj, "__name__", "")])
            return Identity(obj)
        if kind.__module__ == "numpy":
            return _array(path, obj)
        if _is_closed_form(obj):
            return kind, tuple([(name, self._value(path, field)) for name, field in vars(obj).items()])
        raise Incomparable(f"{path} is a {kind.__qualname__}, of which any state may be read")

    def _class(self, path: str, cls: type) -> Any:
        """The key of a class that is called or compared with; only classes of Python and torch have one."""
        is_library = cls.__module__.split(".")[0] == "torch" or cls.__module__ == "builtins"
        if not is_library or cls is super or (cls.__flags__ & HEAP_TYPE and cls.__module__ == "builtins"):
            raise Incomparable(f"{path} is the class {cls.__qualname__}, of which any state may be read")
        return Identity(cls)

    def _builtin(self, path: str, obj: Any) -> Any:
        owner, name = obj.__self__, obj.__name__
        if owner is not None and not isinstance(owner, types.ModuleType):
            if isinstance(owner, torch.Tensor):
                _refuse_impure(path, [name])
            elif name in _EDITS:
                raise Incomparable(f"{path}() edits what the function reads, or reads what a text names")
            return "method", name, self._value(path, owner)
        if _is_torch_function(obj):
            _refuse_impure(path, [name])
        elif obj.__module__ not in _PURE_MODULES or name in _IMPURE_BUILTINS:
            raise Incomparable(f"{path} is {obj.__module__}.{name}(), which reads state of its own")
        return Identity(obj)

    # -- functions ---------------------------------------------------------------------------------------

    def _function(self, path: str, fn: types.FunctionType, owner: Any) -> Any:
        """The key of a function; owner: the object that its first argument is bound to, or None."""
        name = id(fn), id(owner)
        if (place := self._places.get(name)) is not None:
            return "function", place
        if str(fn.__globals__.get("__name__")).split(".")[0] == "torch":
            if owner is not None:
                raise Incomparable(f"{path} is a method of a {type(owner).__qualname__}")
            _refuse_impure(path, [fn.__name__])
            return self._torch_function(path, fn)
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
            if chain.kind == IMPORT:
                if chain.name.split(".")[0] not in ("torch", "math"):
                    raise Incomparable(f"the module {chain.name!r} is imported when the function runs")
                continue
            value = self._follow(chain, fn, owner)
            if value is _COMPUTED:
                continue
            if type(value) in (int, float) and (chain.kind != CELL or chain.steps):
                self.numbers.append(value)
            self._entries.append((chain.path, self._value(chain.path, value)))
        return "function", place

    def _torch_function(self, path: str, fn: types.FunctionType) -> Any:
        """The key of a function of torch: its identity, and the values in its closure that are not torch's:
        mask_mods that `and_masks` combines, the function that `torch.no_grad` decorates."""
        self._remember((id(fn), id(None)), (fn, None))
        for cell in fn.__closure__ or ():
            value = cell_value(cell)
            if not _is_of_torch(getattr(value, "__self__", value)):
                self._entries.append((path, self._value(path, value)))
        return Identity(fn)

    def _follow(self, chain: Chain, fn: types.FunctionType, owner: Any) -> Any:
        """The value at the end of a chain; _COMPUTED where a property or a tensor computes it."""
        value = root_of(chain, fn, owner)
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

    def _step(self, chain: Chain, obj: Any, step: str, name: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if step != ITEM and name in obj.__dict__:
                return obj.__dict__[name]
            if type(obj) not in _TENSORS:
                raise Incomparable(f"is an attribute of a {type(obj).__qualname__}")
            if step != ITEM:
                _refuse_impure("a tensor", [name])
            self._entries.append((chain.path, self._value(chain.path, obj)))  # its dtype, shape, a method
            return _COMPUTED
        value = item_of(obj, name) if step == ITEM else attribute_of(obj, name)
        if type(value) is Getter:
            self._entries.append((chain.path, self._function(chain.path, value.fn, value.owner)))
            return _COMPUTED
        return value


_CONSTRUCTORS = ("__init__", "__new__")  # of an enumeration


def root_of(chain: Chain, fn: types.FunctionType, owner: Any) -> Any:
    """Return the value of the variable that a chain begins at; ABSENT for an imported module."""
    if chain.kind == GLOBAL:
        value = fn.__globals__.get(chain.name, ABSENT)
        return getattr(builtins, chain.name, ABSENT) if value is ABSENT else value
    if chain.kind == ARGUMENT:
        return _COMPUTED if owner is None else owner
    if chain.kind == CELL:
        return cell_value((fn.__closure__ or ())[fn.__code__.co_freevars.index(chain.name)])
    return ABSENT


def _refuse_impure(path: str, names: Any) -> None:
    for name in sorted(names):
        if _IMPURE_TORCH.fullmatch(name):
            raise Incomparable(f"{path} calls {name}, which contents of tensors or settings decide")


def _is_torch_function(obj: Any) -> bool:
    """Whether a value is a function of torch without state, as `torch.tanh` or `torch.ops.aten.add`."""
    kind = type(obj)
    if kind is types.BuiltinFunctionType:
        place = obj.__module__
    else:
        place = kind.__module__ if callable(obj) and not hasattr(obj, "_modules") else None
        place = None if hasattr(obj, "__dict__") and place != "torch._ops" else place
    return isinstance(place, str) and place.split(".")[0] == "torch"


def _is_of_torch(obj: Any) -> bool:
    """Whether a value is a class of torch or an instance of one, but a tensor."""
    cls = obj if isinstance(obj, type) else type(obj)
    return cls.__module__.split(".")[0] == "torch" and not issubclass(cls, torch.Tensor)


def _is_closed_form(obj: Any) -> bool:
    """Whether a value is a mask of this package, whose methods read nothing but its fields."""
    return type(obj).__module__.split(".")[0] == "tritoncp" and hasattr(obj, "__dict__")


def _is_plain_enum(kind: type) -> bool:
    """Whether members of an enumeration hold nothing but their fields."""
    fields = [item for base in kind.__mro__ if base.__module__ != "enum" for item in vars(base).items()]
    return not any(
        type(field) is property
        or (type(field) is types.FunctionType and field.__module__ != "enum" and name not in _CONSTRUCTORS)
        for name, field in fields
    )


def _array(path: str, obj: Any) -> Any:
    """The key of NumPy's scalars, small arrays and functions."""
    kind = type(obj)
    if kind.__name__ == "ufunc":
        return Identity(obj)
    if hasattr(obj, "tobytes") and obj.size <= MAX_VALUES and not obj.dtype.hasobject:
        return kind, str(obj.dtype), obj.shape, obj.tobytes()
    raise Incomparable(f"{path} is a {kind.__qualname__}")
