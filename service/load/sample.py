"""What became of one request."""

from __future__ import annotations

import math
from typing import NamedTuple

REFUSALS = frozenset({429, 503})


class Sample(NamedTuple):
    """A ``status``, or an ``error``, or neither where the client left.

    ``at`` is the moment the request was due, in seconds after the run's start; ``seconds`` counts from there, ``late``
    is how much of that passed before it was sent. ``retry_after``: seconds that a refusal asks for, where it does.
    """

    kind: int
    seconds: float
    late: float = 0.0
    at: float = 0.0
    status: int | None = None
    error: str | None = None
    size: int = 0
    retry_after: float | None = None
    timing: str = ""


class NotSent(NamedTuple):
    """A request of an open loop that was due while too many were under way."""

    kind: int
    at: float


def parse_retry_after(header: str | None) -> float | None:
    """Seconds; None without the header, and where it is no number that one could wait for."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
