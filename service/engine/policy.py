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

from layertap.models.catalog import Costs
from layertap.service.terms import Priority, Why

Clock = Callable[[], float]
WINDOW = 128  # waiting requests that a batch is chosen from
SLACK = 0.1  # of a row's time: where a forward's fixed part is less than that for each row, more rows gain nothing
WORTH = 1.3  # side by side a forward must end so many times as soon
FEW = 8  # rows that are always worth a forward
LONG = 2.0  # times a good batch's forward: for longer no row waits for pictures to be decoded
CPU = "cpu"


@dataclass(eq=False)
class Lane:
    """Rows of one shape through one model: what may share a forward.

    ``ceiling``: the most rows of a forward, by memory and settings; it sinks where memory runs out. ``budget``: bytes
    that a forward's values and what is kept of them may take. ``padded``: every forward is given so many rows.
    ``width``: slots of a batch of several rows.
    """

    model: str
    device: str
    costs: Costs
    ceiling: int
    budget: int = 2**62
    padded: int | None = None
    width: int = 1

    @property
    def target(self) -> int:
        """Rows from which on a forward gets no cheaper for each of them."""
        enough = math.ceil(self.costs.base / (SLACK * self.costs.per_row))
        return min(max(enough, FEW), self.ceiling)

    def seconds(self, rows: int, depth: float = 1.0) -> float:
        """Forwards of so many rows up to a share of their cost; padding costs what rows cost."""
        if self.padded is None:
            return self.costs.seconds(rows, depth)
        return math.ceil(rows / self.padded) * self.costs.seconds(self.padded, depth)


@dataclass(eq=False)
class Work:
    """A request's rows that wait for a forward.

    ``depth``: the share of a forward's cost at which its last layer is reached; ``row_bytes``: what is kept of each
    row; ``alone``: shares with no other request; ``whole``: all rows in one forward, alone; ``deadline`` is on the
    clock.
    """

    lane: Lane
    rows: int
    depth: float = 1.0
    row_bytes: int = 0
    priority: Priority = "interactive"
    deadline: float = math.inf
    alone: bool = False
    whole: bool = False
    since: float = 0.0
    given: int = 0  # rows that are in batches already

    @property
    def left(self) -> int:
        """Rows that wait."""
        return self.rows - self.given


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of a request."""

    work: Work
    start: int
    stop: int


@dataclass(frozen=True)
class Batch:
    """Rows that share a forward, whose they are, how long it should take, and why just these."""

    lane: Lane
    parts: tuple[Part, ...]
    slots: int
    depth: float
    seconds: float
    why: Why

    @property
    def rows(self) -> int:
        """How many rows of requests; padding is not counted."""
        return sum(part.stop - part.start for part in self.parts)


@dataclass(eq=False)
class Preparation:
    """Something to decode; ``priority`` is its request's."""

    priority: Priority = "interactive"
    since: float = 0.0


@dataclass(frozen=True)
class Device:
    """Slots for batches; ``parallel`` where batches in different slots run at the same time.

    Where they only overlap, one's copies with another's forward, a batch starts beside another one only when more rows
    would make it no cheaper.
    """

    slots: int
    parallel: bool = True


@dataclass
class _Queues:
    """What waits in a lane, by priority, in order of arrival; ``rows`` counts rows in no batch yet."""

    interactive: dict[Work, None] = field(default_factory=dict)
    bulk: dict[Work, None] = field(default_factory=dict)
    rows: int = 0

    def of(self, priority: Priority) -> dict[Work, None]:
        return self.interactive if priority == "interactive" else self.bulk

    def __bool__(self) -> bool:
        return bool(self.interactive or self.bulk)


