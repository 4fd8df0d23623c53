"""Which rows may share a forward, and how many."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from layertap.models.catalog.catalog import Costs

MIN_EFFICIENT_ROWS = 4  # of an efficient forward, even if its fixed cost is zero
MAX_FIXED_COST_RATIO = 0.1  # in an efficient forward: a row's share of the fixed cost, divided by the row's own cost
SHORT_BATCH_RATIO = 3.0  # seconds of a short batch, divided by those of a single row
SMOOTHING = 0.2  # weight of the newest batch in a moving average
FIRST_PAUSE_S = 60.0  # between running out of memory and a trial of more rows; doubled by each trial that fails
MAX_PAUSE_S = 3600.0


@dataclass(eq=False)
class BatchKey:
    """Rows with the same key may share a forward: they have one shape and run through one model.

    ``model`` identifies one loaded version of a model; ``name`` is its name, which two loaded versions may share.
    ``max_rows``: the most rows of a forward, by settings and by the memory that was free at loading. ``fitting_rows``:
    the most rows that fit now; fewer than ``max_rows`` for a while after a forward ran out of memory. ``pads``: every
    forward is padded to ``fitting_rows``. ``max_bytes``: the limit for a forward's values and its captures.
    ``devices``: the devices that hold the model, each once; a forward runs on one of them. ``slots``: how many slots a
    batch of several rows takes. ``replicas``: how many batches the model runs at once on one device.
    ``decode_seconds``: moving average of the seconds that a batch takes to decode one row; 0 if batches do not decode.
    """

    model: str
    devices: tuple[str, ...]
    costs: Costs
    max_rows: int
    max_bytes: int = 2**62
    pads: bool = False
    slots: int = 1
    replicas: int = 2**62
    decode_seconds: float = 0.0
    name: str = ""
    fitting_rows: int = field(init=False)
    _pause: float = field(init=False, default=FIRST_PAUSE_S)
    _pause_ends_at: float = field(init=False, default=-math.inf)

    def __post_init__(self) -> None:
        self.fitting_rows = self.max_rows

    def reduce_rows(self, rows: int, now: float) -> None:
        """A forward of so many rows ran out of memory: fit at most half as many for a while."""
        if rows // 2 >= self.fitting_rows:  # a batch that ran beside it has lowered the limit already
            return
        self.fitting_rows = max(rows // 2, 1)
        self._pause = min(2 * self._pause, MAX_PAUSE_S) if now < self._pause_ends_at else FIRST_PAUSE_S
        self._pause_ends_at = now + self._pause

    def try_more_rows(self, now: float) -> None:
        """Fit twice as many rows, at most ``max_rows``, if the pause is over."""
        if self.fitting_rows < self.max_rows and now >= self._pause_ends_at:
            self.fitting_rows = min(2 * self.fitting_rows, self.max_rows)
            self._pause_ends_at = now + self._pause

    @property
    def padded_rows(self) -> int | None:
        """The number of rows that every forward is padded to; None without padding."""
        return self.fitting_rows if self.pads else None

    @property
    def efficient_rows(self) -> int:
        """The number of rows beyond which a forward hardly gets cheaper per row."""
        if self.pads:
            return self.fitting_rows
        rows = math.ceil(self.costs.base / (MAX_FIXED_COST_RATIO * self.costs.per_row))
        return min(max(rows, MIN_EFFICIENT_ROWS), self.fitting_rows)

    @property
    def short_rows(self) -> int:
        """Rows of a short batch: one that takes little longer than a single row."""
        seconds = SHORT_BATCH_RATIO * self.estimate_seconds(1)
        return int((seconds - self.costs.base) / (self.costs.per_row + self.decode_seconds))

    def estimate_seconds(self, rows: int, depth: float = 1.0) -> float:
        """Seconds to decode so many rows and run them up to a depth; padding costs as much as rows."""
        decoding = rows * self.decode_seconds
        if self.padded_rows is None:
            return decoding + self.costs.estimate_seconds(rows, depth)
        forwards = math.ceil(rows / self.padded_rows)
        return decoding + forwards * self.costs.estimate_seconds(self.padded_rows, depth)

    def note_decode_seconds(self, seconds: float) -> None:
        """Update the average with a batch's seconds of decoding per row, 0 if its pictures were decoded before."""
        self.decode_seconds += SMOOTHING * (seconds - self.decode_seconds)
