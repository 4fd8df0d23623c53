"""A bounded cache that threads may share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """The values of the keys used most recently, at most ``max_size`` of them; any thread may call its methods.

    Unlike with ``functools.lru_cache``, another thread may compute a missing value.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: K) -> V | None:
        """The value of a key, which now counts as used; None if there is none."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep a value; if there are too many, drop the least recently used one."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._max_size:
                self._values.popitem(last=False)

    def list_items(self) -> list[tuple[K, V]]:
        """All keys with their values, the least recently used first; none counts as used by this."""
        with self._lock:
            return list(self._values.items())

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
