"""Python's attribute and item lookup without running user code.

`attribute_of` follows the language's rules (data descriptors, instance dictionary, class along the MRO,
``__getattr__``) and returns the value; where a function written in Python would compute it, that function.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

# Packages whose classes' own methods read no state but their instance's fields.
_LIBRARIES = frozenset({"torch", "tritoncp", "enum", "abc", "typing", "builtins"})
SEQUENCES = (tuple, list, deque)  # torch.Size is a tuple
CONTAINERS = frozenset({*SEQUENCES, torch.Size, dict, set, frozenset, types.MappingProxyType})
PLAIN_BASES = CONTAINERS | {
    object, int, float, complex, str, bytes, types.SimpleNamespace, OrderedDict, defaultdict, enum.Enum,
}  # fmt: skip


DESCRIPTORS = (
    property, functools.cached_property, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip


class _Absent:
    """The value of an attribute that does not exist."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


class Getter(NamedTuple):
    """A function that computes an attribute.

    owner: the object that its first argument is bound to, None where there is none
    touches: further objects that it gets hold of
    """

    fn: Any
    owner: Any
    touches: tuple[Any, ...] = ()


def attribute_of(thing: Any, name: str) -> Any:
    """The value of ``thing.name``, ABSENT, or the Getter that computes it.

    >>> class Point:
    ...     x = 3
    ...     double = property(lambda self: 2 * self.x)
    >>> attribute_of(Point(), "x"), attribute_of(Point(), "y"), type(attribute_of(Point(), "double")).__name__
    (3, absent, 'Getter')
    """
    if isinstance(thing, types.ModuleType):
        return _of_module(thing, name)
    if isinstance(thing, enum.EnumMeta) and name in thing.__members__:
        return thing.__members__[name]
    if isinstance(thing, enum.Enum) and name in ("value", "name"):
        return thing._value_ if name == "value" else thing._name_
    kind = type(thing)
    custom = in_class(kind, "__getattribute__")
    if isinstance(custom, types.FunctionType) and not _is_library(custom.__module__):
        return Getter(custom, thing)
    described = in_class(kind, name)
    if described is not ABSENT and _is_data_descriptor(described):
        return bind(described, thing, kind, name)
    if isinstance(thing, type):
        own = in_class(thing, name)
        if own is not ABSENT:
            return bind(own, None, thing, name)
    elif (own := _of_instance(thing, name)) is not ABSENT:
        return own
    if described is not ABSENT:
        return bind(described, thing, kind, name)
    fallback = in_class(kind, "__getattr__")
    if isinstance(fallback, types.FunctionType) and not _is_library(fallback.__module__):
        return Getter(fallback, thing)
    return ABSENT


def definitions_of(thing: Any, name: str) -> Iterator[Any]:
    """Every value or Getter of ``thing.name``; super() reads those of later classes of the MRO too."""
    value = attribute_of(thing, name)
    if value is not ABSENT:
        yield value
    if isinstance(thing, types.ModuleType):
        return
    own = isinstance(thing, type)
    for cls in (thing if own else type(thing)).__mro__[1:]:
        if name in vars(cls) and not is_library_class(cls):
            yield bind(vars(cls)[name], None if own else thing, cls, name)


def item_of(thing: Any, key: Any) -> Any:
    """``thing[key]`` of a dictionary, list or tuple whose class does not redefine subscripts; else ABSENT."""
    base: Any
    for base in (dict, list, tuple):
        if isinstance(thing, base):
            if isinstance(type(thing).__getitem__, types.FunctionType):
                return ABSENT
            try:
                return base.__getitem__(thing, key)
            except (KeyError, IndexError, TypeError):  # `__missing__`, or an error in the function
                return ABSENT
    return ABSENT


