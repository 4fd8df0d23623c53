"""What a batcher takes in and gives out: plain data about batch keys, requests, batches and devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from layertap.models.catalog.catalog import Costs
from layertap.service.types import BatchReason, Priority

CPU = "cpu"  # the device on which pictures are decoded
MIN_EFFICIENT_ROWS = 4  # an efficient forward has so many rows even where its fixed cost is nothing
MAX_FIXED_COST_RATIO = 0.1  # in an efficient forward: a row's share of the fixed cost, divided by the row's own cost
CAPTURED_BYTES_PER_S = 1e9  # roughly: reduced, copied to the host and kept for the answer
SHORT_BATCH_RATIO = 3.0  # seconds of a short batch, divided by those of a row alone
SMOOTHING = 0.2  # the newest batch's part in a mean
FIRST_PAUSE_S = 60.0  # from a lack of memory to a trial of more rows; twice as long after each trial that fails
MAX_PAUSE_S = 3600.0


@dataclass(eq=False)
class BatchKey:
    """Rows with the same key may share a forward: they have one shape and run through one model.

    ``model`` is what one loading of a model has and no other, ``name`` what it is called: two versions of a model may
    be there at once.
    ``max_rows``: the most rows of a forward, by settings and by the memory that was free at loading; ``fitting_rows``:
    as many of them as fit now, fewer for a while after a forward ran out of memory. ``pads``: every forward is filled
    up to so many. ``max_bytes``: what a forward's values and what is kept of them may take.
    ``devices``: where the model is, each once; a forward runs on one of them. ``slots``: what a batch of several rows
    takes of it; ``replicas``: how many batches the model runs at once on one device.
    ``decode_seconds``: what decoding a row's picture took of late, where batches decode theirs themselves.
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
        """Let at most half as many rows fit as a forward had that ran out of memory, for a while."""
        if rows // 2 >= self.fitting_rows:  # it began before another one that ran out of memory too
            return
        self.fitting_rows = max(rows // 2, 1)
        self._pause = min(2 * self._pause, MAX_PAUSE_S) if now < self._pause_ends_at else FIRST_PAUSE_S
        self._pause_ends_at = now + self._pause

    def try_more_rows(self, now: float) -> None:
        """Let twice as many rows fit, ``max_rows`` at most, once memory has sufficed for a while."""
        if self.fitting_rows < self.max_rows and now >= self._pause_ends_at:
            self.fitting_rows = min(2 * self.fitting_rows, self.max_rows)
            self._pause_ends_at = now + self._pause

    @property
    def padded_rows(self) -> int | None:
        """Rows that every forward is filled up to; None where none is."""
        return self.fitting_rows if self.pads else None

    @property
    def efficient_rows(self) -> int:
        """Rows from which on a forward gets hardly cheaper for each of them."""
        if self.pads:
            return self.fitting_rows
        rows = math.ceil(self.costs.base / (MAX_FIXED_COST_RATIO * self.costs.per_row))
        return min(max(rows, MIN_EFFICIENT_ROWS), self.fitting_rows)

    @property
    def short_rows(self) -> int:
        """Rows of a batch that takes little longer than one of a single row."""
        seconds = SHORT_BATCH_RATIO * self.estimate_seconds(1)
        return int((seconds - self.costs.base) / (self.costs.per_row + self.decode_seconds))

    def estimate_seconds(self, rows: int, depth: float = 1.0) -> float:
        """Decoding and forwards of so many rows up to a share of their cost; padding costs what rows cost."""
        decoding = rows * self.decode_seconds
        if self.padded_rows is None:
            return decoding + self.costs.estimate_seconds(rows, depth)
        forwards = math.ceil(rows / self.padded_rows)
        return decoding + forwards * self.costs.estimate_seconds(self.padded_rows, depth)

    def note_decode_seconds(self, seconds: float) -> None:
        """Know what decoding took a row of the last batch; 0 where its pictures were decoded before."""
        self.decode_seconds += SMOOTHING * (seconds - self.decode_seconds)


@dataclass(eq=False)
class QueuedRequest:
    """A request's rows that wait for a forward, the least ``due_at`` first.

    ``depth``: the share of a forward's cost at which its last layer is reached; ``row_bytes``: what is kept of each
    row; ``requires_isolation``: shares a forward with no other request; ``unsplittable``: all rows in one forward, and
    no others; ``taken_rows`` are in batches already. Moments are on the batcher's clock, which sets the last three;
    ``slowdown``: what the last of its batches that ended took, divided by what it should have.
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
        """What it takes to keep what is captured of a row."""
        return self.row_bytes / CAPTURED_BYTES_PER_S

    @property
    def weight(self) -> float:
        """What one of its rows costs, divided by what a row costs that passes all layers and is not captured."""
        per_row, decoding = self.key.costs.per_row, self.key.decode_seconds
        return (self.depth * per_row + decoding + self.captured_seconds) / (per_row + decoding)

    @property
    def is_large(self) -> bool:
        """Whether it needs more than one efficient forward."""
        return self.rows > self.key.efficient_rows

    @property
    def yields(self) -> bool:
        """Whether a batch has few of its rows while small interactive requests come, which should not wait for it long.

        So bulk and large requests do, except where the number of rows in a forward decides the bits of an answer.
        """
        return (self.is_large or self.priority == "bulk") and not self.runs_alone and not self.key.pads

    @property
    def runs_alone(self) -> bool:
        """Whether its rows share no forward with those of others."""
        return self.requires_isolation or self.unsplittable


@dataclass(frozen=True)
class RowSlice:
    """Rows ``start`` to ``stop`` of a request."""

    request: QueuedRequest
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows these are."""
        return self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """Rows that share a forward, whose they are, how long it should take, and why just these.

    ``slots`` is what it takes of its ``device``, and ``slots_alone`` what a forward of just one of its rows would;
    ``padded_rows``: the rows that its forward is filled up to.
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
        """Rows of requests; padding is not counted."""
        return sum(row_slice.rows for row_slice in self.slices)


@dataclass(eq=False)
class DecodeTask:
    """Items of a request that wait to be decoded; ``priority`` is its request's, the batcher sets the moments."""

    priority: Priority = "interactive"
    enqueued_at: float = 0.0
    due_at: float = 0.0


@dataclass(frozen=True)
class DeviceSlots:
    """Slots for batches; ``parallel`` where batches in different slots run at the same time.

    Where they only overlap, one's copies with another's forward, a batch starts beside another one only when more rows
    would make it no cheaper.
    """

    slots: int
    parallel: bool = True


@dataclass(frozen=True)
class DeviceState:
    """A device on which a batch of a model may start now: its slots that are free, the model's replicas that are idle.

    ``idle_devices``: how many of the model's devices, itself included, could start one.
    """

    name: str
    device: DeviceSlots
    free_slots: int
    idle_replicas: int
    idle_devices: int = 1
