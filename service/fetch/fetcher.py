"""Fetches one picture at a URL: resolves the host once, checks each address, connects to these, follows no redirect."""

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
from layertap.service.fetch.addresses import Address, PinnedTransport, is_allowed
from layertap.service.fetch.urls import AllowedHosts, FetchTarget
from layertap.service.settings import Settings

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
log = logging.getLogger("layertap")
HEADERS = (
    ("User-Agent", "layertap"),
    ("Accept", "image/jpeg, image/png, image/webp, image/gif, image/bmp, audio/*, application/octet-stream"),
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
)
UNTYPED = frozenset({b"application/octet-stream", b"binary/octet-stream"})
NETWORK_ERRORS = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError)


class RejectedResponse(Exception):  # noqa: N818  (internal)
    """A response, or an address, that is refused; the text is for the operator's log."""


class DownloadBudget:
    """The bytes that all URLs of a request may have; ``reserve`` is called as they arrive, and may refuse."""

    def __init__(self, limit: int, reserve: Callable[[int], None]) -> None:
        self._limit = limit
        self._reserve = reserve
        self._used = 0

    def check(self, size: int) -> None:
        """TooLargeError if ``size`` more bytes exceed the limit."""
        if self._used + size > self._limit:
            detail = f"the files at the request's URLs have more than {self._limit} bytes, which is the limit"
            raise TooLargeError(detail, hint="send fewer or smaller inputs")

    def take(self, size: int) -> None:
        """Count ``size`` more bytes that have arrived; TooLargeError, QueueFullError."""
        self.check(size)
        self._reserve(size)
        self._used += size


class Fetcher:
    """Fetches pictures from the hosts in ``LAYERTAP_ALLOW_URLS``; SettingsError if an entry is not a host.

    For the event loop, which it never blocks. ``resolver`` returns a host's addresses, by default with the system's
    resolver; ``tls``: the trusted certificates.
    """

    def __init__(self, settings: Settings, resolver: Resolver | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._hosts = AllowedHosts(settings.allow_urls, settings.allow_private_urls)
        self.max_bytes = settings.max_body_bytes
        self._timeout_s = settings.url_timeout_s
        self._resolver = resolver or self._look_up
        # A pool of its own, because a look-up can't be cancelled and the event loop's default pool is small.
        self._pool = ThreadPoolExecutor(settings.max_url_fetches, "resolve")
        self._tls = tls or (httpcore.default_ssl_context() if self._hosts else None)
        self._slots = asyncio.Semaphore(settings.max_url_fetches)

    def parse_url(self, url: str) -> FetchTarget:
        """Parse a URL; InputError if it may not be fetched. Sends nothing."""
        return self._hosts.parse_url(url)

    async def fetch(self, target: FetchTarget, budget: DownloadBudget) -> bytes:
        """The bytes at a URL; InputError, with one text for all network errors; TooLargeError, QueueFullError."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._download(target, await self._resolve(target), budget)
            except TimeoutError:
                reason = f"not done within {self._timeout_s:g} s"
            except RejectedResponse as rejection:
                reason = str(rejection)
            except NETWORK_ERRORS as error:
                reason = type(error).__name__
        log.info("a URL was not fetched", extra={"fields": {"host": target.authority, "reason": reason}})
        raise InputError("the URL could not be fetched", hint="send the picture itself as 'image'")

    async def _resolve(self, target: FetchTarget) -> list[Address]:
        """The addresses of the host; RejectedResponse if there is none, or one may not be contacted."""
        addresses = [ip_address(text) for text in await self._resolver(target.host, target.port)]
        if not addresses or not all(is_allowed(address, target.private) for address in addresses):
            raise RejectedResponse("an address that is not dialled" if addresses else "no address")
        return addresses

    async def _look_up(self, host: str, port: int) -> list[str]:
        """The addresses of a host by the system's resolver, best first; OSError."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        entries = await asyncio.get_running_loop().run_in_executor(self._pool, look_up)
        return [str(address[0]) for *_, address in entries]

    async def _download(self, target: FetchTarget, addresses: Sequence[Address], budget: DownloadBudget) -> bytes:
        transport = PinnedTransport(addresses)
        url = httpcore.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path.encode()
        )
        headers = [("Host", target.authority), *HEADERS]
        try:
            async with (
                httpcore.AsyncHTTPConnection(url.origin, self._tls, network_backend=transport) as connection,
                connection.stream("GET", url, headers=headers) as response,
            ):
                budget.check(_check_head(response))
                data = bytearray()
                async for piece in response.aiter_stream():
                    budget.take(len(piece))
                    data += piece
                    await asyncio.sleep(0)  # many small pieces: let other tasks run
                return bytes(data)
        finally:
            await transport.aclose()


def _check_head(response: httpcore.Response) -> int:
    """The response's Content-Length, or 0; RejectedResponse if it is no unencoded picture, sound or video."""
    headers = {name.lower(): value.strip().lower() for name, value in response.headers}
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip()
    if response.status != 200:
        raise RejectedResponse(f"status {response.status}")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise RejectedResponse("a content encoding")
    if not media_type.startswith((b"image/", b"audio/", b"video/")) and media_type not in UNTYPED:
        raise RejectedResponse("a content type that is no picture's, sound's or video's")
    return int(headers.get(b"content-length", b"0")[:20])
