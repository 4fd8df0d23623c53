"""A client and its requests, which are built once and sent again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import cycle

import httpx

from layertap.service.load.connection_pool import ConnectionPool
from layertap.service.load.options import Options
from layertap.service.load.request_kind import RequestKind
from layertap.service.load.sample import Sample, parse_retry_after


class Sender:
    """Sends requests by the number of their kind; the bodies of a kind take turns."""

    def __init__(self, client: httpx.AsyncClient, kinds: Sequence[RequestKind], url: str) -> None:
        self._client = client
        self._kinds = kinds
        self._requests = [cycle(_make_requests(client, kind, url)) for kind in kinds]

    async def send(self, number: int, due: float, begun: float) -> Sample:
        """Send the next request of a kind and read all of the answer.

        ``due`` is when it should have been sent, ``begun`` when the run began, both as ``time.perf_counter`` tells.
        """
        sent = time.perf_counter()
        status = error = None
        size, headers = 0, httpx.Headers()
        try:
            async with asyncio.timeout(self._kinds[number].leave_after):
                async with aclosing(await self._client.send(next(self._requests[number]), stream=True)) as response:
                    async for chunk in response.aiter_raw():
                        size += len(chunk)
                status, headers = response.status_code, response.headers
        except httpx.TransportError as failure:
            error = type(failure).__name__
        except TimeoutError:
            pass  # the client has left, and with it its connection
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


def make_client(options: Options) -> httpx.AsyncClient:
    """A client with as many connections as it needs, whose headers go with every request."""
    return httpx.AsyncClient(
        headers={"Accept-Encoding": "identity", **options.headers},
        transport=ConnectionPool(),
        timeout=options.timeout,
        trust_env=False,  # a proxy would be measured too
    )


def _make_requests(client: httpx.AsyncClient, kind: RequestKind, url: str) -> list[httpx.Request]:
    address = f"{url.rstrip('/')}{kind.path}"
    return [
        client.build_request("POST", address, content=content, headers=dict(headers))
        for content, headers in kind.bodies
    ]
