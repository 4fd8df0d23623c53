"""Room for encoded replies that are being sent: no longer a model's work, but still in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

PATIENCE_S = 1.0  # a younger reply is cut only if those that wait behind the next one are over the limit too


class Reader(Protocol):
    """The peer that a reply is sent to."""

    def count_taken(self) -> int:
        """Bytes taken, of this reply and earlier ones."""

    def cut(self) -> None:
        """Stop sending to it."""


@dataclass(eq=False)
class UnsentReply:
    """A reply that is being sent."""

    size: int  # bytes
    reader: Reader
    taken_before: int  # bytes, as its reader counts
    begun: float  # seconds


class UnsentReplies:
    """Bounds the bytes of replies that are being sent, and of those that wait for room. For the event loop only.

    If there is no room for another reply, the one with the slowest reader is cut. ``clock`` is in seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.used_bytes = 0
        self._waiting_bytes = 0
        self._limit = limit
        self._clock = clock
        self._replies: list[UnsentReply] = []  # oldest first
        self._turn = asyncio.Lock()  # the reply that has waited longest is next
        self._changed = asyncio.Event()

    async def add(self, size: int, reader: Reader) -> UnsentReply:
        """Book a reply until ``remove``, after those that wait; one larger than the limit is sent alone."""
        self._waiting_bytes += size
        self._changed.set()
        try:
            async with self._turn:
                while self._replies and self.used_bytes + size > self._limit:
                    await self._make_room(size)
                reply = UnsentReply(size, reader, reader.count_taken(), self._clock())
                self._replies.append(reply)
                self.used_bytes += size
                return reply
        finally:
            self._waiting_bytes -= size

    def remove(self, reply: UnsentReply) -> None:
        """Give its bytes back, unless it was cut."""
        if reply in self._replies:
            self._replies.remove(reply)
            self.used_bytes -= reply.size
            self._changed.set()

    async def _make_room(self, size: int) -> None:
        """Cut the slowest reply, or wait until one is old enough to judge or was sent, or too many others wait."""
        now, hurry = self._clock(), self._waiting_bytes - size > self._limit
        old = [each for each in self._replies if hurry or now - each.begun >= PATIENCE_S]
        if old:
            slowest = min(old, key=self._measure)
            self.remove(slowest)
            slowest.reader.cut()
            return
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._replies[0].begun + PATIENCE_S - now):
                await self._changed.wait()

    def _measure(self, reply: UnsentReply) -> float:
        """Bytes a second that its reader has taken."""
        taken, seconds = reply.reader.count_taken() - reply.taken_before, self._clock() - reply.begun
        return taken / max(seconds, PATIENCE_S)
