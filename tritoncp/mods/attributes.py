"""Python's attribute and item lookup without running user code.

`attribute_of` follows the language's rules for plain objects, modules and classes: data descriptors, the
instance's dictionary, its class along the MRO. Where code decides instead (``__getattr__``, descriptors), it
raises `Incomparable`.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
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
_NAMED_TUPLE_FIELD = type(collections.namedtuple("Pair", "field").__dict__["field"])
_C_DESCRIPTORS = (
    types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, _NAMED_TUPLE_FIELD,
)  # fmt: skip


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


# `__getattribute__` of types that look attributes up by Python's rules; that of a proxy does not.
_STANDARD_LOOKUPS = {
    in_class(kind, "__getattribute__")
    for kind in (
        object, type, dict, list, tuple, set, frozenset, str, bytes, int, float, complex, property,
        collections.deque, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace,
        types.FunctionType,
        types.MethodType, types.BuiltinFunctionType, functools.partial,
    )
}  # fmt: skip


def attribute_of(obj: Any, name: str) -> Any:
    """The value of ``obj.name``, ABSENT, or the Getter of a property.

    Raises Incomparable where user code computes it.

    >>> class Point:
    ...     x = 3
    ...     double = property(lambda self: 2 * self.x)
    >>> attribute_of(Point(), "x"), attribute_of(Point(), "y"), type(attribute_of(Point(), "double")).__name__
    (3, absent, 'Getter')
    """
    kind = type(obj)
    if isinstance(obj, types.ModuleType):
        return _module_attribute(obj, name)
    if isinstance(obj, enum.EnumMeta) and name in obj.__members__:
        return obj.__members__[name]
    if isinstance(obj, enum.Enum) and name in ("value", "name") and not _is_overridden(kind, name):
        return obj._value_ if name == "value" else obj._name_
    if in_class(kind, "__getattribute__") not in _STANDARD_LOOKUPS:
        raise Incomparable(f"is read by the __getattribute__ of {kind.__qualname__}")
    class_attr = in_class(kind, name)
    if class_attr is not ABSENT and _type_defines(class_attr, "__get__") and _is_data_descriptor(class_attr):
        return _bind(class_attr, obj, kind, name)
    instance_attr = in_class(obj, name) if isinstance(obj, type) else _instance_attribute(obj, name)
    if instance_attr is not ABSENT:
        return _bind(instance_attr, None, obj, name) if isinstance(obj, type) else instance_attr
    if class_attr is not ABSENT:
        return _bind(class_attr, obj, kind, name)
    if in_class(kind, "__getattr__") not in (ABSENT, torch.nn.Module.__getattr__):
        raise Incomparable(f"is read by the __getattr__ of {kind.__qualname__}")
    return ABSENT


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


def _module_attribute(module: types.ModuleType, name: str) -> Any:
    if type(module) is not types.ModuleType:
        raise Incomparable(f"is an attribute of a {type(module).__qualname__}")
    fields = vars(module)
    if name not in fields and ("__getattr__" in fields or hasattr(types.ModuleType, name)):
        raise Incomparable(f"is computed by the module {module.__name__}")
    return fields.get(name, ABSENT)


def _instance_attribute(obj: Any, name: str) -> Any:
    fields = getattr(obj, "__dict__", None)
    if fields is None:
        return ABSENT
    if name not in fields and isinstance(obj, torch.nn.Module):
        fields = next((f for s in MODULE_TABLES if name in (f := fields.get(s, ()))), fields)
    return fields.get(name, ABSENT)


def _bind(raw: Any, obj: Any, cls: type, name: str) -> Any:
    """A class's attribute as read from an instance, or from the class where obj is None."""
    kind = type(raw)
    if kind is types.FunctionType:
        return raw if obj is None else types.MethodType(raw, obj)
    if kind is staticmethod:
        return raw.__func__
    if kind is classmethod and type(raw.__func__) is types.FunctionType:
        return types.MethodType(raw.__func__, cls)
    if kind is property and obj is not None and type(raw.fget) is types.FunctionType:
        return Getter(raw.fget, obj)
    if not _type_defines(raw, "__get__"):
        return raw
    if kind not in _C_DESCRIPTORS:
        raise Incomparable(f"is computed by a {kind.__qualname__}")
    try:
        return getattr(cls if obj is None else obj, name)
    except AttributeError:
        return ABSENT


def _type_defines(raw: Any, name: str) -> bool:
    return in_class(type(raw), name) is not ABSENT


def _is_data_descriptor(raw: Any) -> bool:
    return _type_defines(raw, "__set__") or _type_defines(raw, "__delete__")


def _is_overridden(kind: type, name: str) -> bool:
    return any(name in base.__dict__ for base in kind.__mro__ if base.__module__ != "enum")
