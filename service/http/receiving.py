"""How a request arrives: its head is read, it is let in, its body is awaited, and that is parsed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.threads import is_short
from layertap.service.formats.table import FORMATS
from layertap.service.http.body import MULTIPART, is_packed, measure_unpacked, unpack
from layertap.service.http.exchange import Exchange
from layertap.service.http.parsing import PICTURE, Envelope, EnvelopeReader, make_envelope_reader
from layertap.service.http.timeout import FIELD, read_limit
from layertap.service.settings import Settings

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
