"""Records: immutable objects with named fields that other libraries leave whole.

Libraries rebuild every dataclass that they find among the arguments of a module or in a batch, to cast or to
move its tensors: FSDP with mixed precision, Lightning, `dataclasses.asdict`. A rebuilt mask or plan would
lose its caches, and would be another mask if a captured tensor was cast. A record is a frozen dataclass
without the attribute by which they recognise dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
def record(*, eq: bool = False, repr: bool = True) -> Callable[[type[T]], type[T]]:
    """Decorate a class as a frozen dataclass that other libraries do not recognise as one.

    >>> @record()
    ... class Window:
    ...     left: int
    ...     right: int = 0
    >>> dataclasses.is_dataclass(Window), replace(Window(3), right=1), fields_of(Window(3))
    (False, Window(left=3, right=1), ('left', 'right'))
    """

    def decorate(cls: type[T]) -> type[T]:
        made: Any = dataclasses.dataclass(frozen=True, eq=eq, repr=repr)(cls)
        made.__record_fields__ = tuple(item.name for item in dataclasses.fields(made) if item.init)
        made.__replace__ = replace  # for copy.replace
        del made.__dataclass_fields__, made.__dataclass_params__
        return made

    return decorate


def fields_of(thing: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a record or dataclass; () for other objects."""
    names: tuple[str, ...] | None = getattr(type(thing), "__record_fields__", None)
    if names is None and dataclasses.is_dataclass(thing):
        return tuple(item.name for item in dataclasses.fields(thing) if item.init)
    return names or ()


def replace(thing: T, /, **changes: Any) -> T:
    """Copy a record or dataclass with other values of some fields."""
    values = {name: getattr(thing, name) for name in fields_of(thing)}
    return type(thing)(**(values | changes))
