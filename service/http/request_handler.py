"""What routes that compute have in common: a request that arrives, and features as a reply."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from layertap.models.errors import Fault
from layertap.models.spec import PreprocessSpec
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.engine.threads import is_short
from layertap.service.features import Features, list_skipped
from layertap.service.formats.buffers import EncodeOptions
from layertap.service.formats.negotiation import negotiate
from layertap.service.formats.plain_data import describe_top_classes
from layertap.service.formats.table import FORMATS, ReplyFormat
from layertap.service.http.body import MULTIPART, get_media_type, is_packed, measure_unpacked, read_body, unpack
from layertap.service.http.buffers_response import BuffersResponse
from layertap.service.http.exchange import Exchange
from layertap.service.http.parsing import RawRequest
from layertap.service.http.query import MAX_CACHED, MAX_CACHED_BYTES, Query
from layertap.service.http.timeout import Timeout
from layertap.service.inputs.items import ImageItem
from layertap.service.pictures.overlay import SentPicture
from layertap.service.settings import Settings

MAX_CLASSES, MAX_CLASSES_CHARACTERS = 64, 1536


class ParsedRequest(Protocol):
    """What a body asks for, whatever protocol it is of."""

    @property
    def model(self) -> str | None:
        """The model's name; None is the default one."""


P = TypeVar("P", bound=ParsedRequest)
Parser = Callable[[RawRequest, Settings], P]
FormatChooser = Callable[[bytes | None, Query], ReplyFormat]


def make_chooser(formats: Mapping[str, ReplyFormat]) -> FormatChooser:
    """Makes what chooses a reply's format by ``Accept`` and query, and remembers what it chose.

    NotAcceptableError, RequestError.
    """
    types = {name: each.media_type for name, each in formats.items()}

    def choose(accept: bytes | None, query: Query) -> ReplyFormat:
        text = accept.decode("latin-1") if accept is not None else None
        return formats[negotiate(text, query.get_one("format"), types)]

    remember = lru_cache(maxsize=MAX_CACHED)(choose)

    def choose_format(accept: bytes | None, query: Query) -> ReplyFormat:
        is_short = query.is_cacheable and len(accept or b"") <= MAX_CACHED_BYTES
        return (remember if is_short else choose)(accept, query)

    return choose_format


choose_any = make_chooser(FORMATS)


async def receive(
    request: Request,
    engine: Engine,
    parse: Parser[P],
    choose_format: FormatChooser = choose_any,
    get_timeout: Callable[[P], float | None] | None = None,
) -> tuple[P, Ticket]:
    """A request that has arrived, parsed, and its place in the server; a long one is parsed in a thread.

    ``get_timeout`` tells how many seconds a body itself allows.

    Until its reply begins the request is cancelled where the client goes away (ClientGoneError); what it raises for
    want of time says how much there was. The place is given back once the reply is sent. Any error of the tree.
    """
    scope, settings = request.scope, engine.settings
    exchange: Exchange = scope["state"]["exchange"]
    head, timings = exchange.head, exchange.timings
    query = Query.parse(scope["query_string"])
    reply_format = choose_format(head.get(b"accept"), query)
    packed = b"content-encoding" in head and is_packed(exchange.headers)
    timeout = Timeout(head, settings)
    ticket = exchange.ticket = engine.admission.admit(timeout.deadline, timings)
    data = await read_body(exchange, settings, ticket.reserve_bytes)
    timeout.restart()  # a slow network is not the server's
    exchange.timeout, ticket.deadline = timeout, timeout.deadline
    exchange.watch_client()
    if packed and data:
        with timings.step("unpack"):
            size = measure_unpacked(data, settings.max_body_bytes)
            ticket.reserve_bytes(size)
            unpack_all = partial(unpack, data, size, settings.max_body_bytes)
            data = await engine.run_in_thread(unpack_all, timeout.deadline)
    content_type = head.get(b"content-type", b"").decode("latin-1")
    media_type = get_media_type(content_type)
    raw = RawRequest(exchange.headers, content_type, media_type, query, data, reply_format)
    started = time.perf_counter()
    try:
        # A lone picture is only looked at later.
        at_once = media_type.startswith("image/") or (media_type != MULTIPART and is_short(parsed_bytes=len(data)))
        if at_once and is_short(parsed_bytes=len(query.text)):
            parsed = parse(raw, settings)
        else:
            parsed = await engine.run_in_thread(partial(parse, raw, settings), timeout.deadline)
    finally:
        timings.add_span("parse", started, time.perf_counter())
    timings.facts.model = engine.manager.find_name(parsed.model)
    if get_timeout is not None:
        timeout.shorten(get_timeout(parsed))
        ticket.deadline = timeout.deadline
    return parsed, ticket


