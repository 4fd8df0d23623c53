"""A batcher with its clock and its devices, driven by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import Batch, Job
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.prepared_request import PreparedRequest
from layertap.service.engine.schedule.batcher import Batcher
from layertap.service.engine.schedule.waiting import DeviceSlots, SlotWait
from layertap.service.types import Priority

BULK_DELAY = 5.0
CORES = 4
CPU_LIKE = Costs(base=0.0, per_row=1.0, row_bytes=1)
GPU_LIKE = Costs(base=10.0, per_row=1.0, row_bytes=1)
FASTER_ON_ALL_CORES = Costs(base=0.0, per_row=1.0, row_bytes=1, speedup=3.0)
RunningTask = Batch | SlotWait
NamedSlices = list[tuple[str, int, int]]  # of each: the request's name, its first row, the row after its last


class BatcherHarness:
    """A batcher, its clock, what runs, and names for requests."""

    def __init__(self, **devices: DeviceSlots) -> None:
        self.now = 0.0
        self.devices = devices or {"cpu": DeviceSlots(CORES), "gpu": DeviceSlots(1, parallel=False)}
        self.batcher = Batcher(self.devices, lambda: self.now, BULK_DELAY)
        self.names: dict[Job, str] = {}
        self.running: list[RunningTask] = []

    def add(self, key: BatchKey, rows: int = 1, name: str = "", **fields: Any) -> Job:
        request = make_job(key, rows, **fields)
        self.names[request] = name
        self.batcher.add(request)
        return request

    def add_decode(self, priority: Priority = "interactive") -> SlotWait:
        task = SlotWait(priority)
        self.batcher.add_wait(task)
        return task

    def start(self, **idle_replicas: int) -> RunningTask | None:
        """Start what is next; every model has idle replicas where nothing else is said, so many on each device."""
        counts = idle_replicas or dict.fromkeys("abcd", 99)
        task = self.batcher.start_next({model: dict.fromkeys(self.devices, count) for model, count in counts.items()})
        if task is not None:
            self.running.append(task)
        return task

    def start_batch(self, **idle_replicas: int) -> Batch:
        batch = self.start(**idle_replicas)
        assert isinstance(batch, Batch)
        return batch

    def start_batches(self) -> list[Batch]:
        """Start all that may start now."""
        return [task for task in iter(self.start, None) if isinstance(task, Batch)]

    def finish(self, task: RunningTask, seconds: float | None = None) -> None:
        """End something, after as long as it should have taken where nothing else is said."""
        expected_seconds = task.seconds if isinstance(task, Batch) else 0.0
        self.running.remove(task)
        self.batcher.finish(task, expected_seconds if seconds is None else seconds)

    def run_in_turn(self) -> Iterator[Batch]:
        """Batch after batch, each ended before the next one starts, the clock in step."""
        while (batch := self.start()) is not None:
            assert isinstance(batch, Batch)
            self.now += batch.seconds
            self.finish(batch)
            yield batch

    def describe(self, batch: Batch) -> NamedSlices:
        return [(self.names[part.job], part.start, part.stop) for part in batch.slices]


def make_job(key: BatchKey, rows: int, **fields: Any) -> Job:
    """A job; ``fields`` of it, or of what is prepared."""
    own = {name: fields.pop(name) for name in ("priority", "deadline", "work_rows") if name in fields}
    return Job(PreparedRequest(key=key, **fields), rows, **own)


def make_key(
    device: str = "gpu", costs: Costs = CPU_LIKE, max_rows: int = 4, model: str = "a", **fields: Any
) -> BatchKey:
    return BatchKey(model, tuple(device.split()), costs, max_rows, **fields)


def sum_slot_seconds(batches: Sequence[Batch]) -> dict[str, float]:
    """The seconds of slots that each model has used."""
    seconds: dict[str, float] = {}
    for batch in batches:
        seconds[batch.key.model] = seconds.get(batch.key.model, 0.0) + batch.seconds * batch.slots
    return seconds
