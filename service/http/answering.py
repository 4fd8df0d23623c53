"""What routes that compute features share: the head of a request, its body, a reply in the format that it asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response

from layertap.models.errors import Fault, RequestError, TooLargeError
from layertap.models.plan import Plan
from layertap.service.engine.engine import Engine
from layertap.service.engine.job import Ask, Timings
from layertap.service.errors import DeadlineError, QueueTooLongError
from layertap.service.features import Features, skipped
from layertap.service.http import body as body_
from layertap.service.http.command import Command, Dialect, Query, Sent, read
from layertap.service.http.connection import while_connected
from layertap.service.http.timeout import Timeout
from layertap.service.schemas import RequestBody
from layertap.service.settings import Settings
from layertap.service.wire import FORMATS, Encoding, Format, check_names, predicted_bytes
from layertap.service.wire.negotiate import choose

SHORT = 2048  # bytes
FEW_NUMBERS = 4096
VERIFIED = {"X-Layertap-Verified": "true"}
FLAGS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Wish:
    """What a request's head says about its answer."""

    format: Format
    dry: bool
    timeout: Timeout
    timings: Timings
    reserve: Callable[[int], None]


@dataclass(frozen=True)
class Order:
    """A request that was read: what it says, and what it means to the engine."""

    body: RequestBody
    ask: Ask
    wish: Wish
    fits: Size


Cook = Callable[[Order], Awaitable[Response]]


async def answered(request: Request, dialect: Dialect, cook: Cook) -> Response:
    """Read a request, and have it answered as long as there is somebody to answer."""
    engine: Engine = request.app.state.engine
    state = request.scope["state"]
    timings = Timings(state["timings"], state["notes"])
    query = Query.of(request.scope["query_string"])
    format = choose(request.headers.get("accept"), query.one("format"), FORMATS)  # noqa: A001
    dry = _flag(query, "dry_run")
    timeout = Timeout.of(request.headers, engine.settings)
    reserve = state["until_sent"].enter_context(engine.fleet.budget.held())
    data = await body_.read(request, engine.settings, reserve)
    sent = Sent(request.headers, query, data, engine.settings, dialect)
    wish = Wish(format, dry, timeout, timings, reserve)

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
            error.retry_after = engine.fleet.wait(model)
            raise

    return await while_connected(request, work())


async def encoded(engine: Engine, features: Features, order: Order) -> Response:
    """Features as a reply."""
    with order.wish.timings.step("encode"):
        encode = partial(order.wish.format.encode, features, order.body.encoding)
        if sum(array.size for array in features.arrays.values()) <= FEW_NUMBERS:
            data = encode()
        else:
            data = await engine.off_loop(encode, order.wish.timeout.deadline)
    headers = headers_of(features.fingerprint, features.errors) | (VERIFIED if features.verified else {})
    if features.warnings:
        told = "; ".join(features.warnings)
        headers["X-Layertap-Warnings"] = told.encode("ascii", "replace").decode()  # a name that is cut ends in "…"
    return Response(data, media_type=order.wish.format.media_type, headers=headers)


def headers_of(fingerprint: str, faults: Sequence[Fault]) -> dict[str, str]:
    """What the head of every good reply says: the fingerprint, and which inputs were left out, where some were."""
    places = ",".join(map(str, skipped(faults)))
    return {"X-Layertap-Fingerprint": fingerprint, **({"X-Layertap-Skipped": places} if places else {})}


async def _order(engine: Engine, sent: Sent, wish: Wish) -> Order:
    with wish.timings.step("parse"):
        if _is_short(sent):
            command, ask = _read(sent, wish)
        else:
            command, ask = await engine.off_loop(lambda: _read(sent, wish), wish.timeout.deadline)
    if ask.faults and not ask.items:
        raise RequestError(ask.faults[0].detail, hint=ask.faults[0].hint, faults=ask.faults)
    if not ask.items and not wish.dry:
        raise RequestError("the request has no inputs", hint=sent.dialect.without_inputs)
    reserved = wish.format.reserved if ask.on_error == "skip" else frozenset[str]()
    return Order(command.body, ask, wish, Size(wish.format, command.body.encoding, engine.settings, reserved))


def _read(sent: Sent, wish: Wish) -> tuple[Command, Ask]:
    command = read(sent)
    body, wanted = command.body, command.body.wanted
    return command, Ask(
        model=body.model,
        items=command.items,
        selectors=wanted.selectors,
        deadline=wish.timeout.deadline,
        interventions=wanted.interventions,
        objective=wanted.objective,
        resume=wanted.resume,
        on_error=body.on_error,
        faults=command.faults,
        timings=wish.timings,
        isolated=body.isolated,
        verify=wanted.verify,
        embedding=wanted.embedding,
        priority=body.priority,
        reserve=wish.reserve,
    )


def _is_short(sent: Sent) -> bool:
    """Whether reading takes less time than a way to another thread and back: a lone picture is only looked at later."""
    kind = sent.media_type
    short = kind.startswith("image/") or (len(sent.data) <= SHORT and kind != "multipart/form-data")
    return short and len(sent.query.text) <= SHORT


class Size:
    """Refuses replies that the format has no place for, or that are over the limit, by what the plan predicts."""

    def __init__(
        self,
        format: Format,  # noqa: A002
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
        size = predicted_bytes(self._format, self._encoding, plan.numbers(rows), plan.nbytes(rows))
        if size > self._limit:
            raise TooLargeError(
                f"the reply would have about {size} bytes, the limit is {self._limit}",
                hint="pool the layers, or ask for fewer" + (", or send fewer inputs at once" if rows > 1 else ""),
            )


def _flag(query: Query, name: str) -> bool:
    given = query.one(name)
    found = FLAGS.get("false" if given is None else given.lower())
    if found is None:
        raise RequestError(f"'{name}' is true or false")
    return found
