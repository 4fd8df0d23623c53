"""Room for encoded replies that are being sent: no longer a model's work, but still in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

PATIENCE_S = 1.0  # how long a reply is not cut


class Reader(Protocol):
    """Whoever a reply is sent to."""

    def count_taken(self) -> int:
        """Bytes that it has taken, of this reply and of what was sent before."""

    def cut(self) -> None:
        """Send no more to it."""


@dataclass(eq=False)
class UnsentReply:
    """A reply of so many bytes; ``taken_before`` as its reader counts, ``begun`` in seconds."""

    size: int
    reader: Reader
    taken_before: int
    begun: float


class UnsentReplies:
    """Counts the bytes of replies that are being sent. For the event loop only.

    Where there is no room for another reply, the one that is taken most slowly is cut. ``clock`` is in seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.used_bytes = 0
        self._limit = limit
        self._clock = clock
        self._replies: list[UnsentReply] = []  # oldest first
        self._turn = asyncio.Lock()  # whoever waits longest is next
        self._removed = asyncio.Event()

    async def add(self, size: int, reader: Reader) -> UnsentReply:
        """Book a reply until ``remove``, after those that wait; one that is larger than the limit has it alone."""
        async with self._turn:
            while self._replies and self.used_bytes + size > self._limit:
                await self._make_room()
            reply = UnsentReply(size, reader, reader.count_taken(), self._clock())
            self._replies.append(reply)
            self.used_bytes += size
            return reply

    def remove(self, reply: UnsentReply) -> None:
        """Give its bytes back, unless it was cut."""
        if reply in self._replies:
            self._replies.remove(reply)
            self.used_bytes -= reply.size
            self._removed.set()

    async def _make_room(self) -> None:
        """Cut the slowest reply, or wait until one is old enough to tell, or has been sent."""
        now = self._clock()
        old = [each for each in self._replies if now - each.begun >= PATIENCE_S]
        if old:
            slowest = min(old, key=self._measure)
            self.remove(slowest)
            slowest.reader.cut()
            return
        self._removed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._replies[0].begun + PATIENCE_S - now):
                await self._removed.wait()

    def _measure(self, reply: UnsentReply) -> float:
        """Bytes a second that its reader has taken."""
        return (reply.reader.count_taken() - reply.taken_before) / (self._clock() - reply.begun)
