"""State that belongs to objects of other layers, and is freed with them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class OwnedState(Generic[V]):
    """State that belongs to objects, one value for each owner: made at its first use, freed with the owner. A
    value must not refer to its owner.

    >>> class Group: ...
    >>> state, group = OwnedState(list), Group()
    >>> state.of(group).append(1)
    >>> state.of(group), state.of(Group())
    ([1], [])
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._values: weakref.WeakKeyDictionary[Any, V] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # guards changes of _values

    def of(self, owner: Any) -> V:
        """Return the value of an owner."""
        value = self._values.get(owner)
        if value is None:
            with self._lock:
                value = self._values.setdefault(owner, self._make())
        return value

    def values(self) -> list[V]:
        return list(self._values.values())
