"""The batcher decides which waiting rows share the next forward and when it starts; it has no threads and no I/O.

A batch never waits for more rows: batches grow while others run. A device has slots, a CPU one for each core, a GPU one
for each stream. A batch takes one slot, or all of them for a single row that all cores compute together. Pictures are
decoded on the CPU's slots too: before forwards, until a batch is large enough to be worth its start.

``waiting.py`` keeps what waits in order, ``batch_formation.py`` says which rows a batch has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from layertap.service.engine.batch import CPU, Batch, Job, RowSlice
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.schedule.batch_formation import (
    choose_joining,
    count_parallel,
    count_slots,
    estimate_seconds,
    find_batch_reason,
    form_batch,
)
from layertap.service.engine.schedule.waiting import (
    SMOOTHING,
    BatchQueue,
    DeviceSlots,
    ModelState,
    SlotWait,
    WaitingEntries,
    is_deferred,
)

Clock = Callable[[], float]
IdleReplicas = Mapping[str, Mapping[str, int]]  # by model, then by device
TURN_FACTOR = 4.0  # a large job lets others pass for so many times as long as its last batch took
MAX_WAIT_IN_FORWARDS = 2.0  # a job is ready after waiting as long as so many efficient forwards take
MODEL, USED_SECONDS, SMALL_CAME_AT = attrgetter("model"), attrgetter("used_seconds"), attrgetter("small_came_at")
MAX_QUEUES = 1024  # of keys without waiting or running rows, with what their batches showed


class Batcher:
    """Takes jobs and gives batches. Not thread-safe.

    ``bulk_delay``: seconds after which a bulk job counts as an interactive one that has just arrived. Rows that
    arrive that much later than a picture do not overtake it. For as long after a small interactive job, bulk and
    large jobs get small batches: another one is likely to arrive, and would wait for the batch that runs.
    """

    def __init__(self, devices: Mapping[str, DeviceSlots], clock: Clock, bulk_delay: float = 5.0) -> None:
        self._clock = clock
        self._bulk_delay = bulk_delay
        self._devices: dict[str, DeviceSlots] = {}
        self._models: dict[str, ModelState] = {}
        self._queues: dict[BatchKey, BatchQueue] = {}
        self._waiting: dict[BatchKey, BatchQueue] = {}  # those with waiting rows
        self._slot_waits = WaitingEntries[SlotWait]()
        self._running_waits = 0
        self._again: list[Batch] = []  # batches to run once more
        for name, device in devices.items():
            self.add_device(name, device)

    # Devices and limits

    def add_device(self, name: str, device: DeviceSlots) -> None:
        """Add a device, if it is not there yet."""
        self._devices.setdefault(name, DeviceSlots(device.slots, device.parallel, name))

    def count_slots(self) -> dict[str, int]:
        """The slots of each device; any thread may ask."""
        return {name: device.slots for name, device in list(self._devices.items())}

    def count_parallel_batches(self, devices: Sequence[str], slots: int) -> int:
        """How many batches of so many slots these devices compute at the same time."""
        batches = 0
        for name in devices:
            batches += self._devices[name].slots // slots if self._devices[name].parallel else 1
        return batches

    def reduce_max_rows(self, key: BatchKey, rows: int) -> None:
        """A forward of so many rows ran out of memory: batches of its key are smaller for a while."""
        self.get_queue(key).reduce_rows(rows, self._clock())

    def limit_to_one_row(self, model: str) -> None:
        """Have forwards of one row of a model from now on, also of rows that wait."""
        self._get_model(model).max_rows = 1
        for queue in self._queues.values():
            if queue.key.model == model:
                queue.limit_rows()

    def get_max_rows(self, model: str) -> int:
        """The most rows of a model's next forward, for the newest job's key; 0 before the first. Any thread may ask."""
        state = self._models.get(model)
        queue = self._queues.get(state.newest) if state is not None and state.newest is not None else None
        return 0 if queue is None else queue.fitting_rows

    def get_queue(self, key: BatchKey) -> BatchQueue:
        """The queue of a key, made if missing."""
        if key not in self._queues:
            if len(self._queues) >= MAX_QUEUES:
                used = [queue for queue in self._queues.values() if queue.waiting_rows or queue.running_rows]
                self._queues = {queue.key: queue for queue in used}
            devices = [self._devices[name] for name in key.devices]
            self._queues[key] = BatchQueue(key, self._get_model(key.model), devices)
        return self._queues[key]

    # What waits

    def add(self, job: Job) -> None:
        """Add a job."""
        queue = self.get_queue(job.prepared.key)
        key, model = queue.key, queue.model
        if not (model.running_rows or self.count_waiting_rows(key.model)):
            model.used_seconds = max(model.used_seconds, min(map(USED_SECONDS, queue.devices)))
        self._set_arrival(job)
        if job.priority == "interactive" and not queue.is_large(job):
            for device in queue.devices:
                device.small_came_at = job.enqueued_at
        queue.add(job)
        self._waiting[key], model.newest = queue, key

    def remove(self, job: Job) -> None:
        """Remove the rows of a job that are in no batch."""
        if self._again:
            rest = [(batch, [each for each in batch.slices if each.job is not job]) for batch in self._again]
            self._again = [batch.take(slices, batch.tries) for batch, slices in rest if slices]
        queue = self._waiting.get(job.prepared.key)
        if queue is not None and queue.remove(job) and not queue.waiting_rows:
            del self._waiting[queue.key]

    def add_wait(self, wait: SlotWait) -> None:
        """Add a wait for a slot of the CPU."""
        self._set_arrival(wait)
        self._slot_waits.add(wait)

    def remove_wait(self, wait: SlotWait) -> bool:
        """Remove a wait for a slot; returns False if it has got one."""
        return self._slot_waits.remove(wait)

    def add_again(self, batch: Batch) -> None:
        """Add a batch that has to run once more: it starts before all waiting jobs."""
        self._again.append(batch)

    def remove_model(self, model: str) -> None:
        """Forget a model without waiting or running rows."""
        self._models.pop(model, None)
        for queues in (self._queues, self._waiting):  # jobs past their deadline may still wait
            for key in [key for key in queues if key.model == model]:
                del queues[key]
        self._again = [batch for batch in self._again if batch.key.model != model]

    def count_waiting_rows(self, model: str) -> int:
        """The rows of a model that are in no running batch; any thread may ask."""
        rows = 0
        for queue in list(self._waiting.values()):
            if queue.key.model == model:
                rows += queue.waiting_rows
        for batch in self._again:
            if batch.key.model == model:
                rows += batch.rows
        return rows

    def find_waiting_models(self) -> set[str]:
        """The models with waiting rows."""
        models = set(map(MODEL, self._waiting))
        return models.union(map(attrgetter("key.model"), self._again)) if self._again else models

    # What starts

    def start_next(self, idle_replicas: IdleReplicas) -> Batch | SlotWait | None:
        """Start the next batch or give the next wait a slot; None if nothing can start now.

        ``idle_replicas``: the replicas that can run a batch, by model and device.
        """
        waits = self._slot_waits
        if not (self._waiting or self._again or waits.waiting_rows):
            return None
        now = self._clock()
        reserved: set[str] = set()  # devices whose slots are kept free for a batch that needs more than there are
        if self._again and (again := self._take_again(idle_replicas, reserved, now)) is not None:
            return self._begin(self.get_queue(again.key), again, self._devices[again.device])
        jobs = self._list_first_jobs(idle_replicas, now)
        wait = self._find_first_wait(now) if waits.waiting_rows else None
        if wait is not None and not any(self._precedes(job, wait, now) for job in jobs):
            jobs = [job for job in jobs if CPU not in job.prepared.key.devices]
        for job in jobs:
            queue = self._waiting[job.prepared.key]
            device, parallel = self._find_device(queue, job, idle_replicas[queue.key.model], reserved, now)
            if device is None:
                continue
            if queue.fitting_rows < queue.max_rows:
                queue.try_more_rows(now)
            candidates = queue.list_first(now)
            yielding_rows = self._limit_yielding_rows(queue, candidates, now)
            batch = form_batch(queue, candidates, device, parallel, yielding_rows)
            if batch is not None:
                self._take(queue, batch.slices, device, now)
                return self._begin(queue, batch, device)
            if now - job.enqueued_at > queue.key.costs.estimate_seconds(1):  # others have passed it for long enough
                reserved.add(device.name)
        if wait is not None and CPU not in reserved:
            waits.remove(wait)
            self._devices[CPU].free -= 1
            self._running_waits += 1
            return wait
        return None

    def extend(self, batch: Batch) -> Sequence[RowSlice]:
        """Add waiting rows to a batch whose forward has not begun; returns their slices."""
        queue = self._waiting.get(batch.key)
        if queue is None or batch.reason == "isolated":  # it runs again: another picture of the kind would stop it anew
            return ()
        now, device = self._clock(), self._devices[batch.device]
        candidates = queue.list_first(now)
        yielding_rows = self._limit_yielding_rows(queue, [each.job for each in batch.slices] + candidates, now)
        joining = choose_joining(queue, batch, candidates, device, yielding_rows)
        self._take(queue, joining, device, now)
        if joining:
            rows, slots, seconds = batch.rows, batch.slots, batch.seconds
            batch.grow(joining)
            batch.slots = count_slots(queue, batch.rows, device)
            batch.seconds = estimate_seconds(queue, batch.slices)
            batch.reason = find_batch_reason(batch.slices, left_out=0)
            queue.running_rows += batch.rows - rows
            queue.model.running_rows += batch.rows - rows
            device.free += slots - batch.slots
            queue.model.used_seconds += batch.seconds * batch.slots - seconds * slots
        return joining

    def finish(self, task: Batch | SlotWait, seconds: float, decode_seconds: float = 0.0) -> None:
        """A batch, or the work in a slot of the CPU, has ended after so many seconds: free its slots.

        ``decode_seconds``: the part of them in which the batch decoded pictures.
        """
        if isinstance(task, SlotWait):
            self._devices[CPU].free += 1
            self._running_waits -= 1
            return
        self._devices[task.device].free += task.slots
        self._devices[task.device].lost.discard(task)
        queue = self._queues.get(task.key)
        if queue is None:  # it hung, and its model is gone
            return
        queue.running_rows -= task.rows
        queue.model.running_rows -= task.rows
        queue.model.used_seconds += (seconds - task.seconds) * task.slots  # measured, not expected
        queue.decode_seconds += SMOOTHING * (decode_seconds / task.rows - queue.decode_seconds)
        for row_slice in task.slices:
            row_slice.job.slowdown = seconds / task.seconds if task.seconds else 1.0

    def lose(self, batch: Batch) -> bool:
        """A batch hangs: it keeps its slots until ``finish``. Returns whether its device has any others."""
        device = self._devices[batch.device]
        device.lost.add(batch)
        return sum(each.slots for each in device.lost) < device.slots

    # In which order

    def _list_first_jobs(self, idle_replicas: IdleReplicas, now: float) -> list[Job]:
        """The first job of each key that has a device with a free slot and an idle replica of the model, sorted.

        Interactive jobs come before bulk; then the model with the least used time; then the earliest due time.
        """
        jobs = []
        for key, queue in list(self._waiting.items()):
            idle = idle_replicas.get(key.model, {})
            for device in queue.devices:
                if device.free > 0 and idle.get(device.name, 0) > 0:
                    if (job := queue.find_first(now)) is not None:
                        jobs.append(job)
                    else:
                        del self._waiting[key]
                    break

        def order(job: Job) -> tuple[bool, float, float]:
            return is_deferred(job, now), self._models[job.prepared.key.model].used_seconds, job.due_at

        return sorted(jobs, key=order) if len(jobs) > 1 else jobs

    def _find_first_wait(self, now: float) -> SlotWait | None:
        """The wait that gets a slot of the CPU next, if one is free; if batches have all slots, one more is lent.

        So a bad picture is refused at once, and a good one is ready for the next batch, however long forwards take.
        """
        cpu = self._devices.get(CPU)
        if cpu is None or cpu.free + (not self._running_waits) <= 0:
            return None
        first = self._slot_waits.find_first(now)
        if first is None or first.idle[CPU]:
            return first
        return next((wait for wait in self._slot_waits.list_first(now) if wait.idle[CPU]), None)

    def _precedes(self, job: Job, wait: SlotWait, now: float) -> bool:
        """Whether a job on the CPU goes before a wait: more urgent, or as urgent, ready and not much newer."""
        if CPU not in job.prepared.key.devices:
            return False
        if is_deferred(job, now) != (wait_is_deferred := is_deferred(wait, now)):
            return wait_is_deferred
        return job.due_at <= wait.due_at + self._bulk_delay and self._is_ready(
            self._waiting[job.prepared.key], job, now
        )

    # What may start

    def _find_device(
        self, queue: BatchQueue, job: Job, idle_replicas: Mapping[str, int], reserved: Collection[str], now: float
    ) -> tuple[DeviceSlots | None, int]:
        """The device on which a batch of the queue may start, and how many could start side by side.

        Of several devices it is the first one with most free slots. Where batches only overlap, one starts beside
        others once it is ready.
        """
        best, count = None, 0
        for device in queue.devices:
            if device.free <= 0 or idle_replicas.get(device.name, 0) <= 0 or device.name in reserved:
                continue
            if device.parallel or device.free == device.slots or self._is_ready(queue, job, now):
                best, count = device if best is None or device.free > best.free else best, count + 1
        if best is not None and best.parallel:
            count *= min(best.free // queue.key.slots, idle_replicas[best.name])
        return best, count

    def _is_ready(self, queue: BatchQueue, job: Job, now: float) -> bool:
        """Whether a forward that begins with this job is worth its start now, though more rows may come."""
        rows = queue.efficient_rows
        if queue.waiting_rows >= rows:
            return True
        return now - job.enqueued_at >= MAX_WAIT_IN_FORWARDS * queue.estimate_seconds(rows, job.prepared.depth)

    def _limit_yielding_rows(self, queue: BatchQueue, jobs: Sequence[Job], now: float) -> float:
        """The most rows, by weight, of yielding jobs in a batch that is chosen from these jobs.

        If a small interactive job arrived recently, the batch takes no longer than an efficient one without
        captures, and is a short one if all these jobs are bulk.
        """
        if now - max(map(SMALL_CAME_AT, queue.devices)) >= self._bulk_delay:
            return math.inf
        for job in jobs:
            if job.priority == "interactive":
                return queue.efficient_rows
        return queue.count_short_rows()

    def _take_again(self, idle_replicas: IdleReplicas, reserved: set[str], now: float) -> Batch | None:
        """The first batch to run once more that may start; a device without enough free slots for one is reserved."""
        self._again = [batch for batch in self._again if batch.deadline > now]
        for batch in self._again:
            if not idle_replicas.get(batch.key.model, {}).get(batch.device, 0):
                continue
            if batch.slots <= self._devices[batch.device].free:
                self._again.remove(batch)
                return batch
            reserved.add(batch.device)
        return None

    # Starting it

    def _begin(self, queue: BatchQueue, batch: Batch, device: DeviceSlots) -> Batch:
        model, device.free = queue.model, device.free - batch.slots
        queue.running_rows += batch.rows
        model.running_rows += batch.rows
        device.used_seconds = max(device.used_seconds, model.used_seconds)
        model.used_seconds += batch.seconds * batch.slots
        return batch

    def _take(self, queue: BatchQueue, slices: Sequence[RowSlice], device: DeviceSlots, now: float) -> None:
        """Take rows for a batch; the rest of a large job is due later, so that others can pass it."""
        for row_slice in slices:
            job, due_at = row_slice.job, row_slice.job.due_at
            if row_slice.stop < job.rows and queue.is_large(job):
                seconds = job.slowdown * estimate_seconds(queue, [row_slice])
                parallel = count_parallel(queue.key, device)
                due_at = max(due_at, min(due_at, now) + TURN_FACTOR * seconds / parallel)
            queue.take(row_slice, due_at)
        if not queue.waiting_rows:
            del self._waiting[queue.key]

    def _set_arrival(self, entry: Job | SlotWait) -> None:
        entry.enqueued_at = self._clock()
        entry.due_at = entry.enqueued_at + (self._bulk_delay if entry.priority == "bulk" else 0.0)

    def _get_model(self, model: str) -> ModelState:
        return self._models.setdefault(model, ModelState())
