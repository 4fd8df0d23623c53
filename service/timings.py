"""What a request was about, and how long its steps took: filled on its road, read once it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
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

    def add_parts(
        self, queued: float, forwards: Sequence[Span], copies: Sequence[Span], decodes: Sequence[Span]
    ) -> None:
        """Add what the parts of a request took that was ``queued`` then; each second counts once, for one step.

        Until the last part ended, it waited whenever none was under way. Spans that ended at 0 never were.
        """
        forward, copy, decode = count_seconds(forwards, copies, decodes)
        spans = list(dict.fromkeys((*decodes, *forwards, *copies)))  # several parts may have shared one
        ended = max(span.ended for span in spans)
        if any(span.ended for span in decodes):
            self.add("decode", decode, _find_spans("decode", spans))
        waited = max(ended - queued - forward - copy - decode, 0.0)
        self.add("queue", waited, _find_gaps(queued, spans))
        self.add("forward", forward, _find_spans("forward", spans))
        self.add("copy", copy, _find_spans("copy", spans))


def _find_spans(step: str, spans: Sequence[Span]) -> list[Span]:
    """Those of a step that were."""
    return [span for span in spans if span.step == step and span.ended]


def _find_gaps(queued: float, spans: Sequence[Span]) -> list[Span]:
    """When none of the spans was under way, from a moment to the beginning of the last."""
    gaps, reached = [], queued
    for span in sorted((span for span in spans if span.ended), key=lambda span: span.started):
        if span.started > reached:
            gaps.append(Span("queue", reached, span.started))
        reached = max(reached, span.ended)
    return gaps


def count_seconds(*steps: Sequence[Span]) -> list[float]:
    """Seconds of each step, whose parts may be side by side; what several have at once counts for the first of them."""
    reached = [_count_covered([span for step in steps[:count] for span in step]) for count in range(len(steps) + 1)]
    return [after - before for before, after in pairwise(reached)]


def _count_covered(spans: Sequence[Span]) -> float:
    """Seconds that lie in at least one of them."""
    seconds, reached = 0.0, 0.0
    for begin, end in sorted((span.started, span.ended) for span in spans):
        seconds += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return seconds
