"""The batcher's input and output: batch keys, requests, batches and devices, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from layertap.models.catalog.catalog import Costs
from layertap.service.types import BatchReason, Priority

CPU = "cpu"  # the device on which pictures are decoded
MIN_EFFICIENT_ROWS = 4  # of an efficient forward, even if its fixed cost is zero
MAX_FIXED_COST_RATIO = 0.1  # in an efficient forward: a row's share of the fixed cost, divided by the row's own cost
CAPTURED_BYTES_PER_S = 1e9  # roughly: reduced, copied to the host and kept for the answer
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


@dataclass(eq=False)
class QueuedRequest:
    """A request whose rows wait for a forward.

    ``depth``: the share of a whole forward's cost up to its deepest layer. ``row_bytes``: bytes captured of each row.
    ``requires_isolation``: it shares no forward with other requests. ``unsplittable``: all its rows run in one forward,
    alone. The batcher sets the rest, times on its own clock: ``taken_rows`` are in batches already; the request with
    the least ``due_at`` is first; ``slowdown``: measured seconds of its last batch, divided by the expected ones.
    """

    key: BatchKey
    rows: int
    depth: float = 1.0
    row_bytes: int = 0
    priority: Priority = "interactive"
    deadline: float = math.inf
    requires_isolation: bool = False
    unsplittable: bool = False
    taken_rows: int = 0
    enqueued_at: float = 0.0
    due_at: float = 0.0
    slowdown: float = 1.0

    @property
    def waiting_rows(self) -> int:
        """Rows that are in no batch yet."""
        return self.rows - self.taken_rows

    @property
    def captured_seconds(self) -> float:
        """Seconds to reduce and copy the captures of one row."""
        return self.row_bytes / CAPTURED_BYTES_PER_S

    @property
    def weight(self) -> float:
        """The cost of one of its rows, relative to a row that passes all layers without captures."""
        per_row, decoding = self.key.costs.per_row, self.key.decode_seconds
        return (self.depth * per_row + decoding + self.captured_seconds) / (per_row + decoding)

    @property
    def is_large(self) -> bool:
        """Whether it needs more than one efficient forward."""
        return self.rows > self.key.efficient_rows

    @property
    def yields(self) -> bool:
        """Whether it gets small batches while small interactive requests arrive, so that these do not wait long.

        True of bulk and large requests, unless the number of rows in a forward decides the bits of their results.
        """
        return (self.is_large or self.priority == "bulk") and not self.runs_alone and not self.key.pads

    @property
    def runs_alone(self) -> bool:
        """Whether it shares no forward with other requests."""
        return self.requires_isolation or self.unsplittable


@dataclass(frozen=True)
class RowSlice:
    """Rows ``start`` to ``stop`` of a request."""

    request: QueuedRequest
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """Rows that share a forward.

    ``slots``: how many slots of its ``device`` it takes; ``slots_alone``: how many one of its rows would take alone.
    ``depth``: that of its deepest request. ``seconds``: its expected duration. ``reason``: why it has these rows.
    ``padded_rows``: the number of rows that its forward is padded to.
    """

    key: BatchKey
    device: str
    slices: tuple[RowSlice, ...]
    slots: int
    slots_alone: int
    depth: float
    seconds: float
    reason: BatchReason
    padded_rows: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows, without padding."""
        return sum(row_slice.rows for row_slice in self.slices)


@dataclass(eq=False)
class DecodeTask:
    """Items of a request that wait to be decoded; the batcher sets the times."""

    priority: Priority = "interactive"
    enqueued_at: float = 0.0
    due_at: float = 0.0


@dataclass(frozen=True)
class DeviceSlots:
    """A device's slots for batches; ``parallel``: batches in different slots compute at the same time.

    If they only overlap, one's copies with another's forward, a second batch starts only with so many rows that more
    would not make it cheaper.
    """

    slots: int
    parallel: bool = True


@dataclass(frozen=True)
class DeviceState:
    """A device on which a batch may start now, with its free slots and the model's idle replicas.

    ``idle_devices``: how many of the model's devices could start a batch, this one included.
    """

    name: str
    device: DeviceSlots
    free_slots: int
    idle_replicas: int
    idle_devices: int = 1
