"""A request's body in memory, never on a disk: counted as it arrives, as it unpacks and as its JSON is read."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import orjson
from fastapi import Request
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from layertap.models.errors import TooLargeError
from layertap.service.engine.admit.admission import Ticket
from layertap.service.errors import BadRequestError, BodyTimeoutError, UnsupportedMediaError
from layertap.service.http.exchange import Exchange
from layertap.service.settings import Settings

MULTIPART = "multipart/form-data"
GZIP = 16 + zlib.MAX_WBITS  # for zlib: with the head and the end that gzip has
IN_MEMORY = {"MAX_MEMORY_FILE_SIZE": math.inf}
MAX_BRACKETS = 500_000
MAX_DOCUMENT = 2**16  # bytes of a request that has no inputs
MIN_BYTES_PER_S = 10_000  # minimum upload rate: slower clients would hold a slot and memory


@dataclass(frozen=True)
class MultipartPart:
    """One part of a multipart body."""

    name: str
    data: bytes


async def read_body(exchange: Exchange, settings: Settings, reserve: Callable[[int], None]) -> bytes:
    """The whole body; TooLargeError, BadRequestError where it breaks off, BodyTimeoutError where it arrives too slowly.

    ``reserve`` is told of its bytes as they arrive, and raises QueueFullError where there is no room for more.
    """
    limit = settings.max_body_bytes
    announced = exchange.head.get(b"content-length", b"0")
    if announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large_error(announced[:20].decode(), limit)
    chunks: list[bytes] = []
    size = 0
    loop, wait_s = asyncio.get_running_loop(), settings.body_timeout_s
    enough = missing = MIN_BYTES_PER_S * wait_s
    timer = loop.call_later(wait_s, _give_up, exchange, wait_s)
    try:
        while True:
            message = await exchange.receive()
            if message["type"] == "http.disconnect":
                raise BadRequestError("the body broke off")
            if chunk := message.get("body", b""):
                size += len(chunk)
                if size > limit:
                    raise _too_large_error(f"more than {limit}", limit)
                reserve(len(chunk))
                chunks.append(chunk)
                missing -= len(chunk)
            if not message.get("more_body"):
                return b"".join(chunks)  # a single one is not copied
            if missing <= 0:  # none of it counts twice: a fast start earns no time for a slow rest
                timer.cancel()
                timer, missing = loop.call_later(wait_s, _give_up, exchange, wait_s), enough
    finally:
        timer.cancel()


def _give_up(exchange: Exchange, wait_s: float) -> None:
    hint = f"send it at {MIN_BYTES_PER_S // 1000} kB a second or more, or in several requests"
    exchange.cancel(BodyTimeoutError(f"too little of the body arrived within {wait_s:g} s", hint=hint))


def is_packed(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a body is packed; UnsupportedMediaError for another coding than gzip, or several."""
    codings = (value for name, value in headers if name == b"content-encoding")
    coding = b",".join(codings).strip(b" \t,").lower()
    if coding not in (b"", b"identity", b"gzip", b"x-gzip"):
        hint = "pack it once, with Content-Encoding: gzip, or send it uncompressed"
        raise UnsupportedMediaError("a body of this Content-Encoding is not taken", hint=hint)
    return coding in (b"gzip", b"x-gzip")


def measure_unpacked(data: bytes, limit: int) -> int:
    """How many bytes a gzip says that it holds (RFC 1952, section 2.3.1), up to a limit."""
    return min(int.from_bytes(data[-4:], "little"), limit)


def unpack(data: bytes, size: int, limit: int) -> bytes:
    """What a gzip of one member holds, ``size`` bytes; BadRequestError, TooLargeError where they are over the limit.

    Computes, so it belongs in a thread.
    """
    unpacker = zlib.decompressobj(GZIP)
    try:
        unpacked = unpacker.decompress(data, size + 1)
    except zlib.error:
        unpacked = b""
    if len(unpacked) > limit:
        raise _too_large_error(f"more than {limit}, unpacked,", limit)
    if not unpacker.eof or unpacker.unused_data:
        detail = "the body is no gzip, or one that breaks off, or has several members"
        raise BadRequestError(detail, hint="have the client library pack it")
    return unpacked


def parse_multipart(content_type: str, body: bytes, settings: Settings) -> list[MultipartPart]:
    """The parts of a multipart body, in order; BadRequestError where it is broken, TooLargeError for too many parts.

    Computes, so it belongs in a thread. What stands before the first delimiter, and behind the last one, is no part
    (RFC 2046, section 5.1.1).
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    delimiter = b"--" + boundary
    start = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter)
    if not boundary or start < 0:
        raise _broken_error()
    parts: list[MultipartPart] = []
    ended = []

    def add(part: Field | File) -> None:
        if len(parts) > settings.max_inputs:
            detail = f"a multipart body has at most {settings.max_inputs} inputs beside its part 'request'"
            raise TooLargeError(detail, hint="send them in several requests")
        name = (part.field_name or b"").decode()
        data = part.value if isinstance(part, Field) else cast("BytesIO", part.file_object).getvalue()
        parts.append(MultipartPart(name, data or b""))

    parser = FormParser(MULTIPART, add, add, lambda: ended.append(True), boundary, config=IN_MEMORY)
    try:
        parser.write(body[start:].lstrip(b"\r\n"))
        parser.finalize()
    except ValueError:  # which all errors of the parser are, and one of a name that is no UTF-8
        raise _broken_error() from None
    if not ended:  # by the last delimiter
        raise _broken_error()
    return parts


def get_media_type(content_type: str) -> str:
    """A content type without its parameters, in small letters."""
    return content_type.partition(";")[0].strip(" \t").lower()


def _broken_error() -> BadRequestError:
    return BadRequestError("the multipart body is broken", hint="let the client library write it, boundary included")


def _too_large_error(size: str, limit: int) -> TooLargeError:
    return TooLargeError(f"the body has {size} bytes, the limit is {limit}", hint="send fewer or smaller inputs")


async def read_document(
    request: Request, settings: Settings, admit: Callable[[], AbstractContextManager[Ticket]]
) -> dict[str, Any]:
    """A small body that is a JSON object; without any the object is empty. BadRequestError, TooLargeError."""
    with admit() as ticket:
        data = await read_body(request.scope["state"]["exchange"], settings, ticket.reserve_bytes)
    if len(data) > MAX_DOCUMENT:
        hint = "models are configured by who runs the server"
        raise TooLargeError(f"the body has {len(data)} bytes, the limit here is {MAX_DOCUMENT}", hint=hint)
    document = load_json(data) if data else {}
    if not isinstance(document, dict):
        raise BadRequestError("the body is no JSON object")
    return document


def load_json(data: bytes, name: str = "the body") -> Any:
    """A JSON document; BadRequestError, also for one that is nested very deep; TooLargeError for very many brackets.

    ``name`` is what errors call it.
    """
    # Each makes an object that the garbage collector looks at, while no other thread runs.
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > MAX_BRACKETS:
        hint = "send long texts in several requests, and numbers as base64"
        raise TooLargeError(f"the JSON has {brackets} brackets; the limit is {MAX_BRACKETS}", hint=hint)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        hint = "send UTF-8 without a byte order mark, NaN, Infinity or a thousand levels of brackets"
        raise BadRequestError(f"{name} is not JSON: {where}", hint=hint) from None
