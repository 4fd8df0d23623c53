"""Requests, which are built once and sent again and again, and the connections that they go over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import cycle

import httpx

from layertap.service.load.figures import Sample, parse_retry_after
from layertap.service.load.options import Options
from layertap.service.load.scenario import RequestKind

KEEP_S = 2.0  # less than servers keep an idle connection (uvicorn 5 s), so that none is used while it is closed


class Sender:
    """Sends requests by the number of their kind; the bodies of a kind take turns.

    Each connection is a pool of its own: httpx's looks at every connection for every request, and with hundreds of them
    the client would be slower than the server that it measures. The one used last is used again first.
    """

    def __init__(self, kinds: Sequence[RequestKind], options: Options) -> None:
        self._kinds = kinds
        self._requests = [cycle(_make_requests(kind, options)) for kind in kinds]
        self._context = httpx.create_ssl_context()
        self._free: list[httpx.AsyncHTTPTransport] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def send(self, number: int, due: float, begun: float) -> Sample:
        """Send the next request of a kind and read all of the answer.

        ``due`` is when it should have been sent, ``begun`` when the run began, both as ``time.perf_counter`` tells.
        """
        sent = time.perf_counter()
        status = error = None
        size, headers = 0, httpx.Headers()
        connection = self._free.pop() if self._free else self._open()
        try:
            async with asyncio.timeout(self._kinds[number].leave_after):
                response = await connection.handle_async_request(next(self._requests[number]))
                async for chunk in response.aiter_raw():
                    size += len(chunk)
                status, headers = response.status_code, response.headers
        except httpx.TransportError as failure:
            error = type(failure).__name__
        except TimeoutError:
            pass  # the client has left, and with it its connection
        finally:
            if status is not None:
                self._free.append(connection)
            else:  # httpcore may hold it as busy for ever
                self._close(connection)
        return Sample(
            kind=number,
            seconds=time.perf_counter() - due,
            late=sent - due,
            at=due - begun,
            status=status,
            error=error,
            size=size,
            retry_after=parse_retry_after(headers.get("retry-after")),
            timing=headers.get("server-timing", ""),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        for connection in self._free:
            self._close(connection)
        await asyncio.gather(*self._closing)

    def _open(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_S)
        return httpx.AsyncHTTPTransport(verify=self._context, trust_env=False, limits=limits)

    def _close(self, connection: httpx.AsyncHTTPTransport) -> None:
        """Close it in a task of its own, which no cancelled request cancels."""
        task = asyncio.create_task(connection.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _make_requests(kind: RequestKind, options: Options) -> list[httpx.Request]:
    address = f"{options.url.rstrip('/')}{kind.path}"
    extensions = {"timeout": httpx.Timeout(options.timeout).as_dict()}
    return [
        httpx.Request(
            "POST",
            address,
            content=content,
            headers={"Accept-Encoding": "identity", **options.headers, **own},
            extensions=extensions,
        )
        for content, own in kind.bodies
    ]
