"""How a request arrives: its head is read, it is let in, its body is awaited, and that is parsed."""

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
from layertap.service.http.body import MULTIPART, is_packed, measure_unpacked, unpack
from layertap.service.http.exchange import Exchange
from layertap.service.http.query import Query
from layertap.service.http.timeout import FIELD, read_limit
from layertap.service.settings import Settings

MAX_KEPT, MAX_KEPT_BYTES = 256, 2048  # requests that are remembered, and how long what they ask may be
PICTURE, TEXT = "image/*", "text/plain"


@dataclass(frozen=True, eq=False)
class Envelope:
    """What stands around a body: its type, the query, and the format in which the reply is wanted.

    ``media_type`` is the content type without parameters, in small letters, ``PICTURE`` for any picture;
    ``content_type`` has them, where they matter. Clients send the same over and over, so most are kept: ``asked`` has
    what the query ``text`` asks for, by all else that decides that.
    """

    media_type: str
    text: bytes
    query: Query
    format: ReplyFormat
    asked: dict[Hashable, ExtractRequest] = field(default_factory=dict)
    is_kept: bool = True
    content_type: str = ""


EnvelopeReader = Callable[[bytes, bytes, bytes], Envelope]


def make_envelope_reader(formats: Mapping[str, ReplyFormat]) -> EnvelopeReader:
    """Makes what reads ``Accept``, ``Content-Type`` and a query, for a route with these formats of replies.

    What it returns raises NotAcceptableError, RequestError.
    """
    types = {name: each.media_type for name, each in formats.items()}

    def read(accept: bytes, media: bytes, text: bytes) -> Envelope:
        query = Query(text)
        reply_format = formats[negotiate(accept.decode("latin-1"), query.get_one("format"), types)]
        media_type = media.decode("latin-1").strip(" \t").lower()
        return Envelope(PICTURE if media_type.startswith("image/") else media_type, text, query, reply_format)

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
    """What a document says beside the fields of its ``inputs``; None if that is too long, or nested too deep."""
    try:
        rest = orjson.dumps({name: each for name, each in document.items() if name not in inputs})
    except orjson.JSONEncodeError:
        return None
    return rest if len(rest) <= MAX_KEPT_BYTES else None


# What is asked first, whatever the protocol, then what was sent.
P = TypeVar("P", bound=tuple[ExtractRequest, *tuple[Any, ...]])
Parser = Callable[[Envelope, bytes, Settings], P]
read_any = make_envelope_reader(FORMATS)


async def receive(exchange: Exchange, parse: Parser[P], read_envelope: EnvelopeReader = read_any) -> tuple[P, Ticket]:
    """A request that has arrived, parsed, and its place in the server; a long one is parsed in a thread.

    Until its reply begins the request is cancelled where the client goes away (ClientGoneError); what it raises for
    want of time says how much there was. The place is given back once the reply is sent. Any error of the tree.
    """
    engine, head, timings = exchange.engine, exchange.head, exchange.timings
    settings = engine.settings
    text = exchange.scope["query_string"]
    envelope = read_envelope(head.get(b"accept", b""), head.get(b"content-type", b""), text)
    packed = b"content-encoding" in head and is_packed(exchange.headers)
    own = exchange.limit = read_limit(head, settings) if FIELD in head else None
    seconds = own.seconds if own is not None else settings.deadline_s
    ticket = exchange.ticket = engine.admission.admit(time.monotonic() + seconds, timings)
    data = await exchange.read_body(ticket.reserve_bytes)
    ticket.deadline = time.monotonic() + seconds  # a slow network is not the server's
    exchange.watch_client()
    if packed and data:
        with timings.step("unpack"):
            size = measure_unpacked(data, settings.max_body_bytes)
            ticket.reserve_bytes(size)
            unpack_all = partial(unpack, data, size, settings.max_body_bytes)
            data = await engine.run_in_thread(unpack_all, ticket.deadline)
    started = time.perf_counter()
    try:
        # A lone picture is only looked at later.
        at_once = envelope.media_type == PICTURE or (
            envelope.media_type != MULTIPART and is_short(parsed_bytes=len(data))
        )
        if at_once and envelope.is_kept:
            parsed = parse(envelope, data, settings)
        else:
            parsed = await engine.run_in_thread(partial(parse, envelope, data, settings), ticket.deadline)
    finally:
        timings.add_span("parse", started, time.perf_counter())
    timings.facts.model = engine.manager.find_name(parsed[0].model)
    return parsed, ticket
