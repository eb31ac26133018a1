"""Places: where a class or function is defined, as text that another process can look up.

A place is ``module:path``, or ``module:path#digest`` for code of users: the digest of its bytecode tells an
edited function from the original. A function made inside another one is found by the code of the outer one. A
place is looked up in loaded modules; nothing is imported.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

from tritoncp.mods.captures import ABSENT
from tritoncp.mods.user_code import describe, origin

_KNOWN = ("torch", "tritoncp", "builtins")  # packages whose version identifies the code of their classes


def stable(key: Any) -> Any:
    """Drop addresses and device indices, which differ between processes, from a key such as a
    fingerprint's."""
    if isinstance(key, types.CodeType):
        shape = key.co_argcount, key.co_kwonlyargcount, key.co_flags, key.co_exceptiontable.hex()
        return key.co_name, shape, key.co_code.hex(), key.co_names, stable(key.co_consts)
    if hasattr(key, "index") and type(key).__name__ == "device":
        return key.type
    if callable(key) or isinstance(key, types.ModuleType):
        name = getattr(key, "__qualname__", getattr(key, "__name__", type(key).__qualname__))
        return getattr(key, "__module__", ""), name
    if isinstance(key, frozenset):
        return sorted(map(repr, map(stable, key)))
    if isinstance(key, tuple):
        return tuple(map(stable, key))
    return repr(key)


def digest_of(*codes: types.CodeType) -> str:
    """Digest bytecode, without file names and lines."""
    return hashlib.sha256(repr(stable(codes)).encode()).hexdigest()[:16]


def place_of(thing: Any) -> str | None:
    """Return the place of a class, module, enum member, dtype, torch op or named function; None for any other
    object.

    >>> import torch
    >>> [place_of(x) for x in (torch.float32, torch.nn.Linear, torch.ops.aten.sin.default, lambda: 0)]
    ['torch:float32', 'torch.nn.modules.linear:Linear', 'torch:ops.aten.sin.default', None]
    """
    kind = type(thing)
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    last = getattr(thing, "__name__", str(thing).removeprefix("torch."))  # the name of a dtype, "float32"
    candidates = [f"{module}:{name}", f"torch:{last}", f"torch:nn.functional.{last}"]
    candidates += [f"types:{key}" for key, value in vars(types).items() if value is thing]
    if isinstance(thing, types.ModuleType):
        candidates = [f"{thing.__name__}:"]
    elif isinstance(thing, enum.Enum):
        candidates = [f"{kind.__module__}:{kind.__qualname__}.{thing.name}"]
    elif kind.__module__ == "torch._ops":
        candidates = [f"torch:ops.{thing}"]
    place = next((place for place in candidates if _look_up(place) is thing), None)
    return place if place is None or not isinstance(thing, type) else place + _digest_of_class(thing)


def place_of_code(code: types.CodeType, scope: dict[str, Any]) -> str | None:
    """Return the place of the code of a function with the globals ``scope``; None if no loaded module has
    it."""
    place = f"{scope.get('__name__')}:{code.co_qualname}#{digest_of(code)}"
    found = find_code(place)
    return place if found is not None and found[1] is scope else None


def find(place: str) -> Any:
    """Return the object of a place; ABSENT if this process does not have it, or has a different class of that
    name."""
    path, _, digest = place.partition("#")
    thing = _look_up(path)
    return thing if not digest or _digest_of_class(thing) == f"#{digest}" else ABSENT


def find_code(place: str) -> tuple[types.CodeType, dict[str, Any]] | None:
    """Return the code at a function's place and the globals of its module; None if this process does not have
    it."""
    name, _, path = place.partition(":")
    qualname, _, digest = path.rpartition("#")
    module = sys.modules.get(name)
    for code in () if module is None else _codes(vars(module)):
        if code.co_qualname == qualname and digest_of(code) == digest:
            return code, vars(module)
    return None


def check_pickles(fn: Any) -> None:
    """Raise PicklingError for a function that pickle cannot name, unless the running pickler copies
    functions, like cloudpickle."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not isinstance(fn, types.FunctionType) or _look_up(f"{fn.__module__}:{fn.__qualname__}") is fn:
        return
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if any(map(_copies_functions, frame.f_locals.values())):
            return
        frame = frame.f_back
    raise pickle.PicklingError(
        f"the mask_mod {describe(fn)} ({origin(fn)}) cannot be pickled, as no other process can import it by "
        "name: define it with def at the top of a module; or make the mask of closed forms, as causal() & "
        "document(...); or make it in the process that needs it"
    )


def _copies_functions(pickler: Any) -> bool:
    """Return whether an object is a pickler that does not pickle functions by name."""
    if not isinstance(pickler, pickle.Pickler | pickle._Pickler):
        return False
    table = getattr(pickler, "dispatch", {})
    by_name = table.get(types.FunctionType) in (None, pickle._Pickler.dispatch[types.FunctionType])
    return hasattr(pickler, "reducer_override") or not by_name


def _look_up(place: str) -> Any:
    name, _, path = place.partition(":")
    thing: Any = sys.modules.get(name, ABSENT)
    for part in filter(None, path.split(".")):
        thing = getattr(thing, part, ABSENT)
    return thing


def _digest_of_class(cls: Any) -> str:
    """Return "#" and the digest of the methods of a user's class; "" for any other object."""
    bases = [base for base in getattr(cls, "__mro__", ()) if base.__module__.split(".")[0] not in _KNOWN]
    codes = [fn.__code__ for base in bases for value in vars(base).values() for fn in _functions_of(value)]
    return f"#{digest_of(*codes)}" if codes else ""


def _codes(scope: dict[str, Any]) -> Iterator[types.CodeType]:
    """List the code of the functions of a module, of methods of its classes, and of functions within them."""
    values = list(scope.values())
    for value in values:
        if isinstance(value, type) and value.__module__ == scope.get("__name__"):
            values.extend(vars(value).values())
    codes = [fn.__code__ for value in values for fn in _functions_of(value) if fn.__globals__ is scope]
    for code in codes:
        yield code
        codes.extend(part for part in code.co_consts if isinstance(part, types.CodeType))


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """List a function, the functions that it wraps as a decorator, and the functions of a property or static
    method."""
    if isinstance(value, property):
        parts: list[Any] = [value.fget, value.fset]
    else:
        parts = [value.__func__ if isinstance(value, staticmethod | classmethod) else value]
    for part in parts:
        if isinstance(part, types.FunctionType):
            yield part
            parts.append(vars(part).get("__wrapped__"))
