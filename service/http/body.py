"""A request's body in memory: counted as it arrives, within a time, never on a disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from layertap.models.errors import TooLargeError
from layertap.service.errors import BadRequestError, BodyTimeoutError
from layertap.service.settings import Settings

LATIN = "latin-1"
MIN_BYTES_PER_S = 10_000  # that arrive on average: whoever sends less holds a place and memory for nothing


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
    started = loop.time()
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
                timeout.reschedule(min(loop.time(), started + size / MIN_BYTES_PER_S) + wait_s)
    except TimeoutError:
        hint = f"send it at {MIN_BYTES_PER_S // 1000} kB a second or more, or in several requests"
        raise BodyTimeoutError(f"no more of the body arrived within {wait_s:g} s", hint=hint) from None
    except ClientDisconnect:
        raise BadRequestError("the body broke off") from None
    return b"".join(chunks)  # a single one is not copied


def parse_multipart(headers: Headers, body: bytes, settings: Settings) -> list[MultipartPart]:
    """The parts of a multipart body, in order; BadRequestError where it is broken, TooLargeError for too many parts.

    Computes, so it belongs in a thread.
    """
    max_parts = settings.max_inputs + 1
    # A part without a file name is text to the parser; as latin-1 its bytes come through whatever they are.
    headers = Headers({"content-type": f"{headers['content-type']}; charset={LATIN}"})
    parser = _InMemoryParser(
        headers, _stream_once(body), max_files=max_parts, max_fields=max_parts, max_part_size=len(body) + 1
    )
    try:
        parts = asyncio.run(_read_parts(parser))
    except MultiPartException as error:
        if error.message.startswith("Too many"):
            raise _too_many_parts_error(settings.max_inputs) from None
        raise _broken_error() from None
    except (KeyError, ValueError):
        raise _broken_error() from None
    if not body.rstrip().endswith(b"--"):
        raise _broken_error()
    return parts


def get_media_type(content_type: str) -> str:
    """A content type without its parameters, in small letters."""
    return content_type.partition(";")[0].strip(" \t").lower()


async def _read_parts(parser: MultiPartParser) -> list[MultipartPart]:
    form = await parser.parse()
    try:
        return [
            MultipartPart(name, await value.read(), get_media_type(value.content_type or ""))
            if isinstance(value, UploadFile)
            else MultipartPart(name, value.encode(LATIN))
            for name, value in form.multi_items()
        ]
    finally:
        await form.close()


class _InMemoryParser(MultiPartParser):
    spool_max_size = 2**62  # the body is in memory and bounded already: nothing goes to a disk


async def _stream_once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


def _broken_error() -> BadRequestError:
    return BadRequestError("the multipart body is broken", hint="let the client library write it, boundary included")


def _too_many_parts_error(limit: int) -> TooLargeError:
    return TooLargeError(
        f"a multipart body has at most {limit} inputs beside its part 'request'", hint="send them in several requests"
    )


def _too_large_error(size: str, limit: int) -> TooLargeError:
    return TooLargeError(f"the body has {size} bytes, the limit is {limit}", hint="send fewer or smaller inputs")
