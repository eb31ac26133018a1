"""Python's attribute and item lookup without running user code.

Where code of the user would decide (``__getattr__``, descriptors), `Incomparable` is raised; of a property,
the function is returned.
"""

from __future__ import annotations

import enum
import types
import weakref
from typing import Any, NamedTuple

import torch


class Incomparable(Exception):
    """Raised for state of a function that cannot be compared between calls."""


class _Absent:
    """The value of an attribute that does not exist."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


class Getter(NamedTuple):
    """The function of a property, and the object whose attribute it computes."""

    fn: Any
    owner: Any


MODULE_TABLES = ("_parameters", "_buffers", "_modules")
HEAP_TYPE = 1 << 9  # of a class's __flags__; not set for static types, which are written in C


def in_class(cls: type, name: str) -> Any:
    """The attribute in the dictionary of the first class of the MRO that has it, not bound; or ABSENT."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return ABSENT


def fields_of(obj: Any) -> dict[str, Any]:
    """The attributes that an object holds, in slots and in its dictionary."""
    slots = [base.__dict__.get("__slots__", ()) for base in type(obj).__mro__]
    names = [name for group in slots for name in ((group,) if isinstance(group, str) else group)]
    own = ("__dict__", "__weakref__")
    held = {name: getattr(obj, name) for name in names if name not in own and hasattr(obj, name)}
    return {**held, **getattr(obj, "__dict__", {})}


def attribute_of(obj: Any, name: str) -> Any:
    """The value of ``obj.name``, ABSENT, or the Getter of a property.

    Raises Incomparable where other code of the user computes it.

    >>> class Point:
    ...     x = 3
    ...     double = property(lambda self: 2 * self.x)
    >>> attribute_of(Point(), "x"), attribute_of(Point(), "y"), type(attribute_of(Point(), "double")).__name__
    (3, absent, 'Getter')
    """
    kind = type(obj)
    if isinstance(obj, enum.EnumMeta) and name in obj.__members__:
        return obj.__members__[name]
    if isinstance(obj, enum.Enum) and name in ("value", "name") and not _is_overridden(kind, name):
        return getattr(obj, name)
    if kind in weakref.ProxyTypes or type(in_class(kind, "__getattribute__")) is types.FunctionType:
        raise Incomparable(f"is read by the __getattribute__ of {kind.__qualname__}")
    in_type = in_class(kind, name)
    is_data = any(in_class(type(in_type), part) is not ABSENT for part in ("__set__", "__delete__"))
    own = in_class(obj, name) if isinstance(obj, type) else getattr(obj, "__dict__", {}).get(name, ABSENT)
    if own is not ABSENT and not is_data and not isinstance(obj, type):
        return own
    raw = in_type if own is ABSENT or is_data else own
    if isinstance(raw, property):
        if type(raw) is property and raw is in_type and type(raw.fget) is types.FunctionType:
            return Getter(raw.fget, obj)
        raise Incomparable(f"is computed by a {type(raw).__qualname__}")
    if type(in_class(type(raw), "__get__")) is types.FunctionType:
        raise Incomparable(f"is computed by a {type(raw).__qualname__}")
    if raw is ABSENT and getattr(kind, "__getattr__", None) is torch.nn.Module.__getattr__:
        for table in MODULE_TABLES:
            if name in vars(obj)[table]:
                return vars(obj)[table][name]
    fallback = vars(obj).get("__getattr__") if isinstance(obj, types.ModuleType) else None
    fallback = fallback or getattr(kind, "__getattr__", None)
    if raw is ABSENT and fallback not in (None, torch.nn.Module.__getattr__):
        raise Incomparable(f"is read by the __getattr__ of {getattr(obj, '__name__', kind.__qualname__)}")
    return getattr(obj, name, ABSENT)


def item_of(obj: Any, key: Any) -> Any:
    """The value of ``obj[key]``, or ABSENT.

    Raises Incomparable for other types than dictionaries, lists, tuples and containers of nn.Modules, and for
    subclasses of these with a `__getitem__` of their own.
    """
    kind = type(obj)
    subscript = in_class(kind, "__getitem__")
    if isinstance(obj, dict | list | tuple) and not isinstance(subscript, types.FunctionType):
        keys = obj if isinstance(obj, dict) else range(-len(obj), len(obj)) if isinstance(key, int) else ()
        if key not in keys:
            if in_class(kind, "__missing__") is not ABSENT:
                raise Incomparable(f"has no {key!r}, which the __missing__ of {kind.__qualname__} computes")
            return ABSENT
        return obj[key]
    if subscript in _MODULE_SUBSCRIPTS and isinstance(key, int | str):
        return obj._modules.get(str(key), ABSENT)
    raise Incomparable(f"is subscripted as a {kind.__qualname__}")


_MODULE_SUBSCRIPTS = (
    torch.nn.ModuleList.__getitem__, torch.nn.Sequential.__getitem__, torch.nn.ModuleDict.__getitem__,
)  # fmt: skip


def _is_overridden(kind: type, name: str) -> bool:
    return any(name in base.__dict__ for base in kind.__mro__ if base.__module__ != "enum")
