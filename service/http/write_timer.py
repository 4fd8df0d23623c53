"""How long a reply may wait for a peer that does not read it."""

from __future__ import annotations

import asyncio
import logging

MIN_BYTES_PER_SECOND = 1024  # that whoever asked for a large reply has to take


class WriteTimer:
    """Aborts a connection whose peer takes too little of what waits to be sent, looking every ``seconds``."""

    def __init__(self, transport: asyncio.Transport, seconds: float, logger: logging.Logger) -> None:
        self._transport = transport
        self._seconds = seconds
        self._logger = logger
        self._unsent_bytes = 0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look, unless it has begun."""
        if self._handle is None:
            self._unsent_bytes = self._transport.get_write_buffer_size()
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._check)

    def start_for_last_reply(self) -> None:
        """Begin to look where the connection is closing: what is left of the last reply is kept no longer either."""
        if self._transport.is_closing() and self._transport.get_write_buffer_size():
            self.start()

    def stop(self) -> None:
        """The peer reads, or the connection is over."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _check(self) -> None:
        self._handle = None
        sent_bytes = self._unsent_bytes - self._transport.get_write_buffer_size()
        if sent_bytes < MIN_BYTES_PER_SECOND * self._seconds:
            self._logger.warning("a reply was not read")
            self._transport.abort()
        else:
            self.start()
