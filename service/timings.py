"""Facts about a request and the durations of its steps: filled while it runs, read when it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

STEPS = ("unpack", "parse", "load", "fetch", "decode", "queue", "forward", "copy", "encode")  # in this order
MAX_SPANS = 64  # per request: an explanation may have hundreds of forwards; the sums count all


@dataclass
class RequestFacts:
    """Facts about a request, as far as it got.

    ``model`` is the model's configured name, or the requested one if unknown. ``layers`` is a short digest of the
    requested layers, the same on every server, and ``selectors`` their number. ``rows``: rows in the answer, or of the
    inputs if there was none. ``batch_rows``: the most rows in a forward with some of its own.
    """

    model: str = ""
    layers: str = ""
    selectors: int = 0
    rows: int = 0
    batch_rows: int = 0


class Span(NamedTuple):
    """A part of a step: its start and end in seconds on the clock of ``time.perf_counter``.

    ``rows``: the rows of a forward; else 0.
    """

    step: str
    started: float
    ended: float
    rows: int = 0


@dataclass
class Timings:
    """Milliseconds by step, in the order in which the steps ended; ``notes`` has facts that are not times.

    ``spans`` has the first ``MAX_SPANS`` parts of steps, ``facts`` what the request was about.
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
        """Add a part with this start and end to a step."""
        self.add(name, ended - started, (Span(name, started, ended),))

    def add(self, name: str, seconds: float, spans: Sequence[Span] = ()) -> None:
        """Add to a step the total of its parts, which may overlap."""
        self.steps[name] = self.steps.get(name, 0.0) + seconds * 1000
        self.spans.extend(spans[: MAX_SPANS - len(self.spans)])

    def add_parts(self, queued: float, spans: Iterable[Span]) -> None:
        """Add the parts of a request that was ``queued`` at that moment; each second counts once.

        Until the last part began, time outside all parts counts as waiting. Spans that ended at 0 never ran; several
        parts may share a span.
        """
        for part, seconds in split_time(queued, {span for span in spans if span.ended}):
            self.add(part.step, seconds, (part,))


def split_time(queued: float, spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """Each span, and each wait before one, in order of time, with its share of the seconds.

    Time in which spans overlap counts for the one that began first.
    """
    reached = queued
    for span in sorted(spans, key=attrgetter("started", "ended", "step")):
        if span.started > reached:
            yield Span("queue", reached, span.started), span.started - reached
            reached = span.started
        yield span, max(span.ended - reached, 0.0)
        reached = max(reached, span.ended)
