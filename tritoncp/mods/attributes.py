"""Python's attribute and item lookup without running user code.

`attribute_of` follows the language's rules for plain objects, modules and classes: data descriptors, the
instance's dictionary, its class along the MRO. Where code decides instead (``__getattr__``, descriptors),
there is no answer: `Incomparable` says so.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
from typing import Any, NamedTuple

import torch


class Incomparable(Exception):
    """State that a function reads cannot be compared between calls."""


class _Absent:
    """The value of an attribute that does not exist."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


class Getter(NamedTuple):
    """The function of a property, and the object that it computes the attribute of."""

    fn: Any
    owner: Any


_MODULES_OF_A_MODULE = ("_parameters", "_buffers", "_modules")
_FIELD_OF_A_NAMED_TUPLE = type(collections.namedtuple("Pair", "field").__dict__["field"])
_WRITTEN_IN_C = (
    types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, _FIELD_OF_A_NAMED_TUPLE,
)  # fmt: skip


def in_class(cls: type, name: str) -> Any:
    """The attribute as it stands in the dictionary of the first class of the MRO that has it."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return ABSENT


# `__getattribute__` of types that look attributes up as objects do; proxies, say, do otherwise.
_USUAL_LOOKUPS = {
    in_class(kind, "__getattribute__")
    for kind in (
        object, type, dict, list, tuple, set, frozenset, str, bytes, int, float, complex, property,
        collections.deque, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace,
        types.FunctionType,
        types.MethodType, types.BuiltinFunctionType, functools.partial,
    )
}  # fmt: skip


def attribute_of(thing: Any, name: str) -> Any:
    """The value of ``thing.name``, ABSENT, or the Getter of a property. Raises Incomparable where other code
    decides.

    >>> class Point:
    ...     x = 3
    ...     double = property(lambda self: 2 * self.x)
    >>> attribute_of(Point(), "x"), attribute_of(Point(), "y"), type(attribute_of(Point(), "double")).__name__
    (3, absent, 'Getter')
    """
    kind = type(thing)
    if isinstance(thing, types.ModuleType):
        return _of_module(thing, name)
    if isinstance(thing, enum.EnumMeta) and name in thing.__members__:
        return thing.__members__[name]
    if isinstance(thing, enum.Enum) and name in ("value", "name") and not _is_overridden(kind, name):
        return thing._value_ if name == "value" else thing._name_
    if in_class(kind, "__getattribute__") not in _USUAL_LOOKUPS:
        raise Incomparable(f"is read by the __getattribute__ of {kind.__qualname__}")
    described = in_class(kind, name)
    if described is not ABSENT and _has(described, "__get__") and _is_data_descriptor(described):
        return _bind(described, thing, kind, name)
    own = in_class(thing, name) if isinstance(thing, type) else _of_instance(thing, name)
    if own is not ABSENT:
        return _bind(own, None, thing, name) if isinstance(thing, type) else own
    if described is not ABSENT:
        return _bind(described, thing, kind, name)
    if in_class(kind, "__getattr__") not in (ABSENT, torch.nn.Module.__getattr__):
        raise Incomparable(f"is read by the __getattr__ of {kind.__qualname__}")
    return ABSENT


def item_of(thing: Any, key: Any) -> Any:
    """``thing[key]``, or ABSENT. Raises Incomparable for all but dictionaries, lists, tuples and containers
    of nn.Modules, whose class leaves subscripts as they are."""
    kind = type(thing)
    subscript = in_class(kind, "__getitem__")
    if isinstance(thing, dict | list | tuple) and not isinstance(subscript, types.FunctionType):
        if key not in thing if isinstance(thing, dict) else not _is_within(thing, key):
            if in_class(kind, "__missing__") is not ABSENT:
                raise Incomparable(f"has no {key!r}, which the __missing__ of {kind.__qualname__} computes")
            return ABSENT
        return thing[key]
    if subscript in _SUBSCRIPTS_OF_MODULES and isinstance(key, int | str):
        return thing._modules.get(str(key), ABSENT)
    raise Incomparable(f"is subscripted as a {kind.__qualname__}")


_SUBSCRIPTS_OF_MODULES = (
    torch.nn.ModuleList.__getitem__, torch.nn.Sequential.__getitem__, torch.nn.ModuleDict.__getitem__,
)  # fmt: skip


def _of_module(module: types.ModuleType, name: str) -> Any:
    if type(module) is not types.ModuleType:
        raise Incomparable(f"is an attribute of a {type(module).__qualname__}")
    fields = vars(module)
    if name not in fields and ("__getattr__" in fields or hasattr(types.ModuleType, name)):
        raise Incomparable(f"is computed by the module {module.__name__}")
    return fields.get(name, ABSENT)


def _of_instance(thing: Any, name: str) -> Any:
    fields = getattr(thing, "__dict__", None)
    if fields is None:
        return ABSENT
    if name not in fields and isinstance(thing, torch.nn.Module):
        fields = next((f for s in _MODULES_OF_A_MODULE if name in (f := fields.get(s, ()))), fields)
    return fields.get(name, ABSENT)


def _bind(raw: Any, thing: Any, cls: type, name: str) -> Any:
    """A class's attribute as read from an instance, or (thing is None) from the class."""
    kind = type(raw)
    if kind is types.FunctionType:
        return raw if thing is None else types.MethodType(raw, thing)
    if kind is staticmethod:
        return raw.__func__
    if kind is classmethod and type(raw.__func__) is types.FunctionType:
        return types.MethodType(raw.__func__, cls)
    if kind is property and thing is not None and type(raw.fget) is types.FunctionType:
        return Getter(raw.fget, thing)
    if kind is functools.partialmethod and thing is not None and type(raw.func) is types.FunctionType:
        return functools.partial(types.MethodType(raw.func, thing), *raw.args, **raw.keywords)
    if not _has(raw, "__get__"):
        return raw
    if kind not in _WRITTEN_IN_C:
        raise Incomparable(f"is computed by a {kind.__qualname__}")
    try:
        return getattr(cls if thing is None else thing, name)
    except AttributeError:
        return ABSENT


def _has(raw: Any, name: str) -> bool:
    return in_class(type(raw), name) is not ABSENT


def _is_data_descriptor(raw: Any) -> bool:
    return _has(raw, "__set__") or _has(raw, "__delete__")


def _is_overridden(kind: type, name: str) -> bool:
    return any(name in base.__dict__ for base in kind.__mro__ if base.__module__ != "enum")


def _is_within(thing: Any, index: Any) -> bool:
    return isinstance(index, int) and -len(thing) <= index < len(thing)
