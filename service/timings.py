"""The account of a request: what it was about and when its steps began and ended.

It is written while the request runs. ``Server-Timing``, the log, traces and metrics are read from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

STEPS = ("unpack", "parse", "load", "fetch", "decode", "queue", "forward", "copy", "encode")  # in this order
MAX_SPANS = 64  # per request: an explanation may have hundreds of forwards; the sums count all
# A part of a step: the step, start and end in seconds on the clock of ``time.perf_counter``, rows of a forward or 0.
Span = tuple[str, float, float, int]
BY_TIME = itemgetter(1, 2, 0)


@dataclass
class RequestFacts:
    """Facts about a request, as far as it got."""

    request_id: str = ""
    method: str = ""
    path: str = ""
    client: str = ""  # address
    key: str = ""  # name of the API key
    status: int = 0  # 0 until a reply begins
    request_bytes: int = 0
    reply_bytes: int = 0
    trace_id: str = ""  # if traces are written
    model: str = ""  # the configured name, or the requested one if that is unknown
    layers: str = ""  # a short digest of the requested layers, the same on every server
    selectors: int = 0
    rows: int = 0  # in the answer, or of the inputs if there was none
    batch_rows: int = 0  # the most rows in a forward with some of its own


@dataclass
class Timings:
    """The times of a request, on the clock of ``time.perf_counter``; moments are 0 until they are reached."""

    steps: dict[str, float] = field(default_factory=dict)  # milliseconds, in the order in which steps ended
    notes: dict[str, str] = field(default_factory=dict)  # facts that are not times
    spans: list[Span] = field(default_factory=list)  # the first ``MAX_SPANS`` parts of steps
    facts: RequestFacts = field(default_factory=RequestFacts)
    begun: float = field(default_factory=time.perf_counter)  # the head has come
    receive_s: float = 0.0  # for the body to arrive
    reply_begun: float = 0.0
    ended: float = 0.0  # the reply is sent

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
        self.steps[name] = self.steps.get(name, 0.0) + (ended - started) * 1000
        if len(self.spans) < MAX_SPANS:
            self.spans.append((name, started, ended, 0))

    def add_parts(self, queued: float, spans: Iterable[Span]) -> None:
        """Add the parts of a request that was ``queued`` at that moment; each second counts once.

        Time in which parts overlap counts for the one that began first. Until the last part began, time outside all
        parts counts as waiting. Spans that ended at 0 never ran; several parts may share a span.
        """
        reached = queued
        for step, started, ended, rows in sorted(set(spans), key=BY_TIME):
            if not ended:
                continue
            if started > reached:
                self.add_span("queue", reached, started)
                reached = started
            self.steps[step] = self.steps.get(step, 0.0) + max(ended - reached, 0.0) * 1000
            if len(self.spans) < MAX_SPANS:
                self.spans.append((step, started, ended, rows))
            reached = max(reached, ended)

    def format(self) -> str:
        """The value of ``Server-Timing`` so far."""
        text = ""
        for name, milliseconds in self.steps.items():
            text += f"{name};dur={milliseconds:.2f}, "
        text += f"total;dur={(time.perf_counter() - self.begun) * 1000:.2f}"
        for name, note in self.notes.items():
            text += f', {name};desc="{note}"'
        return text
