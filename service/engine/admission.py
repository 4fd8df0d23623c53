"""Memory that requests hold while they are in the server, and its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from layertap.models.errors import TooLargeError
from layertap.service.errors import QueueFullError
from layertap.service.metrics import Metrics


class Budget:
    """Counts bytes: of bodies as they arrive, of rows, of the replies that are expected. For the event loop only.

    ``wait`` tells in how many seconds what holds them now should be done.
    """

    def __init__(self, limit: int, wait: Callable[[], float], metrics: Metrics) -> None:
        self.used = 0
        self._wait = wait
        self._limit = limit
        self._metrics = metrics

    @contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """A function that takes so many bytes more, all of them given back at the end of the block.

        It raises QueueFullError where they are not to be had now, TooLargeError where they never are.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if taken + size > self._limit:
                detail = f"the request needs {taken + size} bytes, the queue holds {self._limit}"
                raise TooLargeError(detail, hint="pool the layers, ask for fewer, or send fewer or smaller inputs")
            if self.used + size > self._limit:
                self._metrics.count_refused("queue_bytes")
                detail = f"the queue holds {self.used} bytes of {self._limit}"
                raise QueueFullError(detail, hint="come again later", retry_after=max(math.ceil(self._wait()), 1))
            taken += size
            self.used += size

        try:
            yield take
        finally:
            self.used -= taken
