"""What a request was about, and how long its steps took: filled on its road, read once it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

STEPS = ("unpack", "parse", "load", "fetch", "decode", "queue", "forward", "copy", "encode")  # in this order
MAX_SPANS = 64  # of a request: an explanation may have hundreds of forwards, which its sums have all


@dataclass
class RequestFacts:
    """What a request was about, as far as it came.

    ``model`` is its model's own name, of one that there is not what it asks for; ``layers`` a short digest of what it
    wants of layers, the same on every server, and ``selectors`` how many entries that has; ``rows`` are its inputs',
    where it was answered those in the answer; ``batch_rows`` the most rows that shared a forward with some of its own.
    """

    model: str = ""
    layers: str = ""
    selectors: int = 0
    rows: int = 0
    batch_rows: int = 0


class Span(NamedTuple):
    """A part of a step: when it began and ended, on the clock of ``time.perf_counter``, in seconds.

    ``rows`` shared it, where it is a forward; else 0.
    """

    step: str
    started: float
    ended: float
    rows: int = 0


@dataclass
class Timings:
    """Milliseconds by step, in the order in which the steps ended; ``notes`` says things that are no times.

    ``spans`` has when the first ``MAX_SPANS`` parts of steps began and ended, ``facts`` what it was all about.
    """

    steps: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    facts: RequestFacts = field(default_factory=RequestFacts)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_span(name, started, time.perf_counter())

    def add_span(self, name: str, started: float, ended: float) -> None:
        """Add a part that began and ended then to a step."""
        self.add(name, ended - started, (Span(name, started, ended),))

    def add(self, name: str, seconds: float, spans: Sequence[Span] = ()) -> None:
        """Add to a step what its parts, which may have been side by side, took together."""
        self.steps[name] = self.steps.get(name, 0.0) + seconds * 1000
        self.spans.extend(spans[: MAX_SPANS - len(self.spans)])

    def add_parts(self, queued: float, spans: Iterable[Span]) -> None:
        """Add what the parts of a request took that was ``queued`` then; each second counts once.

        Until the last part began, it waited whenever none was under way. Spans that ended at 0 never were; several
        parts may have shared one.
        """
        for part, seconds in split_time(queued, {span for span in spans if span.ended}):
            self.add(part.step, seconds, (part,))


def split_time(queued: float, spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """Each span, and each wait before one, in order of time, with the seconds that count for it.

    What several have at once counts for the first of them that began.
    """
    reached = queued
    for span in sorted(spans, key=attrgetter("started", "ended", "step")):
        if span.started > reached:
            yield Span("queue", reached, span.started), span.started - reached
            reached = span.started
        yield span, max(span.ended - reached, 0.0)
        reached = max(reached, span.ended)
