"""A connection's transport as replies are written to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SMALL = 2**16  # bytes that are copied in less time than another call of the system takes


class CycleTransport:
    """A transport as uvicorn's cycles use it: ended in another way, and a reply's head goes with what comes next.

    Two writes would be two calls of the system, and two packets.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        self.is_closing = transport.is_closing
        self.end = end
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._begun = False

    def write(self, data: bytes) -> None:
        """Send data; the first of a reply waits for more, but no longer than until the event loop's next turn."""
        if not self._begun:
            self._begun = True
            self._head = data
            self._loop.call_soon(self.flush)
            return
        if self._head and len(data) <= SMALL:
            data, self._head = self._head + data, b""
        self.flush()
        self._transport.write(data)

    def end_reply(self) -> None:
        """What is written from now on is another reply."""
        self.flush()
        self._begun = False

    def close(self) -> None:
        """End the connection after what was written."""
        self.flush()
        self.end()

    def flush(self) -> None:
        """Send what waits for more, unless the connection is closed by now."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
