"""One picture at a URL, fetched: resolved once, each address checked, those dialled, no redirect followed."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address

import httpcore

from layertap.models.errors import InputError, TooLargeError
from layertap.service.fetch.addresses import Address, is_allowed
from layertap.service.fetch.transport import ByteLimiter, PinnedTransport
from layertap.service.fetch.urls import AllowedHosts, FetchTarget
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
HEADERS = (
    ("User-Agent", "layertap"),
    ("Accept", "image/jpeg, image/png, image/webp, image/gif, image/bmp, image/tiff, application/octet-stream"),
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
)
BYTES = frozenset({b"application/octet-stream", b"binary/octet-stream"})
FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError)


class ThreadedResolver:
    """The system's resolver, in threads of its own: a look-up can't be ended, and an event loop has few for that."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of a host, best first; OSError."""
        look = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._pool, look)
        return [str(address[0]) for *_, address in found]


class DownloadBudget:
    """The bytes that all URLs of one request may bring; ``reserve`` is told of them as they arrive, and may refuse."""

    def __init__(self, limit: int, reserve: Callable[[int], None]) -> None:
        self._limit = limit
        self._reserve = reserve
        self._taken = 0

    def check(self, size: int) -> None:
        """TooLargeError where so many bytes more are too many."""
        if self._taken + size > self._limit:
            raise TooLargeError(
                f"the pictures at the request's URLs have {self._taken + size} bytes or more, "
                f"the limit is {self._limit}",
                hint="send fewer or smaller inputs",
            )

    def take(self, size: int) -> None:
        """So many bytes more have arrived; TooLargeError, QueueFullError."""
        self.check(size)
        self._reserve(size)
        self._taken += size


class RejectedResponse(Exception):  # noqa: N818  (nobody outside sees it)
    """An answer, or an address, that will not do; the text is for the operator's log."""


class Fetcher:
    """Fetches pictures from the hosts that ``LAYERTAP_ALLOW_URLS`` names; SettingsError where one of these is no host.

    Used on the event loop, which it never blocks. ``resolve`` gives a host's addresses, the system's own
    without it; ``tls`` says which
    certificates are good.
    """

    def __init__(self, settings: Settings, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._hosts = AllowedHosts(settings.allow_urls, settings.allow_private_urls)
        self._limit = settings.max_body_bytes
        self._seconds = settings.url_timeout_s
        self._resolve = resolve or ThreadedResolver(settings.max_url_fetches)
        self._tls = tls or (httpcore.default_ssl_context() if self._hosts else None)
        self._slots = asyncio.Semaphore(settings.max_url_fetches)

    def parse_url(self, url: str) -> FetchTarget:
        """What a URL asks for; InputError where it may not be fetched. Asks nobody."""
        return self._hosts.parse_url(url)

    def create_budget(self, reserve: Callable[[int], None]) -> DownloadBudget:
        """What the URLs of one more request may bring."""
        return DownloadBudget(self._limit, reserve)

    async def fetch(self, target: FetchTarget, allowance: DownloadBudget) -> bytes:
        """The bytes there.

        InputError, which says the same whatever has gone wrong in the network; TooLargeError, QueueFullError.
        """
        async with self._slots:
            try:
                async with asyncio.timeout(self._seconds):
                    return await self._fetched(target, await self._addresses(target), allowance)
            except TimeoutError:
                reason = f"not done within {self._seconds:g} s"
            except RejectedResponse as unfit:
                reason = str(unfit)
            except FAILURES as error:
                reason = type(error).__name__
        log.info("a URL was not fetched", extra={"fields": {"host": target.authority, "reason": reason}})
        raise InputError("the URL could not be fetched", hint="send the picture itself as 'image'")

    async def _addresses(self, target: FetchTarget) -> list[Address]:
        found = [ip_address(text) for text in await self._resolve(target.host, target.port)]
        if not found or not all(is_allowed(address, target.private) for address in found):
            raise RejectedResponse("an address that is not dialled" if found else "no address")
        return found

    async def _fetched(self, target: FetchTarget, addresses: Sequence[Address], allowance: DownloadBudget) -> bytes:
        meter = ByteLimiter()
        line = PinnedTransport(addresses, meter)
        url = httpcore.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path.encode()
        )
        headers = [("Host", target.authority), *HEADERS]
        try:
            async with (
                httpcore.AsyncHTTPConnection(url.origin, self._tls, network_backend=line) as connection,
                connection.stream("GET", url, headers=headers) as response,
            ):
                allowance.check(_announced(response))
                data = bytearray()
                async for piece in response.aiter_stream():
                    allowance.take(len(piece))
                    meter.brought(len(piece))
                    data += piece
                return bytes(data)
        finally:
            await line.aclose()


def _announced(response: httpcore.Response) -> int:
    """How many bytes an answer says it has, 0 where it does not; Unfit where it is no file of pictures, as it is."""
    headers: dict[bytes, bytes] = {}
    for name, value in response.headers:
        headers[name.lower()] = value.strip().lower()
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
    if response.status != 200:
        raise RejectedResponse(f"status {response.status}")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise RejectedResponse("a content encoding")
    if not kind.startswith(b"image/") and kind not in BYTES:
        raise RejectedResponse("a content type that is no picture's")
    return int(headers.get(b"content-length", b"0")[:20])
