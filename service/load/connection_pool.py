"""Connections for httpx that cost the client the same however many there are.

httpx's own pool looks at every connection for every request, several times: with hundreds of them the client would be
slower than the server that it measures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx

KEEP_S = 2.0  # less than servers keep an idle connection (uvicorn 5 s), so that none is used while it is closed


class ConnectionPool(httpx.AsyncBaseTransport):
    """As many connections as there are requests at once; the one used last is used again first.

    A connection whose request failed or was cancelled is closed: httpcore may hold it as busy for ever
    (its cleaning up can be cancelled too), and whoever used it next would wait in vain.
    """

    def __init__(self) -> None:
        self._context = httpx.create_ssl_context()
        self._all: set[httpx.AsyncHTTPTransport] = set()
        self._free: list[httpx.AsyncHTTPTransport] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer; its connection is free again once it is read or closed."""
        connection = self._free.pop() if self._free else self._opened()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._drop(connection)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101  (an async transport gave it)
        response.stream = _Stream(
            response.stream, lambda: self._free.append(connection), lambda: self._drop(connection)
        )
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        for connection in self._all:
            await connection.aclose()
        await asyncio.gather(*self._closing)

    def _opened(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_S)
        connection = httpx.AsyncHTTPTransport(verify=self._context, trust_env=False, limits=limits)
        self._all.add(connection)
        return connection

    def _drop(self, connection: httpx.AsyncHTTPTransport) -> None:
        """Close it in a task of its own, which no cancelled request cancels."""
        self._all.discard(connection)
        task = asyncio.create_task(connection.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Stream(httpx.AsyncByteStream):
    """An answer's bytes; ``whole`` or ``broken`` is called once, when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, whole: Callable[[], None], broken: Callable[[], None]) -> None:
        self._stream = stream
        self._whole = whole
        self._broken = broken
        self._read = False
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part
        self._read = True

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        closed = self._broken
        try:
            await self._stream.aclose()
            closed = self._whole if self._read else self._broken
        finally:
            closed()
