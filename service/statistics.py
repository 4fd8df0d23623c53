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
class ModelStatistics:
    """Sums over one model's requests and forwards; any thread may call anything.

    ``answered`` and ``failed`` are requests, from when they ask for a place in the queue to their features; ``steps``
    of those that were answered, a forward's whole time for each that shared it. ``batches`` are forwards by their rows:
    as many entries as a forward may have rows. ``rows`` were handed back; ``last_request`` is in seconds since 1970,
    0 before the first.
    """

    answered: Duration = field(default_factory=Duration)
    failed: Duration = field(default_factory=Duration)
    steps: dict[str, Duration] = field(default_factory=lambda: {step: Duration() for step in STEPS})
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

    def add_batch(self, rows: int, seconds: float) -> None:
        """A forward that has ended."""
        with self._lock:
            self.batches.setdefault(rows, Duration()).add(seconds)

    def add_rows(self, rows: int) -> None:
        """Rows whose features were handed back."""
        with self._lock:
            self.rows += rows
