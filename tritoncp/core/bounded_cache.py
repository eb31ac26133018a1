"""LRU caches of bounded size, a cache keyed by tensors, and per-object state that is freed with the
object."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch import Tensor

K = TypeVar("K")
V = TypeVar("V")
P = ParamSpec("P")


def computed_once(method: Callable[Concatenate[Any, P], V]) -> Callable[Concatenate[Any, P], V]:
    """Decorate a method to cache its results in the object, by arguments. It takes no lock: threads that run
    it at the same time compute equal results."""
    name = f"_{method.__name__}"

    @functools.wraps(method)
    def look_up(self: Any, *key: Any) -> Any:
        values = self.__dict__.get(name)
        if values is None:
            values = self.__dict__.setdefault(name, {})
        if (value := values.get(key)) is None:
            value = values[key] = method(self, *key)  # type: ignore[call-arg]
        return value

    return look_up  # type: ignore[return-value]


@dataclass(slots=True, eq=False)
class _Entry:
    """A cached value and the time of its last use."""

    value: Any
    used: int


class BoundedCache(Generic[K, V]):
    """An LRU cache of at most ``size`` entries. A look-up takes no lock and hashes the key once. Values are
    not None.

    weigh, max_weight: function for the weight of a value, and limit of the sum of weights; the newest entry
        is kept even if it is heavier

    >>> cache = BoundedCache(2)
    >>> for key in "aba":
    ...     _ = cache.get(key) or cache.put(key, key.upper())
    >>> cache.put("c", "C"), cache.values()
    ('C', ['A', 'C'])
    """

    def __init__(self, size: int, weigh: Callable[[V], int] | None = None, max_weight: int = 0) -> None:
        self.size, self.max_weight, self._weigh = size, max_weight, weigh
        self._entries: dict[K, _Entry] = {}
        self._clock = itertools.count()
        self._lock = threading.Lock()  # guards changes of _entries

    def get(self, key: K) -> V | None:
        """Return the value of a key and mark it as used; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = next(self._clock)
        return entry.value

    def put(self, key: K, value: V) -> V:
        """Store a value, evict values that were not used for the longest time, and return the value."""
        removed: list[Any] = []  # freed without the lock, since they may free others
        with self._lock:
            used = next(self._clock)
            removed.append(self._entries.pop(key, None))
            self._entries[key] = _Entry(value, used)
            while len(self._entries) > self.size or (len(self._entries) > 1 and self._is_too_heavy()):
                oldest = min(self._entries, key=lambda key: self._entries[key].used)
                removed.append(self._entries.pop(oldest))
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self.put(key, value)

    def _is_too_heavy(self) -> bool:
        return self._weigh is not None and sum(map(self._weigh, self.values())) > self.max_weight

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def values(self) -> list[V]:
        return [entry.value for entry in list(self._entries.values())]

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


class TensorCache(BoundedCache[Any, Any]):
    """A cache of values made from tensors. A look-up hits for the same tensor objects, unedited: they are
    compared by weak reference (an id may be reused) and by version counter. Values made from inference
    tensors, which do not count edits, are not kept."""

    def find(self, key: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the value of a key that was made from these tensors, None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        value, versions = entry.value
        for (ref, version), tensor in zip(versions, tensors):
            if ref() is not tensor or tensor._version != version:
                return None
        entry.used = next(self._clock)
        return value

    def keep(self, key: Any, tensors: Sequence[Tensor], value: Any) -> None:
        """Store a value with a key and the tensors from which it was made."""
        if not any(tensor.is_inference() for tensor in tensors):
            self.put(key, (value, [(weakref.ref(tensor), tensor._version) for tensor in tensors]))


class OwnedState(Generic[V]):
    """One value per owner object (or None). It is made at the first use and freed with the owner, so it must
    not refer to the owner. Owners are compared by identity, since a new process group may have the name of a
    destroyed one.

    >>> class Group: ...
    >>> state, group = OwnedState(list), Group()
    >>> state.of(group).append(1)
    >>> state.of(group), state.of(Group()), state.of(None)
    ([1], [], [])
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._values: weakref.WeakKeyDictionary[Any, V] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # guards changes of _values

    def of(self, owner: Any) -> V:
        """Return the value of an owner."""
        owner = self if owner is None else owner
        value = self._values.get(owner)
        if value is None:
            with self._lock:
                value = self._values.setdefault(owner, self._make())
        return value

    def values(self) -> list[V]:
        return list(self._values.values())

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._values.clear()
