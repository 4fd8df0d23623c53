"""``POST /sweep`` and ``/optimise``: read, prepare, run, encode; optionally with events of the progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

import orjson
from fastapi import APIRouter, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from layertap.models.errors import LayertapError
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.admit.planned_work import OnProgress
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.explain import optimising, sweeping
from layertap.service.features import Features
from layertap.service.formats import json
from layertap.service.formats.buffers import Buffers
from layertap.service.formats.table import FORMATS, ReplyFormat
from layertap.service.http.exchange import Exchange, ExchangeDependency
from layertap.service.http.openapi import COMPUTED, Responses, describe_inputs
from layertap.service.http.parsing import parse_request
from layertap.service.http.problems import describe_error, encode_problem
from layertap.service.http.receiving import Parser, make_envelope_reader, receive
from layertap.service.http.reply import encode_response
from layertap.service.schemas.bodies import OptimiseBody, SweepBody
from layertap.service.schemas.examples import OPTIMISE, SWEEP
from layertap.service.schemas.replies import FeaturesReply

P = TypeVar("P")
EVENTS = "text/event-stream"
EVENTS_FORMAT = ReplyFormat("events", EVENTS, json.encode, json.list_codings, json.INSTEAD, binary=False)
read_envelope = make_envelope_reader({**FORMATS, EVENTS_FORMAT.name: EVENTS_FORMAT})
EVENT_STREAM = {"schema": {"type": "string", "description": "events progress, then result or error"}}
RESPONSES: Responses = {
    **COMPUTED,
    200: {**COMPUTED[200], "content": {**COMPUTED[200]["content"], EVENTS: EVENT_STREAM}},
}
router = APIRouter()


@router.post(
    "/sweep",
    tags=["extract"],
    summary="The effect of one edit, tried at each layer, channel, head or token",
    response_model=FeaturesReply,
    responses=RESPONSES,
    openapi_extra=describe_inputs(SweepBody, SWEEP),
)
async def sweep(exchange: ExchangeDependency) -> Response:
    """Ablate, scale, patch or add noise at one place after another; get a metric for each, and the largest effects."""
    return await answer(exchange, partial(parse_request, kind=SweepBody), sweeping.prepare, sweeping.run)


@router.post(
    "/optimise",
    tags=["explain"],
    summary="Inputs that are changed step by step to raise an objective",
    response_model=FeaturesReply,
    responses=RESPONSES,
    openapi_extra=describe_inputs(OptimiseBody, OPTIMISE),
)
async def optimise(exchange: ExchangeDependency) -> Response:
    """Visualise a feature, invert one, dream, or make an adversarial picture; get the objective at each step."""
    return await answer(exchange, partial(parse_request, kind=OptimiseBody), optimising.prepare, optimising.run)


async def answer(
    exchange: Exchange,
    parse: Parser[tuple[ExtractRequest, SentInputs]],
    prepare: Callable[[Engine, ExtractRequest, SentInputs, Ticket], Awaitable[P]],
    run: Callable[[Engine, P, Ticket, OnProgress], Awaitable[Features]],
) -> Response:
    """The reply to a request of a route; what ``prepare`` refuses is no event."""
    engine = exchange.engine
    (asked, sent), ticket = await receive(exchange, parse, read_envelope)
    compute = partial(run, engine, await prepare(engine, asked, sent, ticket), ticket)
    if asked.reply.format.name == EVENTS_FORMAT.name:
        exchange.keeps_watching = True  # the head is not all of the reply
        return EventsResponse(list_events(exchange, asked, ticket, compute), headers={"x-accel-buffering": "no"})
    features = await compute(lambda done, count: None)
    return await encode_response(features, asked, sent, engine, ticket)


class EventsResponse(StreamingResponse):
    """A reply of events, without Starlette's task that waits for a disconnect: the exchange watches the client."""

    media_type = EVENTS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, or the client leaves: ClientGoneError."""
        await self.stream_response(send)


async def list_events(
    exchange: Exchange,
    asked: ExtractRequest,
    ticket: Ticket,
    compute: Callable[[OnProgress], Awaitable[Features]],
) -> AsyncIterator[bytes | memoryview]:
    """Events ``progress``, then ``result`` with the reply's JSON, or ``error`` with a problem."""
    newest, changed = {"done": 0, "total": 0}, asyncio.Event()

    def note(done: int, total: int) -> None:
        newest.update(done=done, total=total)  # a slow reader does not get all of them
        changed.set()

    async def compute_reply() -> Buffers:
        encode = partial(json.encode, await compute(note), asked.reply)
        return await exchange.engine.run_in_thread(encode, ticket.deadline)

    computing = asyncio.ensure_future(compute_reply())
    computing.add_done_callback(lambda _: changed.set())
    try:
        while not computing.done():
            await changed.wait()
            changed.clear()
            if newest["total"]:
                yield b"event: progress\ndata: %b\n\n" % orjson.dumps(newest)
        result = computing.result()
        await exchange.end_work(sum(map(len, result)))
        for piece in (b"event: result\ndata: ", *result, b"\n\n"):
            yield piece
    except Exception as error:
        exchange.explain(error)
        problem = encode_problem(describe_error(error, exchange.facts.request_id))
        yield b"event: error\ndata: %b\n\n" % bytes(problem.body)
        if not isinstance(error, LayertapError):  # for the log
            raise
    finally:
        computing.cancel()
