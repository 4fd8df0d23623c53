"""How long an answer may take: as the caller allows by ``X-Request-Timeout``, and never longer than the server does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from layertap.models.errors import RequestError
from layertap.service.engine.engine import Engine
from layertap.service.errors import DeadlineError, QueueTooLongError
from layertap.service.settings import Settings

HEADER, FIELD = "X-Request-Timeout", b"x-request-timeout"
SEND_FEWER = "come again later, or ask for less: fewer inputs, or places of a sweep"


@dataclass(frozen=True)
class TimeLimit:
    """Seconds that a caller gives an answer, fewer than the server does, and what said so."""

    seconds: float
    source: str = HEADER


def read_limit(head: Mapping[bytes, bytes], settings: Settings) -> TimeLimit | None:
    """What a request's head allows; None where that is no less than the server does. RequestError."""
    if FIELD not in head:
        return None
    try:
        seconds = float(head[FIELD][:32])
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise RequestError(f"{HEADER} is a number of seconds above 0", hint="write it like 2.5, or leave it out")
    return TimeLimit(seconds) if seconds < settings.deadline_s else None


def explain_delay(
    error: Exception, own: TimeLimit | None, engine: Engine, model: str | None, otherwise: str = SEND_FEWER
) -> None:
    """Have the error of a late request say whose limit it met, what helps, and when to come again.

    ``own``: the caller's limit. More time helps where the server allows it. What the error itself knows to help stays;
    so do other errors.
    """
    longest = engine.settings.deadline_s
    if isinstance(error, DeadlineError):
        error.retry_after = engine.estimate_wait(model)
    elif not isinstance(error, QueueTooLongError):
        return
    if own is None:
        error.detail += f" (this server's limit of {longest:g} s)"
    else:
        error.detail += f" (the {own.source} of {own.seconds:g} s)"
        if error.needed_s <= longest:
            other = error.hint or "come again later"
            error.hint = f"allow more time by {own.source}, at most {longest:g} s, or {other}"
    error.hint = error.hint or otherwise


async def get_engine(request: Request) -> Engine:
    """The app's engine. A coroutine: FastAPI would call a plain function in another thread."""
    engine: Engine = request.app.state.engine
    return engine


EngineDependency = Annotated[Engine, Depends(get_engine)]


@contextmanager
def limit_time(head: Mapping[bytes, bytes], engine: Engine, model: str | None) -> Iterator[float]:
    """Until when the answer to a request with that head may take, on the monotonic clock; RequestError.

    A DeadlineError from the block says whose limit that was.
    """
    own = read_limit(head, engine.settings)
    try:
        yield time.monotonic() + (own.seconds if own is not None else engine.settings.deadline_s)
    except DeadlineError as error:
        explain_delay(error, own, engine, model, otherwise="come again later")
        raise


async def get_deadline(request: Request, engine: EngineDependency) -> AsyncIterator[float]:
    """As ``limit_time``, of the endpoint."""
    head = request.scope["state"]["exchange"].head
    with limit_time(head, engine, request.path_params.get("name")) as deadline:
        yield deadline


DeadlineDependency = Annotated[float, Depends(get_deadline)]
