"""Replies compressed for those who ask for it: text. Arrays of floats hardly shrink, and pictures are compressed."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from typing import Protocol

import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

from layertap.service.formats.negotiation import parse_qualities

MIN_BYTES = 1024  # what is shorter would hardly be fewer packets
TEXT = ("application/json", "application/problem+json", "application/javascript", "image/svg+xml")
EVENTS = "text/event-stream"  # each event is to be read when it is sent
GZIP = 16 + zlib.MAX_WBITS  # for zlib: with the head that gzip has

RunInThread = Callable[[Callable[[], bytes]], Awaitable[bytes]]


class _Compressor(Protocol):
    """The streaming compressor interface that zlib and the other libraries share."""

    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


# Level 1 of each: more is a tenth smaller, and takes several times as long. In order of preference.
CODINGS: Mapping[str, Callable[[], _Compressor]] = {
    "zstd": lambda: zstandard.ZstdCompressor(level=1).compressobj(),
    "gzip": partial(zlib.compressobj, 1, zlib.DEFLATED, GZIP),
}


@lru_cache(maxsize=64)
def choose_coding(accept_encoding: str) -> str | None:
    """The coding of ``CODINGS`` that is welcome most, where one is named and no less welcome than none at all."""
    qualities = parse_qualities(accept_encoding)
    best = max(CODINGS, key=lambda name: qualities.get(name, 0.0))
    quality = qualities.get(best, 0.0)
    return best if quality > 0 and quality >= qualities.get("identity", 0.0) else None


def compress_replies(scope: Scope, send: Send, run_in_thread: RunInThread) -> Send:
    """What sends a reply to this request, compressed where it asks for that and the reply gains by it."""
    accepted = Headers(scope=scope).get("accept-encoding", "")
    coding = choose_coding(accepted) if accepted else None
    if coding is None or scope["http_version"] == "1.0":  # which has no way to send what has no known length
        return send
    return _CompressedReply(coding, send, run_in_thread).send


class _CompressedReply:
    """A reply on its way; its head is held back until what comes first tells whether it is compressed."""

    def __init__(self, coding: str, send: Send, run_in_thread: RunInThread) -> None:
        self._coding = coding
        self._send = send
        self._run_in_thread = run_in_thread
        self._start: Message | None = None
        self._compressor: _Compressor | None = None

    async def send(self, message: Message) -> None:
        """Send a piece of the reply."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if (start := self._start) is not None:
            self._start = None
            if _gains(start, message):
                await self._send_compressed(start, message)
                return
            await self._send(start)
        elif self._compressor is not None:
            message = await self._compress(self._compressor, message)
        await self._send(message)

    async def _send_compressed(self, start: Message, first: Message) -> None:
        self._compressor = CODINGS[self._coding]()
        message = await self._compress(self._compressor, first)
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["content-encoding"] = self._coding
        del headers["content-length"]
        if not message.get("more_body"):
            headers["content-length"] = str(len(message["body"]))
        await self._send({**start, "headers": headers.raw})
        await self._send(message)

    async def _compress(self, compressor: _Compressor, message: Message) -> Message:
        is_last = not message.get("more_body")
        data = await self._run_in_thread(partial(_feed, compressor, message.get("body", b""), is_last))
        return {**message, "body": data}


def _feed(compressor: _Compressor, data: bytes, is_last: bool) -> bytes:
    compressed = compressor.compress(data) if data else b""
    return compressed + compressor.flush() if is_last else compressed


def _gains(start: Message, first: Message) -> bool:
    """Whether a reply is text, and long."""
    headers = Headers(raw=start["headers"])
    media_type = headers.get("content-type", "").partition(";")[0]
    is_long = bool(first.get("more_body")) or len(first.get("body", b"")) >= MIN_BYTES
    is_text = (media_type.startswith("text/") and media_type != EVENTS) or media_type in TEXT
    return is_long and is_text and "content-encoding" not in headers