def bind(raw: Any, thing: Any, cls: type, name: str) -> Any:
    """A class's attribute as read from an instance, or (thing is None) from the class."""
    if isinstance(raw, types.FunctionType):
        return raw if thing is None else types.MethodType(raw, thing)
    if isinstance(raw, staticmethod):
        return raw.__func__
    if isinstance(raw, classmethod):
        return types.MethodType(raw.__func__, cls)
    if isinstance(raw, property | functools.cached_property):
        return raw if thing is None else Getter(raw.fget if isinstance(raw, property) else raw.func, thing)
    getter = in_class(type(raw), "__get__")
    if getter is ABSENT:
        return raw
    if isinstance(getter, types.FunctionType):
        return Getter(getter, raw, (cls if thing is None else thing,))
    try:  # a descriptor written in C: a slot, a field of a named tuple, a method of a built-in type
        return getattr(cls if thing is None else thing, name)
    except AttributeError:
        return ABSENT


def in_class(cls: type, name: str) -> Any:
    """The attribute as it stands in the dictionary of the first class of the MRO that has it."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return ABSENT


def implicit_methods(thing: Any) -> Iterator[tuple[str, types.FunctionType, Any]]:
    """(name, function, object it is bound to) of each special method that operators and calls run."""
    if isinstance(thing, types.ModuleType):
        return
    for cls in type(thing).__mro__:
        for name, value in () if is_library_class(cls) else vars(cls).items():
            if _is_special(name) and name not in _NOT_IMPLICIT and isinstance(value, types.FunctionType):
                yield name, value, thing
    if isinstance(thing, type):  # it may be called
        for cls in thing.__mro__:
            for name, value in () if is_library_class(cls) else vars(cls).items():
                if _is_special(name) and isinstance(value, types.FunctionType):
                    yield name, value, None


def has_hidden_state(kind: type) -> bool:
    """Whether objects of this type keep state that is no attribute and no item, as types written in C do."""
    return any(map(_is_opaque_base, kind.__mro__))


def _is_opaque_base(base: type) -> bool:
    if base in PLAIN_BASES:
        return False
    heap_type = 1 << 9
    if not base.__flags__ & heap_type or "__module__" not in vars(base):
        return True
    # A class written in Python adds a dictionary, a list of weak references and its slots.
    pointers = 2 + len(vars(base).get("__slots__", ()))
    largest = max((b.__basicsize__ for b in base.__bases__), default=0)
    return base.__basicsize__ > largest + 8 * pointers


def is_library_class(cls: type) -> bool:
    """Whether a class belongs to torch, this package or the standard library's own machinery."""
    return _is_library(cls.__module__)


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES


def _of_module(module: types.ModuleType, name: str) -> Any:
    value = vars(module).get(name, ABSENT)
    fallback = vars(module).get("__getattr__")
    if value is ABSENT and isinstance(fallback, types.FunctionType) and not _is_library(fallback.__module__):
        return Getter(fallback, None)
    return value


def _of_instance(thing: Any, name: str) -> Any:
    fields = getattr(thing, "__dict__", None)
    if fields is None:
        return ABSENT
    if name not in fields and isinstance(thing, torch.nn.Module):
        fields = next((f for s in _STORES if name in (f := fields.get(s, ()))), fields)
    return fields.get(name, ABSENT)


_STORES = ("_parameters", "_buffers", "_modules")  # of an nn.Module, whose __getattr__ looks there
# Special methods that no operator, call, subscript or attribute of an existing object runs.
_NOT_IMPLICIT = frozenset(
    {
        "__init__", "__new__", "__del__", "__repr__", "__reduce__", "__reduce_ex__", "__getstate__",
        "__dir__",
        "__setstate__", "__init_subclass__", "__class_getitem__", "__set_name__", "__sizeof__", "__replace__",
    }
)  # fmt: skip


def _is_data_descriptor(raw: Any) -> bool:
    return in_class(type(raw), "__set__") is not ABSENT or in_class(type(raw), "__delete__") is not ABSENT


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_torch(thing: Any) -> bool:
    """Whether a function, class, module or object is torch's own."""
    if isinstance(thing, types.ModuleType):
        place = thing.__name__
    else:
        place = getattr(thing, "__module__", None) or type(thing).__module__
    return isinstance(place, str) and place.split(".")[0] == "torch"


def is_of_torch(cls: type, name: str) -> bool:
    """Whether torch's own classes define this attribute of a tensor, or none does."""
    return next((is_library_class(base) for base in cls.__mro__ if name in vars(base)), True)
