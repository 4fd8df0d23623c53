"""A JSON document from outside, bounded before and after it is read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import orjson
from fastapi import Request

from layertap.models.errors import TooLargeError
from layertap.service.engine.admit.admission import Ticket
from layertap.service.errors import BadRequestError
from layertap.service.http.body import read_body
from layertap.service.settings import Settings

MAX_BRACKETS = 500_000
MAX_DOCUMENT = 2**16  # bytes of a request that has no inputs


async def read_document(
    request: Request, settings: Settings, admit: Callable[[], AbstractContextManager[Ticket]]
) -> dict[str, Any]:
    """A small body that is a JSON object; without any the object is empty. BadRequestError, TooLargeError."""
    with admit() as ticket:
        data = await read_body(request, settings, ticket.reserve_bytes)
    if len(data) > MAX_DOCUMENT:
        hint = "models are configured by who runs the server"
        raise TooLargeError(f"the body has {len(data)} bytes, the limit here is {MAX_DOCUMENT}", hint=hint)
    document = load_json(data, settings.max_json_depth) if data else {}
    if not isinstance(document, dict):
        raise BadRequestError("the body is no JSON object")
    return document


def load_json(data: bytes, max_depth: int, name: str = "the body") -> Any:
    """A JSON document no deeper than it may be; BadRequestError, TooLargeError where it has very many brackets.

    ``name`` is what errors call it.
    """
    # Each makes an object that the garbage collector looks at, while no other thread runs.
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > MAX_BRACKETS:
        hint = "send long texts in several requests, and numbers as base64"
        raise TooLargeError(f"the JSON has {brackets} brackets; the limit is {MAX_BRACKETS}", hint=hint)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        hint = "send UTF-8 without a byte order mark, NaN or Infinity"
        raise BadRequestError(f"{name} is not JSON: {where}", hint=hint) from None
    # Only a document with that many brackets can be that deep.
    if brackets > max_depth and _is_deeper(value, max_depth):
        raise BadRequestError(f"the JSON is nested deeper than {max_depth}")
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for each in level
            if isinstance(each, (dict, list))
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True
