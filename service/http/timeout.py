"""How long an answer may take: as long as the caller allows by ``X-Request-Timeout``, at most as the server does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from layertap.models.errors import RequestError
from layertap.service.errors import DeadlineError, QueueTooLongError

HEADER, FIELD = "X-Request-Timeout", b"x-request-timeout"


@dataclass(frozen=True)
class TimeLimit:
    """Seconds that an answer may take, and the field of the request that says so; "" for the server's own limit."""

    seconds: float
    source: str = ""

    def explain(self, error: DeadlineError | QueueTooLongError, longest: float, otherwise: str) -> None:
        """Add to an error of a late request which limit it met, and what helps: more time, its own hint, ``otherwise``.

        ``longest``: the server's limit in seconds.
        """
        whose = f"the {self.source}" if self.source else "this server's limit"
        error.detail += f" ({whose} of {self.seconds:g} s)"
        if self.source and error.needed_s <= longest:
            other = error.hint or "come again later"
            error.hint = f"allow more time by {self.source}, at most {longest:g} s, or {other}"
        error.hint = error.hint or otherwise


SERVER_LIMIT = lru_cache(maxsize=1)(TimeLimit)


def read_limit(value: bytes, longest: float) -> TimeLimit:
    """The limit in the header's value, or the server's if that is shorter; RequestError."""
    try:
        seconds = float(value[:32])
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise RequestError(f"{HEADER} is a number of seconds above 0", hint="write it like 2.5, or leave it out")
    return TimeLimit(seconds, HEADER) if seconds < longest else SERVER_LIMIT(longest)
