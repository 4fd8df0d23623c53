"""How long an answer may take: as the caller allows by ``X-Request-Timeout``, and never longer than the server does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated

from fastapi import Depends, Request

from layertap.models.errors import RequestError
from layertap.service.engine.engine import Engine
from layertap.service.errors import DeadlineError, QueueTooLongError
from layertap.service.settings import Settings

HEADER, FIELD = "X-Request-Timeout", b"x-request-timeout"
SEND_FEWER = "come again later, or send fewer inputs at once"


class Timeout:
    """Seconds that an answer may take, of those that any may, and until when that is, on the monotonic clock."""

    def __init__(self, head: Mapping[bytes, bytes], settings: Settings) -> None:
        """As a request's head says, from now on; RequestError."""
        self._limit = self._seconds = settings.deadline_s
        if FIELD in head:
            self._seconds = min(_parse_seconds(head[FIELD]), self._limit)
        self._source = HEADER  # where the caller says it
        self.deadline = time.monotonic() + self._seconds

    def restart(self) -> None:
        """Count from now on."""
        self.deadline = time.monotonic() + self._seconds

    def shorten(self, seconds: float | None) -> None:
        """Allow no more seconds than the body says, from the same moment on; None: it says nothing."""
        if seconds is not None and seconds < self._seconds:
            self.deadline -= self._seconds - seconds
            self._seconds, self._source = seconds, "timeout"

    def explain(self, error: Exception, engine: Engine, model: str | None, otherwise: str = SEND_FEWER) -> None:
        """Have the error of a late request say whose limit it met, what helps, and when to come again.

        More time helps where the server allows it. What the error itself knows to help stays; so do other errors.
        """
        if isinstance(error, DeadlineError):
            error.retry_after = engine.estimate_wait(model)
        elif not isinstance(error, QueueTooLongError):
            return
        if self._seconds == self._limit:
            error.detail += f" (this server's limit of {self._limit:g} s)"
        else:
            error.detail += f" (the {self._source} of {self._seconds:g} s)"
            if error.needed_s <= self._limit:
                other = error.hint or "come again later"
                error.hint = f"allow more time by {self._source}, at most {self._limit:g} s, or {other}"
        error.hint = error.hint or otherwise


def _parse_seconds(text: bytes) -> float:
    try:
        seconds = float(text[:32])
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise RequestError(f"{HEADER} is a number of seconds above 0", hint="write it like 2.5, or leave it out")
    return seconds


async def get_engine(request: Request) -> Engine:
    """The app's engine. A coroutine: FastAPI would call a plain function in another thread."""
    engine: Engine = request.app.state.engine
    return engine


EngineDependency = Annotated[Engine, Depends(get_engine)]


async def limit_time(request: Request, engine: EngineDependency) -> AsyncIterator[float]:
    """Until when the endpoint may take, on the monotonic clock; RequestError.

    A DeadlineError that it raises says whose limit that was.
    """
    timeout = Timeout(request.scope["state"]["exchange"].head, engine.settings)
    try:
        yield timeout.deadline
    except DeadlineError as error:
        timeout.explain(error, engine, request.path_params.get("name"), otherwise="come again later")
        raise


DeadlineDependency = Annotated[float, Depends(limit_time)]
