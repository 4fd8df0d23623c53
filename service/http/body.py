"""A request's body in memory: counted as it arrives, within a time, never on a disk."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import cast

from fastapi import Request
from python_multipart.multipart import Field, File, FormParser, parse_options_header
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from layertap.models.errors import TooLargeError
from layertap.service.errors import BadRequestError, BodyTimeoutError
from layertap.service.settings import Settings

MULTIPART = "multipart/form-data"
IN_MEMORY = {"MAX_MEMORY_FILE_SIZE": math.inf}
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
    parts: list[MultipartPart] = []
    ended = []

    def add(part: Field | File) -> None:
        if len(parts) > settings.max_inputs:
            raise _too_many_parts_error(settings.max_inputs)
        name = (part.field_name or b"").decode()
        if isinstance(part, Field):
            parts.append(MultipartPart(name, part.value or b""))
        else:
            data = cast("BytesIO", part.file_object).getvalue()
            parts.append(MultipartPart(name, data, get_media_type(part.content_type or "")))

    parser = FormParser(MULTIPART, add, add, lambda: ended.append(True), boundary, config=IN_MEMORY)
    try:
        parser.write(body)
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


def _too_many_parts_error(limit: int) -> TooLargeError:
    return TooLargeError(
        f"a multipart body has at most {limit} inputs beside its part 'request'", hint="send them in several requests"
    )


def _too_large_error(size: str, limit: int) -> TooLargeError:
    return TooLargeError(f"the body has {size} bytes, the limit is {limit}", hint="send fewer or smaller inputs")