async def encode_response(
    features: Features, request: ExtractRequest, sent: SentInputs, engine: Engine, ticket: Ticket
) -> Response:
    """Features as a reply, in the format that was asked for."""
    reply = request.reply
    started = time.perf_counter()
    try:
        limit = engine.settings.max_pixels
        pictures = list_pictures(request, sent, features, ticket, limit) if reply.format.is_picture else ()
        options = EncodeOptions(reply.encoding, reply.tiles, pictures)
        if is_short_reply(features) and not reply.format.is_picture:
            buffers = reply.format.encode(features, options)
        else:
            buffers = await engine.run_in_thread(partial(reply.format.encode, features, options), ticket.deadline)
    finally:
        ticket.timings.add_span("encode", started, time.perf_counter())
    return BuffersResponse(buffers, describe_features(features), reply.format.media_type)


def is_short_reply(features: Features) -> bool:
    """Whether encoding features takes less time than a way to another thread and back."""
    return is_short(results=len(features.arrays), written_numbers=features.numbers)


def list_pictures(
    request: ExtractRequest, sent: SentInputs, features: Features, ticket: Ticket, max_pixels: int
) -> tuple[SentPicture | None, ...]:
    """What the rows of an answer are pictures of, for those who show them; empty where rows are no single inputs.

    None stands for a TIFF, for what was no picture, or is at a URL and was not fetched before. Empty too where a
    library's own processor makes the rows: which part of a picture a model sees is not known then.
    """
    handle = ticket.handles.get(request.model)
    spec = handle.model.model_inputs.preprocess if handle is not None else None
    items = [item for index, item in sent.items if index not in features.skipped]
    if not isinstance(spec, PreprocessSpec) or len(items) != features.rows:
        return ()
    shown = [isinstance(item, ImageItem) and not item.is_tiff and item for item in items]
    return tuple(SentPicture(item.data, spec, max_pixels) if item else None for item in shown)


def describe_features(features: Features) -> dict[str, str]:
    """What the head of a reply says of its features."""
    headers = make_headers(features.fingerprint, features.errors)
    if features.verified:
        headers["X-Layertap-Verified"] = "true"
    if features.warnings:
        warnings = "; ".join(features.warnings)
        headers["X-Layertap-Warnings"] = warnings.encode("ascii", "replace").decode()  # a name that is cut ends in "…"
    if features.top_classes:
        headers["X-Layertap-Top-Classes"] = _format_top_classes(describe_top_classes(features)[0])
    return headers


def _format_top_classes(classes: Sequence[Mapping[str, Any]]) -> str:
    """The best classes of an input as JSON in ASCII, as many as a head has room for: proxies take few KiB of it."""
    shown = orjson.loads(orjson.dumps(classes[:MAX_CLASSES]))  # what is no number is null
    while len(text := json.dumps(shown)) > MAX_CLASSES_CHARACTERS:
        shown.pop()
    return text


def make_headers(fingerprint: str, faults: Sequence[Fault]) -> dict[str, str]:
    """What the head of every good reply says: the fingerprint, and which inputs were left out, where some were."""
    headers = {"X-Layertap-Fingerprint": fingerprint}
    if faults and (places := ",".join(map(str, list_skipped(faults)))):
        headers["X-Layertap-Skipped"] = places
    return headers
