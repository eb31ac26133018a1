"""A dictionary of bounded size, for caches of the process."""

from __future__ import annotations

import threading
from typing import Any


class BoundedCache:
    """A dictionary of at most ``size`` entries, of which those unused for longest are evicted.

    A use costs one look-up and no lock: entries used since the last eviction are in one dictionary, older
    ones in a second, which is dropped once the first holds half of ``size``. No value is None.

    >>> cache = BoundedCache(4)
    >>> for number in range(4):
    ...     cache.put(number, str(number))
    >>> cache.get(0), len(cache)
    ('0', 3)
    >>> print(cache.get(1))
    None
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._recent: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}
        self._lock = threading.Lock()  # of two threads that evict, the second would drop all entries

    def get(self, key: Any) -> Any:
        """Return the value of a key, None if there is none."""
        value = self._recent.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: Any, value: Any) -> None:
        """Set the value of a key."""
        with self._lock:
            if len(self._recent) >= self.size // 2:
                self._old, self._recent = self._recent, {}
            self._recent[key] = value

    def __len__(self) -> int:
        return len(self._recent.keys() | self._old.keys())
