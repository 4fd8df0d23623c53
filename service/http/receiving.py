"""Receives a request: reads its envelope, admits it, reads its body and has that parsed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import orjson

from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.short_work import is_short
from layertap.service.formats.negotiation import negotiate
from layertap.service.formats.table import FORMATS, ReplyFormat
from layertap.service.http.body import JSON, LONG_JSON, MULTIPART, measure_unpacked, read_coding, unpack
from layertap.service.http.exchange import Exchange
from layertap.service.http.query import Query
from layertap.service.settings import Settings

MAX_KEPT, MAX_KEPT_BYTES = 256, 2048  # requests that are remembered, and the length of what they ask
MEDIA, TEXT = "image/*", "text/plain"
FAMILIES = ("image/", "audio/", "video/")  # whose files all are MEDIA


@dataclass(frozen=True, eq=False)
class Envelope:
    """The parts of a request around its body. Clients send the same ones over and over, so most are kept."""

    media_type: str  # the content type without parameters, in small letters; ``MEDIA`` for any picture, sound or video
    text: bytes  # the query
    query: Query
    format: ReplyFormat
    asked: dict[Hashable, ExtractRequest] = field(default_factory=dict)  # requests in the query, by all else
    is_kept: bool = True
    content_type: str = ""  # with parameters, for types whose parameters matter


EnvelopeReader = Callable[[bytes, bytes, bytes], Envelope]


def make_envelope_reader(formats: Mapping[str, ReplyFormat]) -> EnvelopeReader:
    """A reader of ``Accept``, ``Content-Type`` and a query, for a route with these formats of replies.

    The reader raises NotAcceptableError, RequestError.
    """
    types = {name: each.media_type for name, each in formats.items()}

    def read(accept: bytes, media: bytes, text: bytes) -> Envelope:
        query = Query(text)
        reply_format = formats[negotiate(accept.decode("latin-1"), query.get_one("format"), types)]
        media_type = media.decode("latin-1").strip(" \t").lower()
        return Envelope(MEDIA if media_type.startswith(FAMILIES) else media_type, text, query, reply_format)

    read_kept = lru_cache(maxsize=MAX_KEPT)(read)

    def read_envelope(accept: bytes, content_type: bytes, text: bytes) -> Envelope:
        media, _, parameters = content_type.partition(b";")
        if len(accept) + len(media) + len(text) <= MAX_KEPT_BYTES:
            envelope = read_kept(accept, media, text)
        else:
            envelope = replace(read(accept, media, text), is_kept=False)
        if parameters and envelope.media_type in (MULTIPART, TEXT):  # a boundary is another one each time
            return replace(envelope, content_type=content_type.decode("latin-1"))
        return envelope

    return read_envelope


def write_rest(document: Mapping[str, Any], *inputs: str) -> bytes | None:
    """A document without the fields of its ``inputs``; None if the rest is too long to keep, or nested too deep."""
    try:
        rest = orjson.dumps({name: each for name, each in document.items() if name not in inputs})
    except orjson.JSONEncodeError:
        return None
    return rest if len(rest) <= MAX_KEPT_BYTES else None


# The request first, whatever the protocol, then its inputs.
P = TypeVar("P", bound=tuple[ExtractRequest, *tuple[Any, ...]])
Parser = Callable[[Envelope, bytes, Settings], P]
read_any = make_envelope_reader(FORMATS)


async def receive(exchange: Exchange, parse: Parser[P], read_envelope: EnvelopeReader = read_any) -> tuple[P, Ticket]:
    """The parsed request and its ticket, which the exchange releases; any error of the tree.

    The request is cancelled if its client leaves before the reply begins (ClientGoneError).
    """
    engine, head, timings = exchange.engine, exchange.head, exchange.timings
    settings = engine.settings
    text = exchange.scope["query_string"]
    envelope = read_envelope(head.get(b"accept", b""), head.get(b"content-type", b""), text)
    coding = read_coding(exchange.headers) if b"content-encoding" in head else None
    seconds = exchange.read_limit()
    ticket = exchange.ticket = engine.admission.admit(time.monotonic() + seconds, timings)
    data = await exchange.read_body(ticket.reserve_bytes)
    ticket.deadline = time.monotonic() + seconds  # the time on a slow network does not count
    exchange.watch_client()
    if coding and data:
        limit = settings.max_body_bytes
        with timings.step("unpack"):
            size = await engine.run_in_thread(partial(measure_unpacked, data, coding, limit), ticket.deadline)
            ticket.reserve_bytes(size)
            data = await engine.run_in_thread(partial(unpack, data, coding, size, limit), ticket.deadline)
    started = time.perf_counter()
    media_type = envelope.media_type
    try:
        # A picture, a sound or a video is decoded later.
        at_once = media_type == MEDIA or (media_type != MULTIPART and is_short(parsed_bytes=len(data)))
        if at_once and envelope.is_kept:
            parsed = parse(envelope, data, settings)
        else:
            run = engine.parse_long if media_type == JSON and len(data) > LONG_JSON else engine.run_in_thread
            parsed = await run(partial(parse, envelope, data, settings), ticket.deadline)
    finally:
        timings.add_span("parse", started, time.perf_counter())
    timings.facts.model = engine.manager.find_name(parsed[0].model)
    return parsed, ticket
