"""Content codings (RFC 9110, section 8.4.1): bodies that arrive packed, unpacked piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Protocol, TypeVar

import zstandard
from starlette.datastructures import Headers

from layertap.models.errors import TooLargeError
from layertap.service.errors import BadRequestError, UnsupportedMediaError

PIECE = 2**20  # bytes that are unpacked at a time, or a little more
MAX_PARTS = 1024  # members of gzip, frames of zstd: one that holds nothing takes time too
MAX_WINDOW = 2**23  # bytes; whoever sends zstd over HTTP keeps to it (RFC 9659)
GZIP, DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS  # for zlib: with the head that gzip has, or with its own
ZLIB_CHUNK = 2**14
# 4 bytes may be 128 KiB, and nothing that tells where a frame ends also bounds what it gives at a time.
ZSTD_CHUNK = 2**8

Unpack = Callable[[bytes], Iterator[bytes]]  # gives no empty piece; BadRequestError, TooLargeError


class _Decompressor(Protocol):
    """A member or frame that is being unpacked, as the libraries have it."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def unconsumed_tail(self) -> bytes: ...


Decompressor = TypeVar("Decompressor", bound=_Decompressor)


def find_unpack(headers: Headers) -> Unpack | None:
    """What unpacks a body, None where it is not packed; UnsupportedMediaError for another coding, or several."""
    named = [name.strip().lower() for line in headers.getlist("content-encoding") for name in line.split(",", 8)]
    codings = [name for name in named if name not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in UNPACK:
        hint = f"pack it once, with Content-Encoding: {OFFERED}, or send it uncompressed"
        raise UnsupportedMediaError("a body of this Content-Encoding is not taken", hint=hint)
    return UNPACK[codings[0]]


async def unpack_body(
    data: bytes,
    unpack: Unpack,
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


def _unpack_zlib(data: bytes, name: str, head: int) -> Iterator[bytes]:
    def decompress(member: zlib._Decompress, chunk: memoryview) -> bytes:
        return member.decompress(chunk, PIECE)

    return _group(_unpack_parts(data, name, partial(zlib.decompressobj, head), decompress, ZLIB_CHUNK))


def _unpack_gzip(data: bytes) -> Iterator[bytes]:
    return _unpack_zlib(data, "gzip", GZIP)


def _unpack_deflate(data: bytes) -> Iterator[bytes]:
    return _unpack_zlib(data, "deflate", DEFLATE)


def _unpack_zstd(data: bytes) -> Iterator[bytes]:
    def decompress(frame: zstandard.ZstdDecompressionObj, chunk: memoryview) -> bytes:
        return frame.decompress(chunk)

    begin = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj
    return _group(_unpack_parts(data, "zstd", begin, decompress, ZSTD_CHUNK))


def _unpack_parts(
    data: bytes,
    name: str,
    begin: Callable[[], Decompressor],
    decompress: Callable[[Decompressor, memoryview], bytes],
    size: int,
) -> Iterator[bytes]:
    """What members or frames hold that follow each other, read so many bytes at a time; pieces may be empty."""
    rest = memoryview(data)
    for _ in range(MAX_PARTS):
        part = begin()
        while not part.eof:
            chunk = rest[:size]
            try:
                piece = decompress(part, chunk)
            except (zlib.error, zstandard.ZstdError):
                raise BadRequestError(f"the body is no {name}", hint=HINTS[name]) from None
            rest = rest[len(chunk) - len(part.unconsumed_tail) - len(part.unused_data) :]
            if not (chunk or piece or part.eof):
                raise BadRequestError(f"the {name} of the body breaks off", hint=HINTS[name])
            yield piece
        if not rest:
            return
    hint = "pack it as a whole"
    raise TooLargeError(f"the {name} of the body has more than {MAX_PARTS} parts, the limit", hint=hint)


def _group(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces joined to larger ones: each is a way to a thread and back."""
    group: list[bytes] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(group)
            group, size = [], 0
    if size:
        yield b"".join(group)


HINTS = {
    "gzip": "have the client library pack it",
    "deflate": "it is what zlib.compress gives",
    "zstd": f"have the client library pack it, with a window of at most {MAX_WINDOW // 2**20} MiB",
}
UNPACK: Mapping[str, Unpack] = {
    "gzip": _unpack_gzip,
    "x-gzip": _unpack_gzip,
    "deflate": _unpack_deflate,
    "zstd": _unpack_zstd,
}
OFFERED = "gzip, deflate or zstd"
