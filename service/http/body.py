"""A request's body in memory: counted as it arrives, within a time, never on a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from layertap.models.errors import TooLargeError
from layertap.service.errors import BadRequestError, BodyTimeoutError
from layertap.service.settings import Settings

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

LATIN = "latin-1"
MAX_PADDING = 256  # blanks behind a delimiter
MIN_BYTES_PER_S = 10_000  # of a body: whoever sends less holds a place and memory for nothing


@dataclass(frozen=True)
class MultipartPart:
    """One part of a multipart body; ``media_type`` as it is said to be, nothing for one without a file name."""

    name: str
    data: bytes
    media_type: str = ""


async def read_body(request: Request, settings: Settings, reserve: Callable[[int], None]) -> bytes:
    """The whole body; TooLargeError, BadRequestError where it breaks off, BodyTimeoutError where it arrives too slowly.

    ``reserve`` is told of its bytes as they arrive, and raises QueueFullError where there is no room for more.
    """
    limit = settings.max_body_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large_error(announced[:20], limit)
    chunks: list[bytes] = []
    size = 0
    loop, wait_s = asyncio.get_running_loop(), settings.body_timeout_s
    enough = missing = MIN_BYTES_PER_S * wait_s
    try:
        async with asyncio.timeout(wait_s) as timeout:
            async for chunk in request.stream():
                if not chunk:  # the end
                    continue
                size += len(chunk)
                if size > limit:
                    raise _too_large_error(f"more than {limit}", limit)
                reserve(len(chunk))
                chunks.append(chunk)
                missing -= len(chunk)
                if missing <= 0:  # none of it counts twice: a fast start earns no time for a slow rest
                    timeout.reschedule(loop.time() + wait_s)
                    missing = enough
    except TimeoutError:
        hint = f"send it at {MIN_BYTES_PER_S // 1000} kB a second or more, or in several requests"
        raise BodyTimeoutError(f"too little of the body arrived within {wait_s:g} s", hint=hint) from None
    except ClientDisconnect:
        raise BadRequestError("the body broke off") from None
    return b"".join(chunks)  # a single one is not copied


def parse_multipart(headers: Headers, body: bytes, settings: Settings) -> list[MultipartPart]:
    """The parts of a multipart body, in order; BadRequestError where it is broken, TooLargeError for too many parts.

    Computes, so it belongs in a thread. What stands before the first delimiter, and behind the last one, is no part
    (RFC 2046, section 5.1.1).
    """
    _, options = parse_options_header(headers["content-type"])
    boundary = options.get(b"boundary", b"")
    delimiter = b"--" + boundary
    start = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter)
    if not boundary or start < 0:
        raise _broken_error()
    body = body[start:].lstrip(b"\r\n")
    behind = body[len(delimiter) : len(delimiter) + MAX_PADDING]
    if padding := len(behind) - len(behind.lstrip(b" \t")):  # which the parser takes behind later delimiters alone
        body = delimiter + body[len(delimiter) + padding :]
    reader = _PartReader(settings.max_inputs + 1)
    parser = MultipartParser(boundary, reader.make_callbacks())
    try:
        parser.write(body)
        parser.finalize()
    except TooManyPartsError:
        raise _too_many_parts_error(settings.max_inputs) from None
    except (MultipartParseError, ValueError):
        raise _broken_error() from None
    if not reader.has_ended:
        raise _broken_error()
    return reader.parts


def get_media_type(content_type: str) -> str:
    """A content type without its parameters, in small letters."""
    return content_type.partition(";")[0].strip(" \t").lower()


class TooManyPartsError(Exception):
    """A body has more parts than a request may have inputs."""


class _PartReader:
    """Puts parts together out of what python-multipart calls back with: the bytes, where a piece begins and ends."""

    def __init__(self, max_parts: int) -> None:
        self.parts: list[MultipartPart] = []
        self.has_ended = False  # by the last delimiter
        self._max_parts = max_parts
        self._fields: list[tuple[bytes, bytes]] = []
        self._name = self._value = b""
        self._data: list[bytes] = []

    def make_callbacks(self) -> MultipartCallbacks:
        """The parser's own names for them."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_field,
            "on_part_data": self._add_data,
            "on_part_end": self._end,
            "on_end": self._end_all,
        }

    def _begin(self) -> None:
        if len(self.parts) == self._max_parts:
            raise TooManyPartsError
        self._fields, self._data = [], []

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_field(self) -> None:
        self._fields.append((self._name.lower(), self._value))
        self._name = self._value = b""

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def _end_all(self) -> None:
        self.has_ended = True

    def _end(self) -> None:
        """ValueError for a part without a name, or one that is no UTF-8."""
        fields = dict(self._fields)
        _, options = parse_options_header(fields.get(b"content-disposition", b""))
        if b"name" not in options:
            raise ValueError("a part has no name")
        is_file = b"filename" in options
        media_type = get_media_type(fields.get(b"content-type", b"").decode(LATIN)) if is_file else ""
        self.parts.append(MultipartPart(options[b"name"].decode(), b"".join(self._data), media_type))


def _broken_error() -> BadRequestError:
    return BadRequestError("the multipart body is broken", hint="let the client library write it, boundary included")


def _too_many_parts_error(limit: int) -> TooLargeError:
    return TooLargeError(
        f"a multipart body has at most {limit} inputs beside its part 'request'", hint="send them in several requests"
    )


def _too_large_error(size: str, limit: int) -> TooLargeError:
    return TooLargeError(f"the body has {size} bytes, the limit is {limit}", hint="send fewer or smaller inputs")
