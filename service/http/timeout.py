"""How long an answer may take: as the caller allows by ``X-Request-Timeout``, and never longer than the server does."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from starlette.datastructures import Headers

from layertap.models.errors import RequestError
from layertap.service.errors import DeadlineError, QueueTooLongError
from layertap.service.settings import Settings

HEADER = "X-Request-Timeout"
SEND_FEWER = "come again later, or send fewer inputs at once"


@dataclass(frozen=True)
class Timeout:
    """Seconds that an answer may take, seconds that any may, and the moment on the monotonic clock when it is over.

    ``source`` is where a caller says the first.
    """

    seconds: float
    limit: float
    deadline: float
    source: str = HEADER

    @classmethod
    def parse(cls, headers: Headers, settings: Settings) -> Timeout:
        """What a request's head says, from now on; RequestError."""
        seconds = min(_parse_seconds(headers), settings.deadline_s)
        return cls(seconds, settings.deadline_s, time.monotonic() + seconds)

    def restart(self) -> Timeout:
        """The same, from now on."""
        return replace(self, deadline=time.monotonic() + self.seconds)

    def shorten(self, seconds: float | None, source: str = "timeout") -> Timeout:
        """The same, where the body allows so many seconds, from the same moment on; None: it says nothing."""
        if seconds is None or seconds >= self.seconds:
            return self
        return replace(self, seconds=seconds, deadline=self.deadline - self.seconds + seconds, source=source)

    def explain(self, error: DeadlineError | QueueTooLongError, otherwise: str = SEND_FEWER) -> None:
        """Have an error say whose limit it met, and what helps: more time, where the server allows it, or else.

        What the error itself knows to help stays.
        """
        is_callers = self.seconds < self.limit
        source = (
            f"the {self.source} of {self.seconds:g} s" if is_callers else f"this server's limit of {self.limit:g} s"
        )
        error.detail += f" ({source})"
        more_time_helps = is_callers and error.needed_s <= self.limit
        error.hint = (
            f"allow more time by {self.source}, at most {self.limit:g} s, or {error.hint or 'come again later'}"
            if more_time_helps
            else error.hint or otherwise
        )


def _parse_seconds(headers: Headers) -> float:
    text = headers.get(HEADER)
    if text is None:
        return float("inf")
    try:
        seconds = float(text[:32])
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise RequestError(f"{HEADER} is a number of seconds above 0", hint="write it like 2.5, or leave it out")
    return seconds
