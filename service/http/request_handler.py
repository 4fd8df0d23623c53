"""What routes that compute have in common: a request that arrives, and features as a reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from layertap.models.errors import Fault
from layertap.models.spec import PreprocessSpec
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.errors import ClientGoneError, DeadlineError, QueueTooLongError
from layertap.service.features import Features, list_skipped
from layertap.service.formats.buffers import EncodeOptions
from layertap.service.formats.negotiation import negotiate
from layertap.service.formats.plain_data import describe_top_classes
from layertap.service.formats.table import FORMATS, ReplyFormat
from layertap.service.http.body import is_packed, measure_unpacked, read_body, unpack
from layertap.service.http.buffers_response import make_response
from layertap.service.http.parsing import RawRequest
from layertap.service.http.query import Query
from layertap.service.http.timeout import Timeout
from layertap.service.inputs.items import ImageItem
from layertap.service.pictures.overlay import SentPicture
from layertap.service.settings import Settings
from layertap.service.timings import Timings

SHORT = 2048  # bytes
MAX_CLASSES, MAX_CLASSES_CHARACTERS = 64, 1536
FEW_NUMBERS, FEW_RESULTS = 4096, 64


class ParsedRequest(Protocol):
    """What a body asks for, whatever protocol it is of."""

    @property
    def model(self) -> str | None:
        """The model's name; None is the default one."""


P = TypeVar("P", bound=ParsedRequest)
Parser = Callable[[RawRequest, Settings], P]


@asynccontextmanager
async def receive(
    request: Request,
    engine: Engine,
    parse: Parser[P],
    formats: Mapping[str, ReplyFormat] = FORMATS,
    get_timeout: Callable[[P], float | None] = lambda parsed: None,
) -> AsyncIterator[tuple[P, Ticket]]:
    """A request that has arrived, parsed, and its place in the server; a long one is parsed in a thread.

    ``get_timeout`` tells how many seconds a body itself allows.

    The block is cancelled where the client goes away (ClientGoneError); what it raises for want of time says how much
    there was, by ``timeout`` of the request's state. The place is given back once the reply is sent. Any error of the
    tree.
    """
    state = request.scope["state"]
    query = Query.parse(request.scope["query_string"])
    types = {name: each.media_type for name, each in formats.items()}
    reply_format = formats[negotiate(request.headers.get("accept"), query.get_one("format"), types)]
    packed = is_packed(request.headers)
    timeout = state["timeout"] = Timeout(request.headers, engine.settings)
    timings: Timings = state["timings"]
    ticket = state["until_sent"].enter_context(engine.admission.admit(timeout.deadline, timings))
    data = await read_body(request, engine.settings, ticket.reserve_bytes)
    timeout.restart()  # a slow network is not the server's
    ticket.deadline = timeout.deadline
    model = None
    async with cancel_on_disconnect(request):
        try:
            if packed and data:
                with timings.step("unpack"):
                    limit = engine.settings.max_body_bytes
                    size = measure_unpacked(data, limit)
                    ticket.reserve_bytes(size)
                    data = await engine.run_in_thread(partial(unpack, data, size, limit), timeout.deadline)
            raw = RawRequest(request.headers, query, data, reply_format, timings)
            parsed = await _parse(raw, parse, engine, timeout.deadline)
            model = parsed.model
            timings.facts.model = engine.manager.find_name(model)
            timeout.shorten(get_timeout(parsed))
            ticket.deadline = timeout.deadline
            yield parsed, ticket
        except (DeadlineError, QueueTooLongError) as error:
            explain_lateness(error, timeout, engine, model)
            raise


def explain_lateness(error: Exception, timeout: Timeout, engine: Engine, model: str | None) -> None:
    """Add the time limit and a retry delay to a timeout error; other errors stay as they are."""
    if isinstance(error, DeadlineError | QueueTooLongError):
        timeout.explain(error)
    if isinstance(error, DeadlineError):
        error.retry_after = engine.estimate_wait(model)


async def encode_response(
    features: Features, request: ExtractRequest, sent: SentInputs, engine: Engine, ticket: Ticket
) -> Response:
    """Features as a reply, in the format that was asked for."""
    reply = request.reply
    with ticket.timings.step("encode"):
        limit = engine.settings.max_pixels
        pictures = list_pictures(request, sent, features, ticket, limit) if reply.format.is_picture else ()
        encode = partial(reply.format.encode, features, EncodeOptions(reply.encoding, reply.tiles, pictures))
        if is_short(features) and not reply.format.is_picture:
            buffers = encode()
        else:
            buffers = await engine.run_in_thread(encode, ticket.deadline)
    return make_response(buffers, describe_features(features), reply.format.media_type)


def is_short(features: Features) -> bool:
    """Whether encoding features takes less time than a way to another thread and back."""
    return features.has_at_most(FEW_RESULTS, FEW_NUMBERS)


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
    places = ",".join(map(str, list_skipped(faults)))
    return {"X-Layertap-Fingerprint": fingerprint, **({"X-Layertap-Skipped": places} if places else {})}


async def _parse(raw: RawRequest, parse: Parser[P], engine: Engine, deadline: float) -> P:
    with raw.timings.step("parse"):
        if _is_short(raw):
            return parse(raw, engine.settings)
        return await engine.run_in_thread(partial(parse, raw, engine.settings), deadline)


def _is_short(raw: RawRequest) -> bool:
    """Whether reading takes less time than a way to another thread and back: a lone picture is only looked at later."""
    media_type = raw.media_type
    short = media_type.startswith("image/") or (len(raw.data) <= SHORT and media_type != "multipart/form-data")
    return short and len(raw.query.text) <= SHORT


@asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel the block as soon as the client is gone: ClientGoneError then.

    The body must have been read: all that is received after it is the end of the connection. Our own protocol calls
    what is in ``on_disconnect`` of the state then, which costs less than a task that waits for it.
    """
    task, disconnected = asyncio.current_task(), False
    assert task is not None  # noqa: S101  (a coroutine that runs is some task's)

    def leave() -> None:
        nonlocal disconnected
        disconnected = True
        task.cancel()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        leave()

    listeners: set[Callable[[], None]] | None = request.scope["state"].get("on_disconnect")
    watcher = asyncio.ensure_future(watch()) if listeners is None else None
    if listeners is not None:
        listeners.add(leave)
    try:
        yield
    except asyncio.CancelledError:
        # As asyncio.timeout does it: whoever else cancelled the task is heard.
        if disconnected and not task.uncancel():
            raise ClientGoneError("the client closed the connection") from None
        raise
    finally:
        if watcher is not None:
            watcher.cancel()
        if listeners is not None:
            listeners.discard(leave)
