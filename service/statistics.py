"""What requests and forwards of one model took in all, since the process began."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

STEPS = ("queue", "decode", "forward", "copy")  # those that belong to a model


@dataclass
class Duration:
    """How often something happened, and how many seconds it took in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Once more."""
        self.count += 1
        self.seconds += seconds


@dataclass
class Lookup:
    """A request that is looked up among the answers that are kept; ``computing_s`` of its time went to computing it."""

    started: float = field(default_factory=time.perf_counter)
    computed: bool = False
    computing_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All but what computing took: for a digest, for waiting until an equal request was answered, for a copy."""
        return time.perf_counter() - self.started - self.computing_s

    @contextmanager
    def compute(self) -> Iterator[None]:
        """No answer was there: it is computed in the block."""
        self.computed = True
        started = time.perf_counter()
        try:
            yield
        finally:
            self.computing_s += time.perf_counter() - started


@dataclass
class ModelStatistics:
    """Sums over one model's requests and forwards; any thread may call anything.

    ``answered`` and ``failed`` are requests, from when they ask for a place in the queue to their features; ``steps``
    of those that were answered, a forward's whole time for each that shared it. Where answers are kept, requests that
    are looked up are ``hits`` or ``misses``: hits are answered in that time, without a step but the queue, for misses
    it comes on top. ``batches`` are forwards by their rows:
    as many entries as a forward may have rows. ``rows`` were handed back; ``last_request`` is in seconds since 1970,
    0 before the first.
    """

    answered: Duration = field(default_factory=Duration)
    failed: Duration = field(default_factory=Duration)
    steps: dict[str, Duration] = field(default_factory=lambda: {step: Duration() for step in STEPS})
    hits: Duration = field(default_factory=Duration)
    misses: Duration = field(default_factory=Duration)
    batches: dict[int, Duration] = field(default_factory=dict)
    rows: int = 0
    last_request: float = 0.0
    _lock: Lock = field(default_factory=Lock, repr=False)

    @contextmanager
    def measure_request(self, milliseconds: Mapping[str, float]) -> Iterator[None]:
        """Count what happens in the block as a request; ``milliseconds`` by step grow meanwhile."""
        before, started = dict(milliseconds), time.perf_counter()
        self.last_request = time.time()
        try:
            yield
        except BaseException:
            with self._lock:
                self.failed.add(time.perf_counter() - started)
            raise
        with self._lock:
            self.answered.add(time.perf_counter() - started)
            for step, duration in self.steps.items():
                duration.add((milliseconds.get(step, 0.0) - before.get(step, 0.0)) / 1000)

    @contextmanager
    def measure_lookup(self) -> Iterator[Lookup]:
        """Count what happens in the block as a look among the answers that are kept.

        What it computes is to be measured as a request.
        """
        lookup = Lookup()
        self.last_request = time.time()
        try:
            yield lookup
        except BaseException:
            if not lookup.computed:
                with self._lock:
                    self.failed.add(lookup.seconds)
            raise
        seconds = lookup.seconds
        with self._lock:
            if lookup.computed:
                self.misses.add(seconds)
                return
            self.hits.add(seconds)
            self.answered.add(seconds)
            self.steps["queue"].add(0.0)

    def add_batch(self, rows: int, seconds: float) -> None:
        """A forward that has ended."""
        with self._lock:
            self.batches.setdefault(rows, Duration()).add(seconds)

    def add_rows(self, rows: int) -> None:
        """Rows whose features were handed back."""
        with self._lock:
            self.rows += rows
