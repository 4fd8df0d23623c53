"""The rules that are judged: the batcher as it is, and rows that are held back from it for a while."""

from __future__ import annotations

import math
from dataclasses import dataclass

RETURN_S = 0.015  # a client that was answered so long ago may still come back with its next request


@dataclass(frozen=True)
class Expected:
    """Rows that may come soon: of pictures that are here already, and of clients that have just been answered."""

    pictures: int
    returning: int


@dataclass(frozen=True)
class Rule:
    """How long rows are held back.

    A row is held while fewer rows than an efficient forward's are there and others are expected: for ``seconds``, or
    as long as the fixed part of a forward takes, which is what a merge saves. ``pictures`` and ``returning``: who is
    expected; neither: others are, always.
    """

    holds: bool = False
    seconds: float | None = None
    pictures: bool = False
    returning: bool = False

    def get_hold_seconds(self, fixed_part: float, expected: Expected) -> float:
        """How long the first of the held rows waits at most, with such rows to come."""
        if not self.holds:
            return 0.0
        rows = expected.pictures * self.pictures + expected.returning * self.returning
        if not (self.pictures or self.returning):
            rows = math.inf
        return (fixed_part if self.seconds is None else self.seconds) if rows else 0.0


NO_WAITING = "no waiting"
RULES = {
    NO_WAITING: Rule(),
    "timer 5 ms": Rule(holds=True, seconds=5e-3),
    "wait for decoding": Rule(holds=True, pictures=True),
    "wait for returning": Rule(holds=True, pictures=True, returning=True),
}
