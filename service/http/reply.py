"""Features as a reply: encoded, described in headers, and sent piece by piece."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from layertap.models.errors import Fault, escape
from layertap.models.spec import PreprocessSpec
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.engine.short_work import is_short
from layertap.service.features import Features, list_skipped
from layertap.service.formats.buffers import SMALL, Buffer, Buffers
from layertap.service.formats.plain_data import describe_top_classes
from layertap.service.http.exchange import LARGE
from layertap.service.inputs.items import EncodedItem
from layertap.service.pictures.overlay import SentPicture

PIECE = 2**20  # bytes that are sent at a time
MAX_CLASSES, MAX_CLASSES_CHARACTERS = 64, 1536
MAX_NAMED = 8  # fields in a warning
SIZE = attrgetter("size")

T = TypeVar("T")


async def encode_response(
    features: Features, request: ExtractRequest, sent: SentInputs, engine: Engine, ticket: Ticket
) -> Response:
    """Features as a reply in the requested format."""
    options = request.reply
    if options.format.is_picture:
        options = replace(
            options, originals=list_originals(request, sent, features, ticket, engine.settings.max_pixels)
        )
    encode = partial(options.format.encode, features, options)
    buffers = await run_encoder(encode, features, engine, ticket, in_thread=options.format.is_picture)
    return BuffersResponse(buffers, describe_features(features), options.format.media_type)


async def run_encoder(
    encode: Callable[[], T], features: Features, engine: Engine, ticket: Ticket, *, in_thread: bool = False
) -> T:
    """The result of an encoder of features, which runs in a thread if it takes long."""
    started = time.perf_counter()
    try:
        numbers = sum(map(SIZE, features.arrays.values()))
        if in_thread or not is_short(results=len(features.arrays), written_numbers=numbers):
            return await engine.run_in_thread(encode, ticket.deadline)
        return encode()
    finally:
        ticket.timings.add_span("encode", started, time.perf_counter())


def list_originals(
    request: ExtractRequest, sent: SentInputs, features: Features, ticket: Ticket, max_pixels: int
) -> tuple[SentPicture | None, ...]:
    """The picture of each row, to be drawn below maps; empty if rows are not single inputs.

    None for a TIFF, another kind of input, or a URL that was not fetched before. Empty too if a library's processor
    makes the rows, because it is unknown which part of a picture the model sees.
    """
    handle = ticket.handles.get(request.model)
    spec = handle.model.model_inputs.preprocess if handle is not None else None
    items = [item for index, item in sent.items if index not in features.skipped]
    if not isinstance(spec, PreprocessSpec) or len(items) != features.rows:
        return ()
    shown = [isinstance(item, EncodedItem) and not item.is_tiff and item for item in items]
    return tuple(SentPicture(item.data, spec, max_pixels) if item else None for item in shown)


def warn_of_ignored(features: Features, fields: Sequence[str]) -> Features:
    """Features with a warning that names fields of the request without effect, if there are any."""
    if not fields:
        return features
    named = ", ".join(escape(field) for field in fields[:MAX_NAMED])
    warning = f"fields that mean nothing here were ignored: {named}"
    return replace(features, warnings=(*features.warnings, warning))


def describe_features(features: Features) -> dict[str, str]:
    """The headers of a reply with features."""
    headers = {"X-Layertap-Fingerprint": features.fingerprint}
    if features.space:
        headers["X-Layertap-Space"] = features.space
    if features.errors:
        headers |= describe_skipped(features.errors)
    if features.verified:
        headers["X-Layertap-Verified"] = "true"
    if features.warnings:
        headers |= describe_warnings(features.warnings)
    if features.top_classes:
        headers["X-Layertap-Top-Classes"] = _format_top_classes(describe_top_classes(features)[0])
    return headers


def describe_warnings(warnings: Sequence[str]) -> dict[str, str]:
    """The header with the warnings, if any."""
    text = "; ".join(warnings).encode("ascii", "replace").decode()  # a cut name ends in "…"
    return {"X-Layertap-Warnings": text} if text else {}


def _format_top_classes(classes: Sequence[Mapping[str, Any]]) -> str:
    """The top classes of an input as JSON in ASCII, as many as fit a head: proxies limit it to a few KiB."""
    shown = orjson.loads(orjson.dumps(classes[:MAX_CLASSES]))  # NaN becomes null
    while len(text := json.dumps(shown)) > MAX_CLASSES_CHARACTERS:
        shown.pop()
    return text


def describe_skipped(faults: Sequence[Fault]) -> dict[str, str]:
    """The header with the indices of inputs that were left out, if any."""
    skipped = ",".join(map(str, list_skipped(faults)))
    return {"X-Layertap-Skipped": skipped} if skipped else {}


class BuffersResponse(Response):
    """A reply of buffers, each sent and let go when the peer has taken those before it."""

    def __init__(self, buffers: Buffers, headers: Mapping[str, str], media_type: str) -> None:
        self.status_code = 200
        self.background = None
        self._size = sum(map(len, buffers))
        self._buffers = deque(buffers)
        self.raw_headers = [(b"content-length", b"%d" % self._size), (b"content-type", media_type.encode())]
        self.raw_headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; each ``send`` waits until the system has taken nearly all that came before."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._size <= LARGE:
            await send({"type": "http.response.body", "body": b"".join(self._buffers)})
            return
        for piece in _cut_pieces(self._buffers):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


def _cut_pieces(buffers: deque[Buffer]) -> Iterator[Buffer]:
    """Buffers, removed from the queue, in pieces of bounded size; small ones are joined."""
    small: list[Buffer] = []
    size = 0
    while buffers:
        buffer = buffers.popleft()
        if small and size + len(buffer) > SMALL:
            yield b"".join(small)
            small, size = [], 0
        if len(buffer) <= SMALL:
            small.append(buffer)
            size += len(buffer)
            continue
        view = memoryview(buffer)
        del buffer
        for begin in range(0, len(view), PIECE):
            yield view[begin : begin + PIECE]
        del view
    if small:
        yield b"".join(small)
