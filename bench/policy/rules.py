"""The rules that are judged: the batcher as it is in worker processes, without them, and with batches that wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

RETURN_S = 0.015  # a client that was answered so long ago may still come back with its next request


@dataclass(frozen=True)
class Expected:
    """Rows that may come soon: of requests that the front has not read yet, and of clients that have been answered."""

    arriving: int
    returning: int


@dataclass(frozen=True)
class Rule:
    """Where pictures are decoded, and how long a batch waits for others before its forward.

    ``grows``: a batch decodes its pictures itself and takes in what comes meanwhile; else they are decoded before.
    One that grows waits while it has room for rows that ``count_expected`` counts: for ``seconds``, or as long as the
    fixed part of a forward takes, which is what a row saves that joins.
    """

    grows: bool = True
    count_expected: Callable[[Expected], float] = lambda expected: 0
    seconds: float | None = None


GROWING = "growing"
RULES = {
    GROWING: Rule(),
    "threads": Rule(grows=False),
    "timer 5 ms": Rule(count_expected=lambda expected: math.inf, seconds=5e-3),
    "wait for arriving": Rule(count_expected=lambda expected: expected.arriving),
    "wait for returning": Rule(count_expected=lambda expected: expected.arriving + expected.returning),
}
