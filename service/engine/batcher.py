"""Which waiting rows share the next forward, and when it starts: decisions only, on a clock that is passed in.

Nothing here waits for more rows to come: batches grow while others run. A device has slots, a CPU one for each core, a
GPU one in all, or one for each stream; a batch takes one, or all of them for a single row that all cores compute
together. Pictures are decoded on the CPU's slots as well, ahead of forwards but only until a batch is worth its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from layertap.service.engine.batch import CPU, Batch, BatchQueue, DecodeTask, DeviceSlots, QueuedRequest, RowSlice
from layertap.service.types import BatchReason, Priority

Clock = Callable[[], float]
WINDOW = 128  # waiting requests that a batch is chosen from
WORTH = 1.3  # side by side a forward must end so many times as soon
LONG = 2.0  # times a good batch's forward: for longer no row waits for pictures to be decoded


@dataclass
class _Queues:
    """What waits in a lane, by priority, in order of arrival; ``rows`` counts rows in no batch yet."""

    interactive: dict[QueuedRequest, None] = field(default_factory=dict)
    bulk: dict[QueuedRequest, None] = field(default_factory=dict)
    rows: int = 0

    def of(self, priority: Priority) -> dict[QueuedRequest, None]:
        return self.interactive if priority == "interactive" else self.bulk

    def __bool__(self) -> bool:
        return bool(self.interactive or self.bulk)


class Batcher:
    """Takes requests in, gives batches out. Not for several threads at once.

    ``patience``: seconds after which a bulk request counts as an interactive one that came just now.
    """

    def __init__(self, devices: Mapping[str, DeviceSlots], clock: Clock, patience: float = 5.0) -> None:
        self._devices = dict(devices)
        self._clock = clock
        self._patience = patience
        self._free = {name: device.slots for name, device in devices.items()}
        self._waiting: dict[BatchQueue, _Queues] = {}
        self._preparations: dict[Priority, dict[DecodeTask, None]] = {"interactive": {}, "bulk": {}}
        self._preparing = 0
        self._served: dict[str, float] = {}  # seconds of slots that each model has had, or would have had
        self._level: dict[str, float] = {}  # of each device: where a model begins that wants it anew
        self._running: dict[str, int] = {}

    def add_device(self, name: str, device: DeviceSlots) -> None:
        """Know of a device; one that is known stays as it is."""
        if name not in self._devices:
            self._devices[name], self._free[name] = device, device.slots

    def count_parallel_batches(self, device: str, width: int) -> int:
        """How many batches of so many slots a device computes at the same time."""
        known = self._devices[device]
        return known.slots // width if known.parallel else 1

    def add(self, work: QueuedRequest) -> None:
        """Let a request wait for its forward."""
        work.enqueued_at = self._clock()
        if work.queue.model not in self._active():
            level = self._level.get(work.queue.device, 0.0)
            self._served[work.queue.model] = max(self._served.get(work.queue.model, 0.0), level)
        queues = self._waiting.setdefault(work.queue, _Queues())
        queues.of(work.priority)[work] = None
        queues.rows += work.waiting_rows

    def remove(self, work: QueuedRequest) -> None:
        """Forget what still waits of a request."""
        queues = self._waiting.get(work.queue)
        if queues is not None and work in queues.of(work.priority):
            del queues.of(work.priority)[work]
            queues.rows -= work.waiting_rows
            work.taken_rows = work.rows
            if not queues:
                del self._waiting[work.queue]

    def add_decode(self, preparation: DecodeTask) -> None:
        """Let something wait to be decoded."""
        preparation.enqueued_at = self._clock()
        self._preparations[preparation.priority][preparation] = None

    def remove_decode(self, preparation: DecodeTask) -> None:
        """Forget something that was to be decoded and has not begun."""
        self._preparations[preparation.priority].pop(preparation, None)

    def count_waiting_rows(self, model: str) -> int:
        """Rows of a model that are in no batch yet."""
        return sum(queues.rows for lane, queues in self._waiting.items() if lane.model == model)

    def start_next(self, idle: Mapping[str, int]) -> Batch | DecodeTask | None:
        """What starts now, None where nothing may; ``idle`` counts the replicas of each model that could run it."""
        if not self._waiting and not any(self._preparations.values()):
            return None
        kept: set[str] = set()  # devices whose slots are kept free for what needs all of them
        ordered, next_one = self._ordered(idle), self._undecoded()
        if next_one is not None and not any(self._before(lane, next_one) for lane in ordered):
            ordered = [lane for lane in ordered if lane.device != CPU]
        found = self._first(ordered, kept, idle)
        if found is None and next_one is not None and CPU not in kept:
            del self._preparations[next_one.priority][next_one]
            self._free[CPU] -= 1
            self._preparing += 1
            return next_one
        return found and self._started(found)

    def finish(self, what: Batch | DecodeTask, seconds: float) -> None:
        """A batch has ended, or a preparation; its slots are free again."""
        if isinstance(what, DecodeTask):
            self._free[CPU] += 1
            self._preparing -= 1
            return
        model = what.queue.model
        self._free[what.queue.device] += what.slots
        self._running[model] -= 1
        self._served[model] += (seconds - what.seconds) * what.slots

    def remove_model(self, model: str) -> None:
        """A model is gone; nothing of it waits or runs."""
        self._served.pop(model, None)
        self._running.pop(model, None)
        for lane in [lane for lane in self._waiting if lane.model == model]:
            del self._waiting[lane]  # what is past its deadline may still be here

    @staticmethod
    def reduce_max_rows(lane: BatchQueue, rows: int) -> None:
        """So many rows did not fit into memory."""
        lane.max_rows = max(1, min(lane.max_rows, rows // 2))
        lane.padded_rows = lane.padded_rows and min(lane.padded_rows, lane.max_rows)

    def _active(self) -> set[str]:
        return {lane.model for lane in self._waiting} | {model for model, count in self._running.items() if count}

    def _first(self, lanes: Iterable[BatchQueue], kept: set[str], idle: Mapping[str, int]) -> Batch | None:
        for lane in lanes:
            if lane.device in kept or not self._may_overlap(lane):
                continue
            batch = self._formed(lane, idle[lane.model])
            if batch is not None:
                return batch
            if self._overdue(lane):
                kept.add(lane.device)
        return None

    def _ordered(self, idle: Mapping[str, int]) -> list[BatchQueue]:
        """Lanes that could start something: interactive work first, then the model that has had least, then by age."""
        keyed = []
        for number, lane in enumerate(list(self._waiting)):
            if self._free[lane.device] <= 0 or idle.get(lane.model, 0) <= 0:
                continue
            head = self._head(lane)
            if head is not None:
                keyed.append(((self._late(head), self._served[lane.model], self._rank(head), number), lane))
        return [lane for _, lane in sorted(keyed, key=lambda pair: pair[0])]

    def _head(self, lane: BatchQueue) -> QueuedRequest | None:
        """What has waited longest of what may run; what is past its deadline is dropped on the way."""
        heads: list[QueuedRequest] = []
        priority: Priority
        for priority in ("interactive", "bulk"):
            while (head := self._oldest(lane, priority)) is not None and head.deadline <= self._clock():
                self.remove(head)
            if head is not None:
                heads.append(head)
        return min(heads, key=self._order, default=None)

    def _oldest(self, lane: BatchQueue, priority: Priority) -> QueuedRequest | None:
        queues = self._waiting.get(lane)
        return next(iter(queues.of(priority)), None) if queues else None

    def _eligible(self, lane: BatchQueue) -> list[QueuedRequest]:
        """What may be in the next batch, in order; what is past its deadline is dropped on the way."""
        queues, now = self._waiting.get(lane, _Queues()), self._clock()
        bulk, interactive = list(islice(queues.bulk, WINDOW)), list(islice(queues.interactive, WINDOW))
        for work in (*bulk, *interactive):
            if work.deadline <= now:
                self.remove(work)
        interactive = [work for work in interactive if work.waiting_rows]
        found = [*interactive, *(work for work in bulk if work.waiting_rows and not (interactive and self._late(work)))]
        return sorted(found, key=self._rank)

    def _order(self, what: QueuedRequest | DecodeTask) -> tuple[bool, float]:
        return self._late(what), self._rank(what)

    def _late(self, what: QueuedRequest | DecodeTask) -> bool:
        return what.priority == "bulk" and self._clock() < self._rank(what)

    def _rank(self, what: QueuedRequest | DecodeTask) -> float:
        return what.enqueued_at + (self._patience if what.priority == "bulk" else 0.0)

    def _undecoded(self) -> DecodeTask | None:
        """What is decoded next, if the CPU has a slot for it; where forwards have all of them, one more is lent.

        A bad picture is then refused at once, and a good one ready for the next batch, however long forwards take.
        """
        heads = [next(iter(waiting)) for waiting in self._preparations.values() if waiting]
        lent = 0 if self._preparing else 1
        return min(heads, key=self._order, default=None) if self._free.get(CPU, -1) + lent > 0 else None

    def _before(self, lane: BatchQueue, preparation: DecodeTask) -> bool:
        """Whether a lane goes before what could be decoded: more urgent, or as urgent, ripe and not much newer."""
        head = self._head(lane)
        if lane.device != CPU or head is None:
            return False
        late, latest = self._late(preparation), self._rank(preparation) + self._patience
        return self._late(head) < late or (
            self._late(head) == late and self._ripe(lane, head) and self._rank(head) <= latest
        )

    def _ripe(self, lane: BatchQueue, head: QueuedRequest) -> bool:
        """Whether a forward is worth its start now, though more could be decoded first."""
        enough = lane.padded_rows or lane.efficient_rows
        waited = self._clock() - head.enqueued_at
        return self._waiting[lane].rows >= enough or waited >= LONG * lane.seconds(enough, head.depth)

    def _may_overlap(self, lane: BatchQueue) -> bool:
        """Whether a lane may start beside what runs on its device."""
        device = self._devices[lane.device]
        if device.parallel or self._free[lane.device] == device.slots:
            return True
        head = self._head(lane)
        return head is not None and self._ripe(lane, head)

    def _overdue(self, lane: BatchQueue) -> bool:
        """Whether a single row has waited for all slots for as long as its own forward takes."""
        head = self._head(lane)
        return head is not None and self._clock() - head.enqueued_at > lane.costs.seconds(1)

    def _formed(self, lane: BatchQueue, idle: int) -> Batch | None:
        works = self._eligible(lane)
        if not works:
            return None
        mates, why = _mates(works, lane)
        rows = self._size(lane, mates, idle)
        parts = tuple(_filled(mates, rows, lane))
        count = sum(part.stop - part.start for part in parts)
        slots = self._slots(lane, count)
        if slots > self._free[lane.device]:
            return None
        depth = max(part.request.depth for part in parts)
        seconds = lane.seconds(count, depth) / (lane.costs.speedup if slots > 1 and _solo(lane, count) else 1.0)
        return Batch(lane, parts, slots, depth, seconds, _told(why, parts))

    def _size(self, lane: BatchQueue, mates: Sequence[QueuedRequest], idle: int) -> int:
        """How many rows the next forward should have."""
        if mates[0].requires_isolation or mates[0].unsplittable:
            return min(mates[0].waiting_rows, lane.padded_rows or lane.max_rows, lane.max_rows)
        waiting = sum(work.waiting_rows for work in mates)
        device, free = self._devices[lane.device], self._free[lane.device]
        solo = _solo(lane, 1)
        if solo and free == device.slots > 1 and waiting <= 2 * lane.costs.speedup:
            return 1  # one after the other on all cores is quicker than side by side
        sides = min(free // lane.slots, idle) if device.parallel else 1
        share = math.ceil(waiting / max(sides, 1))
        if lane.seconds(waiting) < WORTH * lane.seconds(share):
            share = waiting  # the fixed part of two forwards is more than they gain side by side
        return min(max(share, 2 if solo else 1), lane.padded_rows or lane.efficient_rows, lane.max_rows)

    def _slots(self, lane: BatchQueue, rows: int) -> int:
        """All of them for a single row that gains by it, else one: it hangs on nothing but the number of rows.

        Other threads make other bits, so that a batch of the same shape must always get the same number of them.
        """
        every = self._devices[lane.device].slots
        return every if _solo(lane, rows) else min(lane.slots, every)

    def _started(self, batch: Batch) -> Batch:
        queues = self._waiting[batch.queue]
        for part in batch.slices:
            queues.rows -= part.stop - part.start
            part.request.taken_rows = part.stop
            if part.request.waiting_rows == 0:
                self.remove(part.request)
        model, device = batch.queue.model, batch.queue.device
        self._level[device] = max(self._level.get(device, 0.0), self._served[model])
        self._free[device] -= batch.slots
        self._running[model] = self._running.get(model, 0) + 1
        self._served[model] += batch.seconds * batch.slots
        return batch


def _solo(lane: BatchQueue, rows: int) -> bool:
    """Whether a forward is one of a single row that gains by all cores."""
    return (lane.padded_rows or rows) == 1 and lane.costs.speedup > 1


def _mates(works: Sequence[QueuedRequest], lane: BatchQueue) -> tuple[list[QueuedRequest], BatchReason]:
    """The requests that share a forward with the first one, and why."""
    head = works[0]
    if head.requires_isolation or head.unsplittable:
        return [head], "isolated"
    others = [work for work in works if not (work.requires_isolation or work.unsplittable)]
    if len(others) == 1:
        return [head], "single"
    depths = sorted({work.depth for work in others})
    if len(depths) == 1:
        return others, "same_depth"
    low, high = _cluster(others, depths, lane, head.depth)
    mates = [work for work in others if low <= work.depth <= high]
    if len(mates) < len(others):
        return mates, "sharing_costs"
    return mates, "sharing_pays"


def _told(why: BatchReason, parts: Sequence[RowSlice]) -> BatchReason:
    """Why, in the end: of those that could share not all need have found room."""
    if why in ("same_depth", "sharing_pays") and len(parts) == 1:
        return "single"
    return "same_depth" if why == "sharing_pays" and len({part.request.depth for part in parts}) == 1 else why


def _cluster(
    works: Sequence[QueuedRequest], depths: Sequence[float], lane: BatchQueue, depth: float
) -> tuple[float, float]:
    """From which depth to which requests run together with one of a depth: what makes all of them end soonest.

    A shared forward goes to the deepest layer with all rows, but pays its fixed part once. Of all ways to cut the
    sorted depths into pieces the cheapest is taken, by the sum of the pieces' forwards.
    """
    rows = dict.fromkeys(depths, 0)
    for work in works:
        rows[work.depth] += work.waiting_rows
    sums = list(accumulate(rows.values(), initial=0))
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the first so many depths: cost, and where the last piece begins
    for stop, deepest in enumerate(depths, 1):
        costs = (best[start][0] + lane.seconds(sums[stop] - sums[start], deepest) for start in range(stop))
        best.append(min(zip(costs, range(stop), strict=True)))
    stop = len(depths)
    while depths[best[stop][1]] > depth:
        stop = best[stop][1]
    return depths[best[stop][1]], depths[stop - 1]


def _filled(mates: Iterable[QueuedRequest], rows: int, lane: BatchQueue) -> Iterator[RowSlice]:
    """The first rows, within the memory that a forward may take; at least one."""
    left, room = rows, lane.max_bytes
    for number, work in enumerate(mates):
        each = lane.costs.row_bytes + work.row_bytes
        count = min(work.waiting_rows, left, room // max(each, 1))
        if number == 0:
            count = work.waiting_rows if work.unsplittable else max(count, 1)
        if count <= 0:
            return
        yield RowSlice(work, work.taken_rows, work.taken_rows + count)
        if count < work.waiting_rows:
            return  # rows of others do not pass what is left of it
        left, room = left - count, room - count * each
