"""What was asked of a batcher, as plain lists, and what may follow from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import Batch, Job
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.schedule.waiting import BatchQueue, DeviceSlots, SlotWait
from tests.service.engine.batcher_harness import BULK_DELAY, RunningTask

DEVICES = {"cpu": DeviceSlots(3), "gpu": DeviceSlots(2, parallel=False), "gpu1": DeviceSlots(1, parallel=False)}
REPLICAS = {"a": {"cpu": 3}, "b": {"cpu": 2}, "c": {"gpu": 1}, "d": {"gpu": 2}, "e": {"gpu": 1, "gpu1": 1}}
IdleReplicas = Mapping[str, Mapping[str, int]]
CPU, GPU, GPUS = ("cpu",), ("gpu",), ("gpu", "gpu1")


def make_keys() -> list[BatchKey]:
    return [
        BatchKey("a", CPU, Costs(base=0.0, per_row=1.0, row_bytes=2), 6, max_bytes=20),
        BatchKey("a", CPU, Costs(base=0.5, per_row=0.25, row_bytes=1), 3, pads=True),
        BatchKey("b", CPU, Costs(base=0.5, per_row=1.0, row_bytes=3, speedup=2.0), 8, max_bytes=24),
        BatchKey("b", CPU, Costs(base=0.0, per_row=0.5, row_bytes=1, speedup=2.5), 1),
        BatchKey("c", GPU, Costs(base=4.0, per_row=0.5, row_bytes=4), 12, max_bytes=40),
        BatchKey("d", GPU, Costs(base=1.0, per_row=1.0, row_bytes=1), 7),
        BatchKey("d", GPU, Costs(base=1.0, per_row=1.0, row_bytes=1), 4, pads=True),
        BatchKey("e", GPUS, Costs(base=1.0, per_row=0.5, row_bytes=1), 9),
    ]


ORDERS = itertools.count()  # in which requests came, or came back


@dataclass(eq=False)
class ExpectedRequest:
    """A request as it was asked, and how many of its rows were in batches."""

    request: Job
    queue: BatchQueue
    enqueued_at: float = 0.0
    removed: bool = False
    rows: int = field(init=False)
    due_at: float = field(init=False)
    taken_rows: int = 0
    slowdown: float = 1.0
    order: int = field(default_factory=lambda: next(ORDERS))

    def __post_init__(self) -> None:
        self.rows = self.request.rows
        self.due_at = self.enqueued_at + BULK_DELAY * self.bulk

    @property
    def key(self) -> BatchKey:
        return self.request.prepared.key

    @property
    def depth(self) -> float:
        return self.request.prepared.depth

    @property
    def waiting_rows(self) -> int:
        return self.rows - self.taken_rows

    @property
    def isolated(self) -> bool:
        return self.request.prepared.isolated or self.request.prepared.unsplittable

    @property
    def bulk(self) -> bool:
        return self.request.priority == "bulk"

    def deferred(self, now: float) -> bool:
        return self.bulk and now < self.due_at

    def take(self, stop: int, now: float) -> None:
        """Rows up to one run; the rest of a large request goes behind what comes in four times as long as they take."""
        rows, costs, devices = stop - self.taken_rows, self.key.costs, self.key.devices
        padded_rows = self.queue.padded_rows or rows
        forwards, forward_rows = -(-rows // padded_rows), padded_rows
        seconds = (
            forwards * self.depth * (costs.base + forward_rows * costs.per_row)
            + rows * self.request.prepared.row_bytes / 1e9
        )
        parallel = sum(DEVICES[device].slots if DEVICES[device].parallel else 1 for device in devices)
        if self.queue.is_large(self.request):
            due_at = max(self.due_at, min(self.due_at, now) + 4 * self.slowdown * seconds / parallel)
            if due_at != self.due_at:  # behind those that are due at the same moment
                self.due_at, self.order = due_at, next(ORDERS)
        self.taken_rows = stop


def cuts(depths: Sequence[float]) -> Iterator[list[Sequence[float]]]:
    """All ways to cut a sequence into pieces."""
    for count in range(len(depths)):
        for places in combinations(range(1, len(depths)), count):
            bounds = [0, *places, len(depths)]
            yield [depths[start:stop] for start, stop in pairwise(bounds)]


def cheapest_cuts(queue: BatchQueue, requests: Sequence[ExpectedRequest]) -> list[list[Sequence[float]]]:
    """The cuts of the depths of some requests that cost least, several where they cost the same."""
    costs, padded_rows = queue.key.costs, queue.padded_rows

    def seconds(depths: Sequence[float]) -> float:
        rows = sum(request.waiting_rows for request in requests if request.depth in depths)
        forwards, forward_rows = (1, rows) if padded_rows is None else (-(-rows // padded_rows), padded_rows)
        return forwards * max(depths) * (costs.base + forward_rows * costs.per_row)

    sums = [(sum(map(seconds, cut)), cut) for cut in cuts(sorted({request.depth for request in requests}))]
    least = min(cost for cost, _ in sums)
    return [cut for cost, cut in sums if cost <= least + 1e-9 * max(least, 1.0)]


class BatcherReference:
    """All that was asked and all that runs; what could start is found anew by looking at everything.

    Only the rows that fit into a forward are the batcher's own, of ``get_queue``.
    """

    get_queue: Callable[[BatchKey], BatchQueue]

    def __init__(self) -> None:
        self.now = 0.0
        self.keys = make_keys()
        self.requests: list[ExpectedRequest] = []
        self.pictures: list[tuple[SlotWait, float]] = []  # that wait, each with the moment at which it is due
        self.running: list[RunningTask] = []

    # What is there

    def idle_replicas(self) -> dict[str, dict[str, int]]:
        busy = [(batch.key.model, batch.device) for batch in self.running if isinstance(batch, Batch)]
        return {
            model: {device: count - busy.count((model, device)) for device, count in counts.items()}
            for model, counts in REPLICAS.items()
        }

    def decoding(self) -> int:
        """How many pictures are decoded now."""
        return sum(isinstance(task, SlotWait) for task in self.running)

    def free_slots(self, device: str) -> int:
        batches = [batch for batch in self.running if isinstance(batch, Batch) and batch.device == device]
        decoding = self.decoding() if device == "cpu" else 0
        return DEVICES[device].slots - sum(batch.slots for batch in batches) - decoding

    def can_decode(self) -> bool:
        """Whether the processor has a slot, or lends one to the only picture that is decoded."""
        return self.free_slots("cpu") > 0 or (self.free_slots("cpu") == 0 and not self.decoding())

    def next_picture(self) -> tuple[SlotWait, float]:
        def order(picture: tuple[SlotWait, float]) -> tuple[bool, float, bool]:
            task, due_at = picture
            bulk = task.priority == "bulk"
            return bulk and self.now < due_at, due_at, bulk

        return min(self.pictures, key=order)

    def waiting(self, key: BatchKey) -> list[ExpectedRequest]:
        """What can still run of a key, in the order in which it should."""
        requests = [
            request
            for request in self.requests
            if request.key is key and request.waiting_rows and not request.removed
            if request.request.deadline > self.now
        ]
        if not all(request.bulk for request in requests):
            requests = [request for request in requests if not request.deferred(self.now)]
        return sorted(requests, key=lambda request: (request.due_at, request.bulk, request.order))

    # What may start

    def sharing(self, key: BatchKey) -> list[tuple[list[ExpectedRequest], str]]:
        """Who may run with the key's first request, and why, should there be room; several where costs tie."""
        waiting = self.waiting(key)
        if waiting[0].isolated:
            return [(waiting[:1], "isolated")]
        shareable = [request for request in waiting if not request.isolated]
        answers = []
        for cut in cheapest_cuts(self.get_queue(key), shareable):
            depths = next(depths for depths in cut if waiting[0].depth in depths)
            companions = [request for request in shareable if request.depth in depths]
            answers.append((companions, "shared" if len(companions) == len(shareable) else "sharing_costs"))
        return answers

    def lacks_slots(self, key: BatchKey) -> bool:
        """Whether the key's next forward is one of a single row that needs all slots, and some are busy."""
        device = key.devices[0]  # none of such a model on several
        if key.costs.speedup == 1 or self.get_queue(key).padded_rows not in (None, 1):
            return False
        if self.free_slots(device) == DEVICES[device].slots:
            return False
        sizes = []
        for companions, _ in self.sharing(key):
            first = companions[0]
            row_bytes = [
                key.costs.row_bytes + request.request.prepared.row_bytes
                for request in companions
                for _ in range(request.waiting_rows)
            ][:2]
            two_fit = self.get_queue(key).fitting_rows > 1 and sum(row_bytes) <= key.max_bytes and len(row_bytes) > 1
            sizes.append(first.rows if first.request.prepared.unsplittable else 1 + two_fit)
        return min(sizes) == 1

    def is_reserved(self, device: str, idle_replicas: IdleReplicas) -> bool:
        """Whether a row that could have all slots of a device, had it waited for nothing else, is overdue."""
        return any(
            self.lacks_slots(key) and self.now - self.waiting(key)[0].enqueued_at > key.costs.base + key.costs.per_row
            for key in self.keys
            if idle_replicas[key.model].get(device, 0) > 0 and self.waiting(key)
        )

    def startable_keys(self, idle_replicas: IdleReplicas) -> list[tuple[BatchKey, str]]:
        """Queues of which something can start now, whatever it is, and on which device."""
        return [
            (key, device)
            for key in self.keys
            for device in key.devices
            if idle_replicas[key.model][device] > 0 and self.free_slots(device) > 0 and self.waiting(key)
            if not self.lacks_slots(key) and (not self.would_overlap(device) or self.is_surely_ready(key))
        ]

    def would_overlap(self, device: str) -> bool:
        """Whether a forward would begin beside others, on a device where they only overlap."""
        return not DEVICES[device].parallel and self.free_slots(device) < DEVICES[device].slots

    def is_surely_ready(self, key: BatchKey) -> bool:
        """As ``is_ready``, whether or not what is past its deadline still counts."""
        expired_rows = sum(
            request.waiting_rows
            for request in self.requests
            if request.key is key and request.request.deadline <= self.now and not request.removed
        )
        return self.is_ready(key, self.waiting(key)[0], expired_rows)

    def is_ready(self, key: BatchKey, first: ExpectedRequest, expired_rows: int = 0) -> bool:
        """Whether a forward is worth its start: it has rows enough, or the first one has waited for long."""
        queue, fixed_rows = self.get_queue(key), math.ceil(10 * key.costs.base / key.costs.per_row)
        rows = queue.padded_rows or min(max(4, fixed_rows), queue.fitting_rows)
        waiting_rows = sum(
            request.waiting_rows for request in self.requests if request.key is key and not request.removed
        )
        seconds = 2 * first.depth * (key.costs.base + rows * key.costs.per_row)
        return waiting_rows - expired_rows >= rows or self.now - first.enqueued_at >= seconds

    def is_interactive_device(self, device: str) -> bool:
        """Whether a small interactive request has come lately for any key of a device."""
        return any(
            not request.bulk and device in request.key.devices and self.now - request.enqueued_at < BULK_DELAY
            for request in self.requests
            if not request.queue.is_large(request.request)
        )

    # Forwards and pictures

    def may_precede_picture(self, task: SlotWait, due_at: float) -> bool:
        """Whether a picture lets a forward on the processor go first."""
        deferred = task.priority == "bulk" and self.now < due_at
        for key in self.keys:
            first = next(iter(self.waiting(key)), None)
            if "cpu" not in key.devices or first is None:
                continue
            if first.deferred(self.now) < deferred:
                return True
            as_urgent = first.deferred(self.now) == deferred and first.due_at <= due_at + BULK_DELAY
            if as_urgent and self.is_ready(key, first):
                return True
        return False

    def must_precede_picture(self, keys: Sequence[BatchKey], task: SlotWait, due_at: float) -> bool:
        """Whether a picture has to let a forward of some keys go first."""
        deferred = task.priority == "bulk" and self.now < due_at
        for key in keys:
            first = self.waiting(key)[0]
            waiting_rows = sum(request.waiting_rows for request in self.waiting(key))
            has_rows = waiting_rows >= self.get_queue(key).efficient_rows
            if first.deferred(self.now) < deferred:
                return True
            if first.deferred(self.now) == deferred and has_rows and first.due_at <= due_at + BULK_DELAY:
                return True
        return False
