"""What waits, sorted by priority and by when it is due: the jobs of each batch key, and work for slots of the CPU."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from layertap.service.engine.batch import CPU, Batch, Job, RowSlice
from layertap.service.engine.batch_key import BatchKey
from layertap.service.types import Priority

MAX_NUM_CANDIDATES = 128  # a batch is chosen from the first so many jobs of each priority
SHORT_BATCH_RATIO = 3.0  # seconds of a short batch, divided by those of a single row
SMOOTHING = 0.2  # weight of the newest batch in a moving average
FIRST_PAUSE_S = 60.0  # between running out of memory and a trial of more rows; doubled by each trial that fails
MAX_PAUSE_S = 3600.0
DUE_AT = attrgetter("due_at")


@dataclass(eq=False)
class SlotWait:
    """A wait for a slot of the CPU, with what begins then: it is called with the wait. The batcher sets the times."""

    priority: Priority = "interactive"
    begin: Callable[[SlotWait], None] = lambda wait: None
    idle: Mapping[str, int] = field(default_factory=lambda: {CPU: 1})  # the workers of which it needs one; by device
    deadline: float = math.inf
    enqueued_at: float = 0.0
    due_at: float = 0.0
    waiting_rows: int = 1


EntryT = TypeVar("EntryT", Job, SlotWait)


def is_deferred(entry: Job | SlotWait, now: float) -> bool:
    """Whether an entry is bulk, and not due yet; from then on it counts as interactive."""
    return entry.priority == "bulk" and now < entry.due_at


class WaitingEntries(Generic[EntryT]):
    """Entries that wait for the same thing, sorted: deferred ones last, then by due time; ``waiting_rows``: all theirs.

    An entry is due at the time of its arrival; bulk some seconds later; the rest of a large job later after each of its
    batches. Those past their deadline count until they are dropped, by ``find_first`` or ``list_first``.
    """

    def __init__(self) -> None:
        self._interactive: list[EntryT] = []  # this list and the next are sorted by ``due_at``
        self._bulk: list[EntryT] = []
        self.waiting_rows = 0

    def add(self, entry: EntryT) -> None:
        """Add an entry with its remaining rows, behind all that are due at the same time."""
        insort(self._bulk if entry.priority == "bulk" else self._interactive, entry, key=DUE_AT)
        self.waiting_rows += entry.waiting_rows

    def remove(self, entry: EntryT) -> bool:
        """Remove an entry; return whether it was waiting."""
        entries = self._bulk if entry.priority == "bulk" else self._interactive
        start, stop = bisect_left(entries, entry.due_at, key=DUE_AT), bisect_right(entries, entry.due_at, key=DUE_AT)
        if entry not in entries[start:stop]:
            return False
        del entries[entries.index(entry, start, stop)]
        self.waiting_rows -= entry.waiting_rows
        return True

    def find_first(self, now: float) -> EntryT | None:
        """The most urgent entry that is not past its deadline."""
        interactive, bulk = self._interactive, self._bulk
        for entries in (interactive, bulk):
            while entries and entries[0].deadline <= now:
                self.remove(entries[0])
        if not bulk or (interactive and (now < bulk[0].due_at or interactive[0].due_at <= bulk[0].due_at)):
            return interactive[0] if interactive else None
        return bulk[0]

    def list_first(self, now: float) -> list[EntryT]:
        """The first entries, sorted; deferred ones only if nothing interactive waits."""
        first: list[EntryT] = []
        for entries in (self._interactive, self._bulk):
            others_wait = bool(first)
            for entry in entries[:MAX_NUM_CANDIDATES]:
                if entry.deadline <= now:
                    self.remove(entry)
                elif not others_wait or entry.due_at <= now:
                    first.append(entry)
        first.sort(key=DUE_AT)
        return first


@dataclass(eq=False)
class DeviceSlots:
    """A device's slots for batches; ``parallel``: batches in different slots compute at the same time.

    If they only overlap, one's copies with another's forward, a second batch starts only with so many rows that more
    would not make it cheaper. ``free``: slots without work; -1 while one is lent. ``lost``: batches that hang.
    ``small_came_at``: the arrival of the last small interactive job for this device. ``used_seconds``: the most that a
    model had used when it started a batch here.
    """

    slots: int
    parallel: bool = True
    name: str = ""
    small_came_at: float = -math.inf
    used_seconds: float = 0.0
    free: int = field(init=False)
    lost: set[Batch] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.free = self.slots


@dataclass(eq=False)
class ModelState:
    """What is known of a model: its running rows, over all of its keys, and the slot seconds that it has used.

    ``used_seconds`` are for comparison, not totals: the model that used least goes first, and one that was idle begins
    at the level of the models that kept its device busy meanwhile, so that it neither saves up time nor pays for time
    that no other model wanted. This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with a batch's
    expected seconds when it starts and its measured ones when it ends.

    ``max_rows``: the most rows of each forward. ``newest``: the key of the newest job.
    """

    used_seconds: float = 0.0
    running_rows: int = 0
    max_rows: float = math.inf
    newest: BatchKey | None = None


class BatchQueue(WaitingEntries[Job]):
    """The jobs of one ``BatchKey`` that have rows in no batch yet, and what is known of the key's batches.

    ``fitting_rows``: the most rows that fit into a forward now, fewer than ``max_rows`` for a while after one ran out
    of memory; ``efficient_rows``, ``padded_rows`` (None without padding) and ``few_rows``: as a ``BatchKey`` has them,
    but for these. ``decode_seconds``: moving average of the seconds that a batch takes to decode one row; 0 if batches
    do not decode.
    """

    def __init__(self, key: BatchKey, model: ModelState, devices: Sequence[DeviceSlots]) -> None:
        super().__init__()
        self.key = key
        self.model = model
        self.devices = devices
        self.running_rows = 0
        self.decode_seconds = 0.0
        self._pause = FIRST_PAUSE_S
        self._pause_ends_at = -math.inf
        self.limit_rows()

    # Its jobs

    def take(self, row_slice: RowSlice, due_at: float) -> None:
        """Take rows for a batch; the rest of their job is due at ``due_at``."""
        job = row_slice.job
        if row_slice.rows < job.waiting_rows and due_at == job.due_at:
            self.waiting_rows -= row_slice.rows
            job.waiting_rows -= row_slice.rows
            return
        self.remove(job)
        job.waiting_rows -= row_slice.rows
        if job.waiting_rows:
            job.due_at = due_at
            self.add(job)

    def is_large(self, job: Job) -> bool:
        """Whether a job, or the planned work that it belongs to, needs more than one efficient forward."""
        return max(job.rows, job.work_rows) > self.efficient_rows

    def yields(self, job: Job) -> bool:
        """Whether a job gets small batches while small interactive jobs arrive, so that these do not wait long.

        True of bulk and large jobs, unless the number of rows in a forward decides the bits of their results.
        """
        return (job.priority == "bulk" or self.is_large(job)) and not job.prepared.isolated and self.padded_rows is None

    def weigh(self, job: Job) -> float:
        """The cost of one of a job's rows, relative to a row that passes all layers without captures."""
        per_row, decoding, prepared = self.key.costs.per_row, self.decode_seconds, job.prepared
        return (prepared.depth * per_row + decoding + prepared.captured_seconds) / (per_row + decoding)

    # Rows and seconds of its batches

    def limit_rows(self) -> None:
        """Take over the limits of the key and of its model."""
        self.max_rows = int(min(self.key.max_rows, self.model.max_rows))
        self._fit(self.max_rows)

    def reduce_rows(self, rows: int, now: float) -> None:
        """A forward of so many rows ran out of memory: fit at most half as many for a while."""
        if rows // 2 >= self.fitting_rows:  # a batch that ran beside it has lowered the limit already
            return
        self._fit(max(rows // 2, 1))
        self._pause = min(2 * self._pause, MAX_PAUSE_S) if now < self._pause_ends_at else FIRST_PAUSE_S
        self._pause_ends_at = now + self._pause

    def try_more_rows(self, now: float) -> None:
        """Fit twice as many rows, at most ``max_rows``, if the pause is over."""
        if now >= self._pause_ends_at:
            self._fit(min(2 * self.fitting_rows, self.max_rows))
            self._pause_ends_at = now + self._pause

    def estimate_seconds(self, rows: int, depth: float = 1.0) -> float:
        """Seconds to decode so many rows and run them up to a depth; padding costs as much as rows."""
        decoding, costs = rows * self.decode_seconds, self.key.costs
        if self.padded_rows is None:
            return decoding + costs.estimate_seconds(rows, depth)
        return decoding + math.ceil(rows / self.padded_rows) * costs.estimate_seconds(self.padded_rows, depth)

    def count_short_rows(self) -> int:
        """Rows of a short batch: one that takes little longer than a single row."""
        seconds = SHORT_BATCH_RATIO * self.estimate_seconds(1)
        return int((seconds - self.key.costs.base) / (self.key.costs.per_row + self.decode_seconds))

    def _fit(self, rows: int) -> None:
        """Set the most rows of a forward, with what follows from them."""
        self.fitting_rows = rows
        self.padded_rows = rows if self.key.pads and self.model.max_rows > 1 else None
        self.efficient_rows = min(self.key.efficient_rows, rows)
        self.few_rows = self.key.count_few_rows(self.padded_rows)
