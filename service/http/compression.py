"""Replies compressed for those who ask for it: text. Arrays of floats hardly shrink, and pictures are compressed."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Protocol

import zstandard
from starlette.types import Message

from layertap.service.engine.engine import Engine
from layertap.service.formats.negotiation import parse_qualities

MIN_BYTES = 1024  # what is shorter would hardly be fewer packets
TEXT = (b"application/json", b"application/problem+json", b"application/javascript", b"image/svg+xml")
EVENTS = "text/event-stream"  # each event is to be read when it is sent
GZIP = 16 + zlib.MAX_WBITS  # for zlib: with the head that gzip has


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
def choose_coding(accept_encoding: bytes) -> str | None:
    """The coding of ``CODINGS`` that is welcome most, where one is named and no less welcome than none at all."""
    qualities = parse_qualities(accept_encoding.decode("latin-1"))
    best = max(CODINGS, key=lambda name: qualities.get(name, 0.0))
    quality = qualities.get(best, 0.0)
    return best if quality > 0 and quality >= qualities.get("identity", 0.0) else None


def is_compressible(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a reply is text, and long, by its head."""
    head = dict(headers)
    media_type = head.get(b"content-type", b"").partition(b";")[0]
    is_text = media_type in TEXT or (media_type.startswith(b"text/") and media_type != EVENTS.encode())
    return is_text and int(head.get(b"content-length", MIN_BYTES)) >= MIN_BYTES and b"content-encoding" not in head


class CompressedReply:
    """A reply on its way; its head is held back until its first bytes, with which its length may be known."""

    def __init__(self, coding: str, engine: Engine) -> None:
        self._coding = coding
        self._compressor = CODINGS[coding]()
        self._engine = engine
        self._start: Message | None = None

    async def convert(self, message: Message) -> tuple[Message, ...]:
        """What to send in place of a piece of the reply."""
        if message["type"] == "http.response.start":
            self._start = message
            return ()
        is_last = not message.get("more_body")
        feed = partial(_feed, self._compressor, message.get("body", b""), is_last)
        data = await self._engine.run_in_thread(feed, time.monotonic() + self._engine.settings.deadline_s)
        message = {**message, "body": data}
        if (start := self._start) is None:
            return (message,)
        self._start = None
        headers = [field for field in start["headers"] if field[0] != b"content-length"]
        headers.append((b"content-encoding", self._coding.encode()))
        if is_last:
            headers.append((b"content-length", b"%d" % len(data)))
        return {**start, "headers": headers}, message


def _feed(compressor: _Compressor, data: bytes, is_last: bool) -> bytes:
    compressed = compressor.compress(data) if data else b""
    return compressed + compressor.flush() if is_last else compressed
