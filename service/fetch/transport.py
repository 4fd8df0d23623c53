"""Connections to addresses that were checked, and to no others."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence

from httpcore import SOCKET_OPTION, AnyIOBackend, AsyncNetworkBackend, AsyncNetworkStream, ConnectError, ReadError

from layertap.service.fetch.addresses import Address

CONNECT_TIMEOUT_S = 3.0
MAX_ADDRESSES = 4
READ_BYTES = 2**14  # at once: parsing them keeps the event loop for a moment only
HEAD_BYTES = 2**16


class ByteLimiter:
    """Counts the bytes of a connection, and refuses more than a head, and twice of what has come of the body.

    Without it chunks of one byte, or heads without end, would keep the parser busy.
    """

    def __init__(self) -> None:
        self._received = 0
        self._limit = HEAD_BYTES

    def add_received(self, size: int) -> None:
        """Count what has arrived; ReadError where it is more than may."""
        self._received += size
        if self._received > self._limit:
            raise ReadError("more around the body than in it")

    def add_body(self, size: int) -> None:
        """So many bytes of the body have been read: as many more may arrive around them."""
        self._limit += 2 * size


class PinnedTransport(AsyncNetworkBackend):
    """One connection, to the first of some addresses that answers, whatever host is asked for."""

    def __init__(self, addresses: Sequence[Address], limiter: ByteLimiter) -> None:
        self._addresses = addresses[:MAX_ADDRESSES]
        self._limiter = limiter
        self._network = AnyIOBackend()
        self._stream: AsyncNetworkStream | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (the interface has it)
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """The connection; ConnectError."""
        for address in self._addresses:
            try:
                self._stream = await self._network.connect_tcp(str(address), port, CONNECT_TIMEOUT_S)
            except ConnectError:
                continue
            return _LimitedStream(self._stream, self._limiter)
        raise ConnectError("no address answers")

    async def aclose(self) -> None:
        """Close the connection, also one whose handshake was broken off: httpcore leaves that open."""
        if self._stream is not None:
            await self._stream.aclose()


class _LimitedStream(AsyncNetworkStream):
    """A stream whose bytes a limiter counts."""

    def __init__(self, stream: AsyncNetworkStream, limiter: ByteLimiter) -> None:
        self._stream = stream
        self._limiter = limiter

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        data = await self._stream.read(min(max_bytes, READ_BYTES), timeout)
        self._limiter.add_received(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncNetworkStream:
        return _LimitedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._limiter)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)