class Policy:
    """Takes requests in, gives batches out. Not for several threads at once.

    ``patience``: seconds after which a bulk request counts as an interactive one that came just now.
    """

    def __init__(self, devices: Mapping[str, Device], clock: Clock, patience: float = 5.0) -> None:
        self._devices = dict(devices)
        self._clock = clock
        self._patience = patience
        self._free = {name: device.slots for name, device in devices.items()}
        self._waiting: dict[Lane, _Queues] = {}
        self._preparations: dict[Priority, dict[Preparation, None]] = {"interactive": {}, "bulk": {}}
        self._preparing = 0
        self._served: dict[str, float] = {}  # seconds of slots that each model has had, or would have had
        self._level: dict[str, float] = {}  # of each device: where a model begins that wants it anew
        self._running: dict[str, int] = {}

    def equip(self, name: str, device: Device) -> None:
        """Know of a device; one that is known stays as it is."""
        if name not in self._devices:
            self._devices[name], self._free[name] = device, device.slots

    def sides(self, device: str, width: int) -> int:
        """How many batches of so many slots a device computes at the same time."""
        known = self._devices[device]
        return known.slots // width if known.parallel else 1

    def add(self, work: Work) -> None:
        """Let a request wait for its forward."""
        work.since = self._clock()
        if work.lane.model not in self._active():
            level = self._level.get(work.lane.device, 0.0)
            self._served[work.lane.model] = max(self._served.get(work.lane.model, 0.0), level)
        queues = self._waiting.setdefault(work.lane, _Queues())
        queues.of(work.priority)[work] = None
        queues.rows += work.left

    def remove(self, work: Work) -> None:
        """Forget what still waits of a request."""
        queues = self._waiting.get(work.lane)
        if queues is not None and work in queues.of(work.priority):
            del queues.of(work.priority)[work]
            queues.rows -= work.left
            work.given = work.rows
            if not queues:
                del self._waiting[work.lane]

    def prepare(self, preparation: Preparation) -> None:
        """Let something wait to be decoded."""
        preparation.since = self._clock()
        self._preparations[preparation.priority][preparation] = None

    def withdraw(self, preparation: Preparation) -> None:
        """Forget something that was to be decoded and has not begun."""
        self._preparations[preparation.priority].pop(preparation, None)

    def waiting(self, model: str) -> int:
        """Rows of a model that are in no batch yet."""
        return sum(queues.rows for lane, queues in self._waiting.items() if lane.model == model)

    def take(self, idle: Mapping[str, int]) -> Batch | Preparation | None:
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

    def done(self, what: Batch | Preparation, seconds: float) -> None:
        """A batch has ended, or a preparation; its slots are free again."""
        if isinstance(what, Preparation):
            self._free[CPU] += 1
            self._preparing -= 1
            return
        model = what.lane.model
        self._free[what.lane.device] += what.slots
        self._running[model] -= 1
        self._served[model] += (seconds - what.seconds) * what.slots

    def forget(self, model: str) -> None:
        """A model is gone; nothing of it waits or runs."""
        self._served.pop(model, None)
        self._running.pop(model, None)
        for lane in [lane for lane in self._waiting if lane.model == model]:
            del self._waiting[lane]  # what is past its deadline may still be here

    @staticmethod
    def lower(lane: Lane, rows: int) -> None:
        """So many rows did not fit into memory."""
        lane.ceiling = max(1, min(lane.ceiling, rows // 2))
        lane.padded = lane.padded and min(lane.padded, lane.ceiling)

    def _active(self) -> set[str]:
        return {lane.model for lane in self._waiting} | {model for model, count in self._running.items() if count}

    def _first(self, lanes: Iterable[Lane], kept: set[str], idle: Mapping[str, int]) -> Batch | None:
        for lane in lanes:
            if lane.device in kept or not self._may_overlap(lane):
                continue
            batch = self._formed(lane, idle[lane.model])
            if batch is not None:
                return batch
            if self._overdue(lane):
                kept.add(lane.device)
        return None

    def _ordered(self, idle: Mapping[str, int]) -> list[Lane]:
        """Lanes that could start something: interactive work first, then the model that has had least, then by age."""
        keyed = []
        for number, lane in enumerate(list(self._waiting)):
            if self._free[lane.device] <= 0 or idle.get(lane.model, 0) <= 0:
                continue
            head = self._head(lane)
            if head is not None:
                keyed.append(((self._late(head), self._served[lane.model], self._rank(head), number), lane))
        return [lane for _, lane in sorted(keyed, key=lambda pair: pair[0])]

    def _head(self, lane: Lane) -> Work | None:
        """What has waited longest of what may run; what is past its deadline is dropped on the way."""
        heads: list[Work] = []
        priority: Priority
        for priority in ("interactive", "bulk"):
            while (head := self._oldest(lane, priority)) is not None and head.deadline <= self._clock():
                self.remove(head)
            if head is not None:
                heads.append(head)
        return min(heads, key=self._order, default=None)

    def _oldest(self, lane: Lane, priority: Priority) -> Work | None:
        queues = self._waiting.get(lane)
        return next(iter(queues.of(priority)), None) if queues else None

    def _eligible(self, lane: Lane) -> list[Work]:
        """What may be in the next batch, in order; what is past its deadline is dropped on the way."""
        queues, now = self._waiting.get(lane, _Queues()), self._clock()
        bulk, interactive = list(islice(queues.bulk, WINDOW)), list(islice(queues.interactive, WINDOW))
        for work in (*bulk, *interactive):
            if work.deadline <= now:
                self.remove(work)
        interactive = [work for work in interactive if work.left]
        found = [*interactive, *(work for work in bulk if work.left and not (interactive and self._late(work)))]
        return sorted(found, key=self._rank)

    def _order(self, what: Work | Preparation) -> tuple[bool, float]:
        return self._late(what), self._rank(what)

    def _late(self, what: Work | Preparation) -> bool:
        return what.priority == "bulk" and self._clock() < self._rank(what)

    def _rank(self, what: Work | Preparation) -> float:
        return what.since + (self._patience if what.priority == "bulk" else 0.0)

    def _undecoded(self) -> Preparation | None:
        """What is decoded next, if the CPU has a slot for it; where forwards have all of them, one more is lent.

        A bad picture is then refused at once, and a good one ready for the next batch, however long forwards take.
        """
        heads = [next(iter(waiting)) for waiting in self._preparations.values() if waiting]
        lent = 0 if self._preparing else 1
        return min(heads, key=self._order, default=None) if self._free.get(CPU, -1) + lent > 0 else None

    def _before(self, lane: Lane, preparation: Preparation) -> bool:
        """Whether a lane goes before what could be decoded: more urgent, or as urgent, ripe and not much newer."""
        head = self._head(lane)
        if lane.device != CPU or head is None:
            return False
        late, latest = self._late(preparation), self._rank(preparation) + self._patience
        return self._late(head) < late or (
            self._late(head) == late and self._ripe(lane, head) and self._rank(head) <= latest
        )

    def _ripe(self, lane: Lane, head: Work) -> bool:
        """Whether a forward is worth its start now, though more could be decoded first."""
        enough = lane.padded or lane.target
        waited = self._clock() - head.since
        return self._waiting[lane].rows >= enough or waited >= LONG * lane.seconds(enough, head.depth)

    def _may_overlap(self, lane: Lane) -> bool:
        """Whether a lane may start beside what runs on its device."""
        device = self._devices[lane.device]
        if device.parallel or self._free[lane.device] == device.slots:
            return True
        head = self._head(lane)
        return head is not None and self._ripe(lane, head)

    def _overdue(self, lane: Lane) -> bool:
        """Whether a single row has waited for all slots for as long as its own forward takes."""
        head = self._head(lane)
        return head is not None and self._clock() - head.since > lane.costs.seconds(1)

    def _formed(self, lane: Lane, idle: int) -> Batch | None:
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
        depth = max(part.work.depth for part in parts)
        seconds = lane.seconds(count, depth) / (lane.costs.speedup if slots > 1 and _solo(lane, count) else 1.0)
        return Batch(lane, parts, slots, depth, seconds, _told(why, parts))

    def _size(self, lane: Lane, mates: Sequence[Work], idle: int) -> int:
        """How many rows the next forward should have."""
        if mates[0].alone or mates[0].whole:
            return min(mates[0].left, lane.padded or lane.ceiling, lane.ceiling)
        waiting = sum(work.left for work in mates)
        device, free = self._devices[lane.device], self._free[lane.device]
        solo = _solo(lane, 1)
        if solo and free == device.slots > 1 and waiting <= 2 * lane.costs.speedup:
            return 1  # one after the other on all cores is quicker than side by side
        sides = min(free // lane.width, idle) if device.parallel else 1
        share = math.ceil(waiting / max(sides, 1))
        if lane.seconds(waiting) < WORTH * lane.seconds(share):
            share = waiting  # the fixed part of two forwards is more than they gain side by side
        return min(max(share, 2 if solo else 1), lane.padded or lane.target, lane.ceiling)

    def _slots(self, lane: Lane, rows: int) -> int:
        """All of them for a single row that gains by it, else one: it hangs on nothing but the number of rows.

        Other threads make other bits, so that a batch of the same shape must always get the same number of them.
        """
        every = self._devices[lane.device].slots
        return every if _solo(lane, rows) else min(lane.width, every)

    def _started(self, batch: Batch) -> Batch:
        queues = self._waiting[batch.lane]
        for part in batch.parts:
            queues.rows -= part.stop - part.start
            part.work.given = part.stop
            if part.work.left == 0:
                self.remove(part.work)
        model, device = batch.lane.model, batch.lane.device
        self._level[device] = max(self._level.get(device, 0.0), self._served[model])
        self._free[device] -= batch.slots
        self._running[model] = self._running.get(model, 0) + 1
        self._served[model] += batch.seconds * batch.slots
        return batch


def _solo(lane: Lane, rows: int) -> bool:
    """Whether a forward is one of a single row that gains by all cores."""
    return (lane.padded or rows) == 1 and lane.costs.speedup > 1


def _mates(works: Sequence[Work], lane: Lane) -> tuple[list[Work], Why]:
    """The requests that share a forward with the first one, and why."""
    head = works[0]
    if head.alone or head.whole:
        return [head], "isolated"
    others = [work for work in works if not (work.alone or work.whole)]
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


def _told(why: Why, parts: Sequence[Part]) -> Why:
    """Why, in the end: of those that could share not all need have found room."""
    if why in ("same_depth", "sharing_pays") and len(parts) == 1:
        return "single"
    return "same_depth" if why == "sharing_pays" and len({part.work.depth for part in parts}) == 1 else why


def _cluster(works: Sequence[Work], depths: Sequence[float], lane: Lane, depth: float) -> tuple[float, float]:
    """From which depth to which requests run together with one of a depth: what makes all of them end soonest.

    A shared forward goes to the deepest layer with all rows, but pays its fixed part once. Of all ways to cut the
    sorted depths into pieces the cheapest is taken, by the sum of the pieces' forwards.
    """
    rows = dict.fromkeys(depths, 0)
    for work in works:
        rows[work.depth] += work.left
    sums = list(accumulate(rows.values(), initial=0))
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the first so many depths: cost, and where the last piece begins
    for stop, deepest in enumerate(depths, 1):
        costs = (best[start][0] + lane.seconds(sums[stop] - sums[start], deepest) for start in range(stop))
        best.append(min(zip(costs, range(stop), strict=True)))
    stop = len(depths)
    while depths[best[stop][1]] > depth:
        stop = best[stop][1]
    return depths[best[stop][1]], depths[stop - 1]


def _filled(mates: Iterable[Work], rows: int, lane: Lane) -> Iterator[Part]:
    """The first rows, within the memory that a forward may take; at least one."""
    left, room = rows, lane.budget
    for number, work in enumerate(mates):
        each = lane.costs.row_bytes + work.row_bytes
        count = min(work.left, left, room // max(each, 1))
        if number == 0:
            count = work.left if work.whole else max(count, 1)
        if count <= 0:
            return
        yield Part(work, work.given, work.given + count)
        if count < work.left:
            return  # rows of others do not pass what is left of it
        left, room = left - count, room - count * each
