"""Connections for httpx that cost the client the same however many there are.

httpx's own pool looks at every connection for every request, several times: with hundreds of them the client would be
slower than the server that it measures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx

KEEP_S = 2.0  # less than servers keep an idle connection (uvicorn 5 s), so that none is used while it is closed


class ConnectionPool(httpx.AsyncBaseTransport):
    """As many connections as there are requests at once; the one used last is used again first."""

    def __init__(self) -> None:
        self._context = httpx.create_ssl_context()
        self._all: list[httpx.AsyncHTTPTransport] = []
        self._free: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer; its connection is free again once it is read or closed."""
        connection = self._free.pop() if self._free else self._opened()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._free.append(connection)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, lambda: self._free.append(connection))
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        for connection in self._all:
            await connection.aclose()

    def _opened(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_S)
        self._all.append(httpx.AsyncHTTPTransport(verify=self._context, trust_env=False, limits=limits))
        return self._all[-1]


class _Stream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, closed: Callable[[], None]) -> None:
        self._stream = stream
        self._closed: Callable[[], None] | None = closed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            if self._closed is not None:
                closed, self._closed = self._closed, None
                closed()
