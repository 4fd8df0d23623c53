"""Connections to addresses that were checked, and to no others."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence

from httpcore import SOCKET_OPTION, AnyIOBackend, AsyncNetworkBackend, AsyncNetworkStream, ConnectError, ReadError

from layertap.service.fetch.addresses import Address

CONNECT_S = 3.0
MOST_ADDRESSES = 4
PIECE = 2**14  # what is read at once: parsing it keeps the event loop for a moment only
HEAD = 2**16


class ByteLimiter:
    """Bytes that arrive on a connection, and how many may: a head, and twice of what it has brought of the body.

    Without it chunks of one byte, or heads without end, would keep the parser busy.
    """

    def __init__(self) -> None:
        self._received = 0
        self._most = HEAD

    def arrived(self, size: int) -> None:
        """Count what has come; ReadError where it is more than may."""
        self._received += size
        if self._received > self._most:
            raise ReadError("more around the body than in it")

    def brought(self, size: int) -> None:
        """So many bytes of the body have been read."""
        self._most += 2 * size


class PinnedTransport(AsyncNetworkBackend):
    """One connection, to the first of some addresses that answers, whatever host is asked for."""

    def __init__(self, addresses: Sequence[Address], meter: ByteLimiter) -> None:
        self._addresses = addresses[:MOST_ADDRESSES]
        self._meter = meter
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
                self._stream = await self._network.connect_tcp(str(address), port, CONNECT_S)
            except ConnectError:
                continue
            return _Metered(self._stream, self._meter)
        raise ConnectError("no address answers")

    async def aclose(self) -> None:
        """Close the connection, also one whose handshake was broken off: httpcore leaves that open."""
        if self._stream is not None:
            await self._stream.aclose()


class _Metered(AsyncNetworkStream):
    def __init__(self, stream: AsyncNetworkStream, meter: ByteLimiter) -> None:
        self._stream = stream
        self._meter = meter

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        data = await self._stream.read(min(max_bytes, PIECE), timeout)
        self._meter.arrived(len(data))
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
        return _Metered(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._meter)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)
