"""Bodies packed by gzip (RFC 9110, section 8.4.1), unpacked piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from starlette.datastructures import Headers

from layertap.models.errors import TooLargeError
from layertap.service.errors import BadRequestError, UnsupportedMediaError

PIECE = 2**20  # bytes that are unpacked at a time
CHUNK = 2**18  # bytes that are read at a time: what zlib has not come to is copied for each piece
MAX_MEMBERS = 1024  # one that holds nothing takes time too
GZIP = 16 + zlib.MAX_WBITS  # for zlib: with the head that gzip has
HINT = "have the client library pack it"


def is_packed(headers: Headers) -> bool:
    """Whether a body is packed; UnsupportedMediaError for another coding than gzip, or several."""
    named = [name.strip().lower() for line in headers.getlist("content-encoding") for name in line.split(",", 8)]
    codings = [name for name in named if name not in ("", "identity")]
    if codings and (len(codings) > 1 or codings[0] not in ("gzip", "x-gzip")):
        hint = "pack it once, with Content-Encoding: gzip, or send it uncompressed"
        raise UnsupportedMediaError("a body of this Content-Encoding is not taken", hint=hint)
    return bool(codings)


async def unpack_body(
    data: bytes,
    limit: int,
    reserve: Callable[[int], None],
    run_in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]],
) -> bytes:
    """What a packed body holds; TooLargeError as soon as it is more bytes than ``limit``, BadRequestError.

    ``reserve`` is told of each piece before the next is unpacked, and raises QueueFullError where there is no room.
    """
    pieces: list[bytes] = []
    rest, size = unpack(data), 0
    while piece := await run_in_thread(partial(next, rest, b"")):
        size += len(piece)
        if size > limit:
            detail = f"the body unpacks to more than {limit} bytes, the limit"
            raise TooLargeError(detail, hint="send fewer or smaller inputs")
        reserve(len(piece))
        pieces.append(piece)
    return await run_in_thread(partial(b"".join, pieces))


def unpack(data: bytes) -> Iterator[bytes]:
    """What the members of a gzip hold, in pieces, none of them empty; BadRequestError, TooLargeError."""
    rest = memoryview(data)
    for _ in range(MAX_MEMBERS):
        member = zlib.decompressobj(GZIP)
        while not member.eof:
            chunk = rest[:CHUNK]
            try:
                piece = member.decompress(chunk, PIECE)
            except zlib.error:
                raise BadRequestError("the body is no gzip", hint=HINT) from None
            rest = rest[len(chunk) - len(member.unconsumed_tail) - len(member.unused_data) :]
            if not (chunk or piece or member.eof):
                raise BadRequestError("the gzip of the body breaks off", hint=HINT)
            if piece:
                yield piece
        if not rest:
            return
    raise TooLargeError(
        f"the gzip of the body has more than {MAX_MEMBERS} members, the limit", hint="pack it as a whole"
    )
