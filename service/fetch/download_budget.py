"""How many bytes the URLs of one request may bring."""

from __future__ import annotations

from collections.abc import Callable

from layertap.models.errors import TooLargeError


class DownloadBudget:
    """The bytes that all URLs of one request may bring; ``reserve`` is told of them as they arrive, and may refuse."""

    def __init__(self, limit: int, reserve: Callable[[int], None]) -> None:
        self._limit = limit
        self._reserve = reserve
        self._used = 0

    def check(self, size: int) -> None:
        """TooLargeError where so many bytes more are too many."""
        used = self._used + size
        if used > self._limit:
            raise TooLargeError(
                f"the pictures at the request's URLs have {used} bytes or more, the limit is {self._limit}",
                hint="send fewer or smaller inputs",
            )

    def take(self, size: int) -> None:
        """So many bytes more have arrived; TooLargeError, QueueFullError."""
        self.check(size)
        self._reserve(size)
        self._used += size
