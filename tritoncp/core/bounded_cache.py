"""Caches of bounded size, with one rule of eviction."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Entry(Generic[V]):
    """A cached value and the time of its last use."""

    __slots__ = ("used", "value")

    def __init__(self, value: V, used: int) -> None:
        self.value, self.used = value, used


class BoundedCache(Generic[K, V]):
    """A cache of at most ``size`` entries, of which the least recently used are evicted. A look-up takes no
    lock and hashes the key once. No value is None.

    weigh, max_weight: weight of a value, and the largest sum of weights; one entry is kept, however heavy

    >>> cache = BoundedCache(2)
    >>> for key in "aba":
    ...     _ = cache.get(key) or cache.put(key, key.upper())
    >>> cache.put("c", "C"), cache.values()
    ('C', ['A', 'C'])
    """

    def __init__(self, size: int, weigh: Callable[[V], int] | None = None, max_weight: int = 0) -> None:
        self.size, self.max_weight, self._weigh = size, max_weight, weigh
        self._entries: dict[K, _Entry[V]] = {}
        self._order: list[tuple[int, K]] = []  # a heap of times of use, of which some are out of date
        self._clock = itertools.count()
        self._lock = threading.Lock()  # guards changes of _entries and _order

    def get(self, key: K) -> V | None:
        """Return the value of a key, None if there is none, and record the use."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = next(self._clock)
        return entry.value

    def put(self, key: K, value: V) -> V:
        """Store a value, evict the least recently used ones, and return the value."""
        removed: list[V] = []  # freed after the lock is released: they may free other objects
        with self._lock:
            used = next(self._clock)
            if (entry := self._entries.get(key)) is not None:
                removed.append(entry.value)
                entry.value, entry.used = value, used
            else:
                self._entries[key] = _Entry(value, used)
                heapq.heappush(self._order, (used, key))
            while len(self._entries) > self.size or (len(self._entries) > 1 and self._is_too_heavy()):
                removed.append(self._evict())
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self.put(key, value)

    def _is_too_heavy(self) -> bool:
        return self._weigh is not None and sum(map(self._weigh, self.values())) > self.max_weight

    def _evict(self) -> V:
        """Remove the least recently used entry and return its value."""
        while True:
            used, key = self._order[0]
            if (entry := self._entries[key]).used == used:
                heapq.heappop(self._order)
                return self._entries.pop(key).value
            heapq.heapreplace(self._order, (entry.used, key))

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            removed, self._entries, self._order = self._entries, {}, []
        removed.clear()

    def keys(self) -> list[K]:
        return list(self._entries)

    def values(self) -> list[V]:
        return [entry.value for entry in list(self._entries.values())]

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
