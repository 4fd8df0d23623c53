"""What a request's body holds, in memory, never on a disk: counted as it unpacks and as its JSON is read."""

from __future__ import annotations

import gc
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from threading import Lock
from typing import Any, cast

import orjson
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from layertap.models.errors import TooLargeError
from layertap.service.errors import BadRequestError, UnsupportedMediaError
from layertap.service.settings import Settings

MULTIPART = "multipart/form-data"
GZIP = 16 + zlib.MAX_WBITS  # for zlib: with the head and the end that gzip has
IN_MEMORY = {"MAX_MEMORY_FILE_SIZE": math.inf}
NUMBERS_HINT = "send numbers as bytes: base64, .npy or safetensors; long texts in several requests"
BRACKET_COST = 4  # of a list, an object or a key, in numbers
COUNTED = 2**20  # bytes looked at before other threads may run
_parsing = Lock()


@dataclass(frozen=True)
class MultipartPart:
    """One part of a multipart body."""

    name: str
    data: bytes


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
        raise too_large_error(f"more than {limit}, unpacked,", limit)
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

    try:
        parser = FormParser(MULTIPART, add, add, lambda: ended.append(True), boundary, config=IN_MEMORY)
        parser.write(body[start:].lstrip(b"\r\n"))
        parser.finalize()
    except ValueError:  # which all errors of the parser are, and one of a name that is no UTF-8
        raise _broken_error() from None
    if not ended:  # by the last delimiter
        raise _broken_error()
    return parts


def _broken_error() -> BadRequestError:
    return BadRequestError("the multipart body is broken", hint="let the client library write it, boundary included")


def too_large_error(size: str, limit: int) -> TooLargeError:
    """The error of a body of this size, over the limit."""
    return TooLargeError(f"the body has {size} bytes, the limit is {limit}", hint="send fewer or smaller inputs")


def load_json(data: bytes, max_numbers: int | None = None, name: str = "the body") -> Any:
    """A JSON document of at most ``max_numbers`` numbers (None if it is short anyway); ``name`` is what errors call it.

    BadRequestError, also for one that is nested very deep; TooLargeError for too many numbers, lists or objects.
    """
    try:
        if max_numbers is None or len(data) <= max_numbers // BRACKET_COST:
            return orjson.loads(data)
        _check_counts(data, max_numbers)
        return _parse_long(data)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        hint = "send UTF-8 without a byte order mark, NaN, Infinity or a thousand levels of brackets"
        raise BadRequestError(f"{name} is not JSON: {where}", hint=hint) from None


def _check_counts(data: bytes, max_numbers: int) -> None:
    """TooLargeError for a document that takes long to parse, while no other thread runs.

    What stands between commas may be a number; a list, an object or a key costs more than that. Those in texts count
    too, because telling them apart would take as long.
    """
    numbers = brackets = 0
    limits = max_numbers, max_numbers // BRACKET_COST
    for start in range(0, len(data), COUNTED):
        numbers += data.count(b",", start, start + COUNTED)
        brackets += sum(data.count(mark, start, start + COUNTED) for mark in (b"[", b"{", b":"))
        for what, count, limit in zip(("commas", "brackets and colons"), (numbers, brackets), limits, strict=True):
            if count > limit:
                detail = f"the JSON has more {what} than the limit, {limit}"
                raise TooLargeError(detail, hint=NUMBERS_HINT)


def _parse_long(data: bytes) -> Any:
    """A long document, one at a time: no other thread runs meanwhile, and several would wait for each other."""
    with _parsing:
        gc.disable()  # it would go through the document again and again while that grows
        try:
            return orjson.loads(data)
        finally:
            gc.enable()
