"""The bounded cache keeps what was used last."""

from __future__ import annotations

from layertap.models.lru_cache import LRUCache


def test_least_recently_used_goes() -> None:
    """A value that is read or written again outlives one that is not."""
    cache = LRUCache[str, int](2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert cache.get("a") == 1
    cache.put("b", 9)
    assert (cache.get("b"), cache.get("c")) == (9, None)
    cache.put("a", 4)
    cache.put("d", 5)
    assert (cache.get("a"), cache.get("d")) == (4, 5)
