"""What a Python function captures: found, compared, and replaced.

`Fingerprint` walks a function (code, closure cells, defaults, referenced globals, attributes of bound
objects, functools.partial, all of them recursively) and gives a hashable key: two calls with equal keys
trace to the same graph. Tensors enter the key by dtype, shape and requires_grad, never by identity.
`rebuild` makes the same function with other Python numbers in its closure, leaving the user's untouched.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_MOST_ITEMS = 16384
_ATOMS = (
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
)
_NUMBERS = (int, float, complex)
_THEMSELVES = (types.ModuleType, type, types.BuiltinFunctionType, enum.Enum, torch._ops.OpOverload)


class Incomparable(Exception):
    """Something captured cannot be compared with what it was at the last call."""


class Identity:
    """Hashable by identity, keeping its object alive, so that a freed id cannot come back as another."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.thing is self.thing


@functools.lru_cache(4096)
def code_names(code: types.CodeType) -> tuple[str, ...]:
    """Global and attribute names that a code object and the functions defined inside it may read, sorted."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(code_names(constant))
    return tuple(sorted(names))


@functools.lru_cache(4096)
def _slots(cls: Any) -> tuple[str, ...]:
    return tuple(name for base in cls.__mro__ for name in getattr(base, "__slots__", ()))


class Fingerprint:
    """`.key` is hashable, or None where something captured cannot be compared.

    `.tensors` are the captured tensors found, in walking order, each once.
    """

    __slots__ = ("_alive", "_items", "_seen", "key", "reason", "tensors")

    def __init__(self, fn: object) -> None:
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []
        self._items = 0
        self.key: Any = None
        self.reason = ""  # why there is no key
        try:
            self.key = self._of(fn)
        except Incomparable as error:
            self.reason = str(error)

    def _of(self, thing: Any) -> Any:
        self._items += 1
        if self._items > _MOST_ITEMS:
            raise Incomparable(f"more than {_MOST_ITEMS} captured values")
        kind = type(thing)
        if kind is torch.Tensor:  # the most frequent first
            return self._tensor(thing)
        if kind is not types.FunctionType:  # and the next
            if isinstance(thing, _ATOMS):
                return (kind, thing)
            if isinstance(thing, _NUMBERS) and not isinstance(thing, enum.Enum):
                return (kind.__name__, repr(thing))
            if isinstance(thing, torch.Tensor):
                return self._tensor(thing)
            if isinstance(thing, _THEMSELVES):
                return Identity(thing)
        if id(thing) in self._seen:
            return ("again", self._seen[id(thing)])
        self._seen[id(thing)] = len(self._seen)
        self._alive.append(thing)
        return self._function(thing) if kind is types.FunctionType else self._compound(thing)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        place = 0
        for known in self.tensors:
            if known is tensor:
                break
            place += 1
        else:
            self.tensors.append(tensor)
        facts = tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device
        return ("tensor", place, type(tensor), *facts)

    def _compound(self, thing: Any) -> Any:
        if isinstance(thing, types.MethodType):
            return ("method", self._of(thing.__func__), self._of(thing.__self__))
        if isinstance(thing, functools.partial):
            return ("partial", self._of(thing.func), self._of(thing.args), self._of(thing.keywords))
        if isinstance(thing, (tuple, list)):
            return (type(thing), tuple(self._of(item) for item in thing))
        if isinstance(thing, dict):
            return (type(thing), tuple((self._of(name), self._of(value)) for name, value in thing.items()))
        if isinstance(thing, (set, frozenset)):
            return (type(thing), frozenset(self._of(item) for item in thing))
        if (
            callable(thing)
            and getattr(type(thing), "__module__", "").startswith("torch.")
            and not hasattr(thing, "__dict__")
        ):
            return Identity(thing)
        return self._object(thing)

    def _object(self, thing: Any) -> Any:
        slots = _slots(type(thing))  # type: ignore[arg-type]
        if not hasattr(thing, "__dict__") and not slots:
            raise Incomparable(f"a captured {type(thing).__qualname__}")
        fields = dict(getattr(thing, "__dict__", {}))
        fields.update({name: getattr(thing, name) for name in slots if hasattr(thing, name)})
        call = getattr(type(thing), "__call__", None)  # noqa: B004 - the function itself is wanted
        code = self._of(call) if isinstance(call, types.FunctionType) else None
        return (type(thing), code, tuple((name, self._of(value)) for name, value in fields.items()))

    def _function(self, fn: types.FunctionType) -> Any:
        names = code_names(fn.__code__)
        cells = tuple([self._of(_cell(cell)) for cell in fn.__closure__ or ()])
        given = fn.__defaults__, fn.__kwdefaults__
        defaults = None if given == (None, None) else tuple(map(self._of, given))
        return (fn.__code__, defaults, cells, tuple(self._globals(names, fn.__globals__)))

    def _globals(self, names: Sequence[str], scope: dict[str, Any]) -> Iterator[Any]:
        for name in names:
            if name not in scope:
                continue
            value = scope[name]
            if isinstance(value, types.FunctionType) and (value.__module__ or "").split(".")[0] == "torch":
                yield name, Identity(value)
                continue
            yield name, self._of(value)
            if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] not in ("torch", "math"):
                yield from self._attributes(names, value)

    def _attributes(self, names: Sequence[str], module: types.ModuleType) -> Iterator[Any]:
        for name in names:
            if name in vars(module):
                yield module.__name__, name, self._of(vars(module)[name])


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the variable is not bound yet
        return None


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
    """file:line of a function's definition, or what there is to say of something else callable."""
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
