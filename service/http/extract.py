"""``POST /extract``: read, prepare, run, encode."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from models.catalog import BACKWARD
from models.errors import RequestError, TooLargeError
from models.plan import Plan
from models.points import path_text
from service.engine.engine import Engine
from service.engine.job import Ask, Job, Timings
from service.http import body as body_
from service.http.command import Command, Sent, read
from service.http.connection import while_connected
from service.http.errors import entry
from service.http.openapi import EXTRACT
from service.settings import Settings
from service.wire import FORMATS, Encoding, Format, predicted_bytes
from service.wire.negotiate import choose

router = APIRouter()
SHORT = 2048  # bytes
FEW_NUMBERS = 4096
FLAGS = {"true": True, "1": True, "false": False, "0": False}


@router.post(
    "/extract", tags=["extract"], summary="What layers of a model compute for your inputs", openapi_extra=EXTRACT
)
async def extract(request: Request) -> Response:
    """Name layers, send inputs, get what these layers take or return, raw or pooled."""
    engine: Engine = request.app.state.engine
    settings = engine.settings
    state = request.scope["state"]
    timings = Timings(state["timings"], state["notes"])
    format = choose(request.headers.get("accept"), request.query_params.get("format"), FORMATS)  # noqa: A001
    dry = _flag(request, "dry_run")
    deadline = time.monotonic() + _seconds(request, settings)
    reserve = state["until_sent"].enter_context(engine.fleet.budget.held())
    data = await body_.read(request, settings, reserve)
    sent = Sent(request.headers, request.query_params, data, settings)
    return await while_connected(request, _answer(engine, sent, _Wish(format, dry, deadline, timings, reserve)))


@dataclass(frozen=True)
class _Wish:
    """What a request's head says about its answer; ``deadline`` is on the monotonic clock."""

    format: Format
    dry: bool
    deadline: float
    timings: Timings
    reserve: Callable[[int], None]


async def _answer(engine: Engine, sent: Sent, wish: _Wish) -> Response:
    with wish.timings.step("parse"):
        if _is_short(sent):
            command, ask = _read(sent, wish)
        else:
            command, ask = await engine.off_loop(lambda: _read(sent, wish), wish.deadline)
    check = _Size(wish.format, command.body.encoding, engine.settings)
    if ask.faults and not ask.items:
        raise RequestError(ask.faults[0].detail, hint=ask.faults[0].hint, faults=ask.faults)
    if wish.dry:
        return _estimate(await engine.prepare(ask, check))
    if not ask.items:
        raise RequestError("the request has no inputs", hint="add some, or ask for ?dry_run=true")
    features = await engine.extract(ask, check)
    with wish.timings.step("encode"):
        encode = partial(wish.format.encode, features, command.body.encoding)
        if sum(array.size for array in features.arrays.values()) <= FEW_NUMBERS:
            data = encode()
        else:
            data = await engine.off_loop(encode, wish.deadline)
    return Response(data, media_type=wish.format.media_type, headers={"X-Layertap-Fingerprint": features.fingerprint})


def _is_short(sent: Sent) -> bool:
    """Whether reading takes less time than a way to another thread and back: a lone picture is only looked at later."""
    kind = sent.headers.get("content-type", "")
    short = kind.startswith("image/") or (len(sent.data) <= SHORT and not kind.startswith("multipart/"))
    return short and len(str(sent.query)) <= SHORT


class _Size:
    """Refuses replies over the limit, by what the plan predicts."""

    def __init__(self, format: Format, encoding: Encoding, settings: Settings) -> None:  # noqa: A002
        self._format = format
        self._encoding: Encoding = encoding
        self._limit = settings.max_reply_bytes

    def __call__(self, plan: Plan, rows: int) -> None:
        size = predicted_bytes(self._format, self._encoding, plan.numbers(rows), plan.nbytes(rows))
        if size > self._limit:
            raise TooLargeError(
                f"the reply would have about {size} bytes, the limit is {self._limit}",
                hint="pool the layers, ask for fewer, or send fewer inputs at once",
            )


def _read(sent: Sent, wish: _Wish) -> tuple[Command, Ask]:
    command = read(sent)
    body = command.body
    return command, Ask(
        model=body.model,
        items=command.items,
        selectors=body.selectors(),
        deadline=wish.deadline,
        interventions=body.changes(),
        objective=body.goal(),
        on_error=body.on_error,
        faults=command.faults,
        timings=wish.timings,
        isolated=body.isolated,
        priority=body.priority,
        reserve=wish.reserve,
    )


def _estimate(job: Job) -> Response:
    """What a request would get, with no forward."""
    plan, rows, catalog = job.plan, job.rows, job.catalog
    stop = plan.stops_at
    body: dict[str, Any] = {
        "model": job.model.spec.name,
        "fingerprint": job.fingerprint,
        "rows": rows,
        "features": {
            result.key: {
                "shape": result.capture.shape(rows),
                "dtype": result.capture.dtype,
                "bytes": result.capture.nbytes(rows),
            }
            for result in plan.results
        },
        "bytes": plan.nbytes(rows),
        "stops_at": f"{stop.layer}#{stop.call}{path_text(stop.path)}:{stop.site}",
        "cost": plan.cost,
        "seconds": round((BACKWARD if plan.has_graph else 1.0) * plan.cost * catalog.seconds * rows, 6),
        "warnings": list(_warnings(job)),
        "errors": [entry(fault) for fault in job.faults],
    }
    headers = {"X-Layertap-Fingerprint": job.fingerprint}
    return Response(orjson.dumps(body), media_type="application/json", headers=headers)


def _warnings(job: Job) -> list[str]:
    warnings = []
    if job.plan.skipped:
        names = ", ".join(job.plan.skipped[:10]) + (" …" if len(job.plan.skipped) > 10 else "")
        warnings.append(f"{len(job.plan.skipped)} matching layers never run in a forward and are left out: {names}")
    if not job.catalog.rowwise:
        warnings.append("rows of this model affect each other, or it takes one at a time: each input runs alone")
    return warnings


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in FLAGS:
        raise RequestError(f"'{name}' is true or false")
    return FLAGS[value]


def _seconds(request: Request, settings: Settings) -> float:
    """How long the answer may take: the caller's wish, at most the server's own limit."""
    text = request.headers.get("x-request-timeout")
    if text is None:
        return settings.deadline_s
    try:
        seconds = float(text[:32])
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise RequestError("X-Request-Timeout is a number of seconds above 0")
    return min(seconds, settings.deadline_s)
