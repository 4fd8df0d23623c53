"""What routes that compute features share: the head of a request, its body, a reply in the format that it asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response

from layertap.models.errors import Fault, RequestError, TooLargeError
from layertap.models.selection.plan import Plan
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, Timings
from layertap.service.errors import DeadlineError, QueueTooLongError
from layertap.service.features import Features, list_skipped
from layertap.service.formats.negotiation import negotiate
from layertap.service.formats.reply_format import Encoding, ReplyFormat, check_names
from layertap.service.formats.table import FORMATS
from layertap.service.http import body as body_
from layertap.service.http.disconnect import run_while_connected
from layertap.service.http.parsing import EndpointSpec, ParsedBody, Query, RawRequest, parse_request
from layertap.service.http.timeout import Timeout
from layertap.service.schemas.bodies import RequestBody
from layertap.service.settings import Settings

SHORT = 2048  # bytes
FEW_NUMBERS = 4096
VERIFIED = {"X-Layertap-Verified": "true"}
FLAGS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class ReplyOptions:
    """What a request's head says about its answer."""

    format: ReplyFormat
    dry: bool
    timeout: Timeout
    timings: Timings
    reserve: Callable[[int], None]


@dataclass(frozen=True)
class ParsedRequest:
    """A request that was read: what it says, and what it means to the engine."""

    body: RequestBody
    ask: ExtractRequest
    wish: ReplyOptions
    fits: Size


Cook = Callable[[ParsedRequest], Awaitable[Response]]


async def handle_request(request: Request, dialect: EndpointSpec, cook: Cook) -> Response:
    """Read a request, and have it answered as long as there is somebody to answer."""
    engine: Engine = request.app.state.engine
    state = request.scope["state"]
    timings = Timings(state["timings"], state["notes"])
    query = Query.parse(request.scope["query_string"])
    format = negotiate(request.headers.get("accept"), query.get_one("format"), FORMATS)  # noqa: A001
    dry = _flag(query, "dry_run")
    timeout = Timeout.parse(request.headers, engine.settings)
    reserve = state["until_sent"].enter_context(engine.manager.budget.held())
    data = await body_.read_body(request, engine.settings, reserve)
    sent = RawRequest(request.headers, query, data, engine.settings, dialect)
    wish = ReplyOptions(format, dry, timeout, timings, reserve)

    async def work() -> Response:
        model = None
        try:
            order = await _order(engine, sent, wish)
            model = order.ask.model
            return await cook(order)
        except QueueTooLongError as error:
            timeout.explain(error)
            raise
        except DeadlineError as error:
            timeout.explain(error)
            error.retry_after = engine.manager.estimate_wait(model)
            raise

    return await run_while_connected(request, work())


async def encode_response(engine: Engine, features: Features, order: ParsedRequest) -> Response:
    """Features as a reply."""
    with order.wish.timings.step("encode"):
        encode = partial(order.wish.format.encode, features, order.body.encoding)
        if sum(array.size for array in features.arrays.values()) <= FEW_NUMBERS:
            data = encode()
        else:
            data = await engine.run_in_thread(encode, order.wish.timeout.deadline)
    headers = make_headers(features.fingerprint, features.errors) | (VERIFIED if features.verified else {})
    if features.warnings:
        told = "; ".join(features.warnings)
        headers["X-Layertap-Warnings"] = told.encode("ascii", "replace").decode()  # a name that is cut ends in "…"
    return Response(data, media_type=order.wish.format.media_type, headers=headers)


def make_headers(fingerprint: str, faults: Sequence[Fault]) -> dict[str, str]:
    """What the head of every good reply says: the fingerprint, and which inputs were left out, where some were."""
    places = ",".join(map(str, list_skipped(faults)))
    return {"X-Layertap-Fingerprint": fingerprint, **({"X-Layertap-Skipped": places} if places else {})}


async def _order(engine: Engine, sent: RawRequest, wish: ReplyOptions) -> ParsedRequest:
    with wish.timings.step("parse"):
        if _is_short(sent):
            command, ask = _read(sent, wish)
        else:
            command, ask = await engine.run_in_thread(lambda: _read(sent, wish), wish.timeout.deadline)
    if ask.faults and not ask.items:
        raise RequestError(ask.faults[0].detail, hint=ask.faults[0].hint, faults=ask.faults)
    if not ask.items and not wish.dry:
        raise RequestError("the request has no inputs", hint=sent.dialect.without_inputs)
    reserved = wish.format.reserved if ask.on_error == "skip" else frozenset[str]()
    return ParsedRequest(command.body, ask, wish, Size(wish.format, command.body.encoding, engine.settings, reserved))


def _read(sent: RawRequest, wish: ReplyOptions) -> tuple[ParsedBody, ExtractRequest]:
    command = parse_request(sent)
    body, layers = command.body, command.body.layer_request
    return command, ExtractRequest(
        model=body.model,
        items=command.items,
        selectors=layers.selectors,
        deadline=wish.timeout.deadline,
        interventions=layers.interventions,
        objective=layers.objective,
        resume=layers.resume,
        on_error=body.on_error,
        faults=command.faults,
        timings=wish.timings,
        isolated=body.isolated,
        verify=layers.verify,
        embedding=layers.embedding,
        priority=body.priority,
        reserve=wish.reserve,
    )


def _is_short(sent: RawRequest) -> bool:
    """Whether reading takes less time than a way to another thread and back: a lone picture is only looked at later."""
    kind = sent.media_type
    short = kind.startswith("image/") or (len(sent.data) <= SHORT and kind != "multipart/form-data")
    return short and len(sent.query.text) <= SHORT


class Size:
    """Refuses replies that the format has no place for, or that are over the limit, by what the plan predicts."""

    def __init__(
        self,
        format: ReplyFormat,  # noqa: A002
        encoding: Encoding,
        settings: Settings,
        reserved: frozenset[str],
    ) -> None:
        self._format = format
        self._reserved = reserved
        self._encoding: Encoding = encoding
        self._limit = settings.max_reply_bytes

    def __call__(self, plan: Plan, rows: int) -> None:
        """TooLargeError where the reply to a plan for so many rows would be over the limit; RequestError for a name."""
        check_names((result.key for result in plan.results), self._reserved)
        size = self._format.estimate_bytes(self._encoding, plan.count_numbers(rows), plan.nbytes(rows))
        if size > self._limit:
            raise TooLargeError(
                f"the reply would have about {size} bytes, the limit is {self._limit}",
                hint="pool the layers, or ask for fewer" + (", or send fewer inputs at once" if rows > 1 else ""),
            )


def _flag(query: Query, name: str) -> bool:
    given = query.get_one(name)
    found = FLAGS.get("false" if given is None else given.lower())
    if found is None:
        raise RequestError(f"'{name}' is true or false")
    return found
