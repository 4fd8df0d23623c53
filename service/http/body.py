"""Unpacks and parses bodies, in memory and within limits."""

from __future__ import annotations

import gc
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from io import BytesIO
from typing import Any, cast

import orjson
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from layertap.models.errors import TooLargeError, escape
from layertap.service.errors import BadRequestError, UnsupportedMediaError
from layertap.service.settings import Settings

JSON, MULTIPART = "application/json", "multipart/form-data"
WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}  # for zlib: what head and end each coding has
PIECE = 2**16  # of a packed body, and of what comes out of it, while it is counted
IN_MEMORY = {"MAX_MEMORY_FILE_SIZE": math.inf}
NUMBERS_HINT = "send numbers as bytes: base64, .npy or safetensors; long texts in several requests"
BRACKET_COST = 4  # of a list, an object or a key, in numbers
COUNTED = 2**20  # bytes that are searched before other threads may run
LONG_JSON = 2**18  # bytes of a document that is parsed in turn, and not checked for repeated keys


def read_coding(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """How a body is packed, ``gzip`` or ``deflate``, if it is; UnsupportedMediaError for another coding, or several."""
    codings = (value for name, value in headers if name == b"content-encoding")
    coding = b",".join(codings).strip(b" \t,").lower().removeprefix(b"x-").decode("latin-1")
    if coding in ("", "identity"):
        return None
    if coding not in WINDOWS:
        hint = "pack it once, with Content-Encoding: gzip or deflate, or send it uncompressed"
        raise UnsupportedMediaError("a body of this Content-Encoding is not taken", hint=hint)
    return coding


def measure_unpacked(data: bytes, coding: str, limit: int) -> int:
    """The number of bytes in a packed body, up to a limit; for a thread.

    A gzip says it itself (RFC 1952, section 2.3.1), which ``unpack`` checks; what ``deflate`` means (RFC 1950) is
    unpacked piece by piece.
    """
    if coding == "gzip":
        return min(int.from_bytes(data[-4:], "little"), limit)
    unpacker, size = zlib.decompressobj(WINDOWS[coding]), 0
    with suppress(zlib.error):  # ``unpack`` says so
        for start in range(0, len(data), PIECE):
            left = data[start : start + PIECE]
            while size < limit and (unpacked := unpacker.decompress(left, PIECE)):
                size += len(unpacked)
                left = unpacker.unconsumed_tail
    return min(size, limit)


def unpack(data: bytes, coding: str, size: int, limit: int) -> bytes:
    """The ``size`` bytes in a packed body; for a thread. BadRequestError, TooLargeError for too many."""
    unpacker = zlib.decompressobj(WINDOWS[coding])
    try:
        unpacked = unpacker.decompress(data, size + 1)
    except zlib.error:
        unpacked = b""
    if len(unpacked) > limit:
        raise too_large_error(f"more than {limit}", limit, "the unpacked body")
    if not unpacker.eof or unpacker.unused_data:
        raise BadRequestError(f"the body is not one whole {coding} stream", hint="have the client library pack it")
    return unpacked


def parse_multipart(content_type: str, body: bytes, settings: Settings) -> list[tuple[str, bytes]]:
    """The names and bytes of a multipart body's parts; for a thread. BadRequestError, TooLargeError for too many.

    Bytes before the first and after the last delimiter are ignored (RFC 2046, section 5.1.1).
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    delimiter = b"--" + boundary
    start = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter)
    if not boundary or start < 0:
        raise _broken_error()
    parts: list[tuple[str, bytes]] = []
    ended = []

    def add(part: Field | File) -> None:
        if len(parts) > settings.max_inputs:
            detail = f"a multipart body has at most {settings.max_inputs} inputs beside its part 'request'"
            raise TooLargeError(detail, hint="send them in several requests")
        name = (part.field_name or b"").decode()
        data = part.value if isinstance(part, Field) else cast("BytesIO", part.file_object).getvalue()
        parts.append((name, data or b""))

    try:
        parser = FormParser(MULTIPART, add, add, lambda: ended.append(True), boundary, config=IN_MEMORY)
        parser.write(body[start:].lstrip(b"\r\n"))
        parser.finalize()
    except ValueError:  # all errors of the parser, and names that are not UTF-8
        raise _broken_error() from None
    if not ended:  # the last delimiter is missing
        raise _broken_error()
    return parts


def _broken_error() -> BadRequestError:
    return BadRequestError("the multipart body is broken", hint="let the client library write it, boundary included")


def too_large_error(size: str, limit: int, name: str = "the body") -> TooLargeError:
    """The error of a body over the limit."""
    return TooLargeError(f"{name} has {size} bytes, the limit is {limit}", hint="send fewer or smaller inputs")


def load_json(data: bytes, max_numbers: int | None = None, name: str = "the body") -> Any:
    """A JSON document of at most ``max_numbers`` numbers (None: it is short anyway); ``name`` is for errors.

    BadRequestError, also for deep nesting and repeated keys; TooLargeError for too many numbers, lists or objects.
    """
    if max_numbers is not None and len(data) > max_numbers // BRACKET_COST:
        _check_counts(data, max_numbers)
    is_long = len(data) > LONG_JSON
    try:
        if is_long:
            gc.disable()  # it would go through the growing document again and again
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        hint = "send UTF-8 without a byte order mark, NaN, Infinity or a thousand levels of brackets"
        raise BadRequestError(f"{name} is not JSON: {where}", hint=hint) from None
    finally:
        if is_long:
            gc.enable()
    if not is_long:
        _check_keys(data, value, name)
    return value


BEFORE_VALUE = re.compile(rb'"[ \t\r\n]*:')


def _check_keys(data: bytes, document: Any, name: str) -> None:
    """BadRequestError for an object with a repeated key: then the text has more keys than the parsed document."""
    keys, left = 0, [document]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            keys += len(each)
            left += each.values()
        elif isinstance(each, list):
            left += each
    if data.count(b":") == keys or len(BEFORE_VALUE.findall(data)) == keys:  # which is quick to see
        return
    try:
        _checker.decode(data.decode())
    except RecursionError:
        raise BadRequestError(f"{name} is nested too deep") from None


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise BadRequestError(f"the JSON has {escape(twice)} twice in one object", hint="give it once")


_checker = json.JSONDecoder(object_pairs_hook=_require_unique, parse_int=len)


def _check_counts(data: bytes, max_numbers: int) -> None:
    """TooLargeError for a document that takes long to parse, while no other thread runs.

    Each comma may follow a number; a list, an object or a key costs more than that. Those in texts count too, because
    telling them apart would take as long.
    """
    numbers = brackets = 0
    limits = max_numbers, max_numbers // BRACKET_COST
    for start in range(0, len(data), COUNTED):
        numbers += data.count(b",", start, start + COUNTED)
        brackets += sum(data.count(mark, start, start + COUNTED) for mark in (b"[", b"{", b":"))
        for what, count, limit in zip(("commas", "brackets and colons"), (numbers, brackets), limits, strict=True):
            if count > limit:
                raise TooLargeError(f"the JSON has more {what} than the limit, {limit}", hint=NUMBERS_HINT)
