"""A connection's transport as replies are written to it, within a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

SMALL = 2**16  # bytes that are copied in less time than another call of the system takes
MIN_BYTES_PER_SECOND = 1024  # that whoever asked for a large reply has to take


class ReplyTransport:
    """A transport as uvicorn's cycles use it: a reply's head goes with what comes next, and ``end`` ends it.

    A head by itself would be a call of the system, and a packet, of its own. A connection whose peer takes too little
    of what waits to be sent is aborted: once it is watched, that is looked at every ``timeout_s``.
    """

    def __init__(
        self, transport: asyncio.Transport, end: Callable[[], None], timeout_s: float, logger: logging.Logger
    ) -> None:
        self.is_closing = transport.is_closing
        self.end = end
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._logger = logger
        self._head = b""
        self._begun = False
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

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

    def watch(self) -> None:
        """Begin to look whether the peer reads, unless that has begun."""
        if self._timer is None:
            self._unsent_bytes = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self._timeout_s, self._check)

    def watch_last_reply(self) -> None:
        """The same where the connection is closing: what is left of the last reply is kept no longer either."""
        if self._transport.is_closing() and self._transport.get_write_buffer_size():
            self.watch()

    def stop_watching(self) -> None:
        """The peer reads, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        sent_bytes = self._unsent_bytes - self._transport.get_write_buffer_size()
        if sent_bytes < MIN_BYTES_PER_SECOND * self._timeout_s:
            self._logger.warning("a reply was not read")
            self._transport.abort()
        else:
            self.watch()
