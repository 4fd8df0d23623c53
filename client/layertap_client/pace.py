"""How many inputs go in a request and how many requests are under way at once, found by measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_ROWS, FIRST_REQUESTS = 32, 2
MAX_ROWS, MAX_REQUESTS = 256, 16
MAX_BODY_BYTES = 16 << 20
GAIN = 1.05  # what more inputs or requests must bring to be kept
CALM = 10  # windows without a refusal until another request is dared
QUEUE_SHARE = 2  # of the server's queue half is left to others
BODY_SHARE = 0.9  # of the server's limit; the rest is for what stands around inputs


@dataclass
class Pace:
    """Two figures that grow while that answers more inputs a second, and shrink where the server refuses.

    ``rows`` inputs go in a request, ``requests`` are under way at once. Each is doubled until the rate of a window of
    some requests no longer grows; first ``rows``, then ``requests``. A refusal halves ``requests``, which then come
    back one by one. Never more than ``max_rows``, ``max_requests``, half of the server's queue, ``max_bytes`` a body.
    """

    max_rows: int = MAX_ROWS
    max_requests: int = MAX_REQUESTS
    max_bytes: int = MAX_BODY_BYTES
    max_queue_rows: int = 1 << 30
    rows: int = FIRST_ROWS
    requests: int = FIRST_REQUESTS
    _knobs: list[str] = field(default_factory=lambda: ["rows", "requests"])
    _rate: float = 0.0
    _before: int | None = None  # the value of the first knob that is to be bettered
    _goal: int = 0  # requests under way when the server first refused
    _calm: int = 0
    _finished: int = 0
    _rows_finished: int = 0
    _start: float = 0.0

    def __post_init__(self) -> None:
        self._bound()

    @classmethod
    def from_limits(cls, limits: Mapping[str, float], connections: int) -> Pace:
        """Within what a server's ``limits`` and a client's connections allow."""
        return cls(
            max_rows=int(min(MAX_ROWS, limits["max_inputs"])),
            max_requests=min(MAX_REQUESTS, connections),
            max_bytes=int(min(MAX_BODY_BYTES, BODY_SHARE * limits["max_body_bytes"])),
            max_queue_rows=max(1, int(limits["max_queue_rows"]) // QUEUE_SHARE),
        )

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is tried out."""
        return not self._knobs

    def record(self, rows: int, refusals: int, now: float) -> None:
        """Take note of a request that was answered: of how many rows, after how many refusals, when in seconds."""
        if refusals:
            self._goal = max(self._goal, self.requests)
            self.requests = max(1, self.requests // 2)
            self._knobs, self._before, self._calm = [], None, 0
            self._open_window()
            return
        self._finished += 1
        if self._finished == self.requests:  # those that began before the window are through
            self._start = now
        elif self._finished > self.requests:
            self._rows_finished += rows
            if self._finished >= 3 * self.requests:
                self._close_window(self._rows_finished / max(now - self._start, 1e-9))

    def shrink(self, rows: int) -> None:
        """Send no more than ``rows`` at once from now on: more were too large."""
        self.max_rows = max(1, rows)
        self._bound()

    def _close_window(self, rate: float) -> None:
        if self._knobs:
            self._try_more(rate)
        elif self.requests < self._goal:
            self._calm += 1
            if self._calm >= CALM:
                self._calm = 0
                self.requests += 1
        self._bound()
        self._open_window()

    def _try_more(self, rate: float) -> None:
        knob = self._knobs[0]
        if self._before is not None and rate < self._rate * GAIN:
            setattr(self, knob, self._before)
            self._advance()
        else:
            self._rate = rate
        while self._knobs:
            knob = self._knobs[0]
            self._before = getattr(self, knob)
            setattr(self, knob, 2 * self._before)
            self._bound()
            if getattr(self, knob) > self._before:
                return
            self._advance()

    def _advance(self) -> None:
        self._knobs = self._knobs[1:]
        self._before = None

    def _bound(self) -> None:
        self.rows = max(1, min(self.rows, self.max_rows, self.max_queue_rows))
        self.requests = max(1, min(self.requests, self.max_requests, self.max_queue_rows // self.rows))

    def _open_window(self) -> None:
        self._finished = self._rows_finished = 0
