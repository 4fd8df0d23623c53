"""The batcher decides which waiting rows share the next forward and when it starts; it has no threads and no I/O.

A batch never waits for more rows: batches grow while others run. A device has slots, a CPU one for each core, a GPU one
for each stream. A batch takes one slot, or all of them for a single row that all cores compute together. Pictures are
decoded on the CPU's slots too: before forwards, until a batch is large enough to be worth its start.

``waiting.py`` keeps what waits in order, ``batch_formation.py`` says which rows a batch has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from layertap.service.engine.batch import CPU, Batch, Job, RowSlice
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.schedule.batch_formation import (
    DeviceSlots,
    DeviceState,
    choose_joining,
    count_parallel,
    count_slots,
    estimate_seconds,
    find_batch_reason,
    form_batch,
)
from layertap.service.engine.schedule.waiting import DecodeTask, WaitingEntries, WaitingJobs, is_deferred

Clock = Callable[[], float]
IdleReplicas = Mapping[str, Mapping[str, int]]  # by model, then by device
TURN_FACTOR = 4.0  # a large job lets others pass for so many times as long as its last batch took
MAX_WAIT_IN_FORWARDS = 2.0  # a job is ready after waiting as long as so many efficient forwards take


class FairShare:
    """The slot seconds that each model has used; the model that used least goes first.

    ``used_seconds`` are for comparison, not totals: a model that was idle begins at the level of the models that kept
    its device busy meanwhile, so that it neither saves up time nor pays for time that no other model wanted. This is
    start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with a batch's expected seconds when it starts and
    its measured ones when it ends.
    """

    def __init__(self) -> None:
        self.used_seconds: dict[str, float] = {}
        self._device_seconds: dict[str, float] = {}  # the most that a model had used when it started a batch

    def join(self, model: str, devices: Sequence[str]) -> None:
        """Begin to count a model of which nothing waits or runs, at the level of its least used device."""
        device_seconds = min(self._device_seconds.get(device, 0.0) for device in devices)
        self.used_seconds[model] = max(self.used_seconds.get(model, 0.0), device_seconds)

    def start(self, batch: Batch) -> None:
        """Add the expected seconds of a batch that starts."""
        model, device = batch.key.model, batch.device
        self._device_seconds[device] = max(self._device_seconds.get(device, 0.0), self.used_seconds[model])
        self.add(batch, batch.seconds * batch.slots)

    def add(self, batch: Batch, seconds: float) -> None:
        """Add slot seconds to the used time of a batch's model."""
        self.used_seconds[batch.key.model] += seconds

    def remove(self, model: str) -> None:
        """Forget a model."""
        self.used_seconds.pop(model, None)


class Batcher:
    """Takes jobs and gives batches. Not thread-safe.

    ``bulk_delay``: seconds after which a bulk job counts as an interactive one that has just arrived. Rows that
    arrive that much later than a picture do not overtake it. For as long after a small interactive job, bulk and
    large jobs get small batches: another one is likely to arrive, and would wait for the batch that runs.
    """

    def __init__(self, devices: Mapping[str, DeviceSlots], clock: Clock, bulk_delay: float = 5.0) -> None:
        self._clock = clock
        self._bulk_delay = bulk_delay
        self._devices = dict(devices)
        self._free_slots = {name: device.slots for name, device in devices.items()}
        self._waiting: dict[BatchKey, WaitingJobs] = {}  # no entry is empty
        self._waiting_decodes = WaitingEntries[DecodeTask]()
        self._running_rows: dict[BatchKey, int] = {}  # no entry is 0
        self._running_decodes = 0
        self._small_came_at: dict[str, float] = {}  # by device: the arrival of its last small interactive job
        self._again: list[Batch] = []  # batches to run once more
        self._fair_share = FairShare()

    # Devices and limits

    def add_device(self, name: str, device: DeviceSlots) -> None:
        """Add a device, if it is not there yet."""
        if name not in self._devices:
            self._devices[name], self._free_slots[name] = device, device.slots

    def count_slots(self) -> dict[str, int]:
        """The slots of each device; any thread may ask."""
        return {name: device.slots for name, device in self._devices.items()}

    def count_parallel_batches(self, devices: Sequence[str], slots: int) -> int:
        """How many batches of so many slots these devices compute at the same time."""
        known = [self._devices[name] for name in devices]
        return sum(device.slots // slots if device.parallel else 1 for device in known)

    def reduce_max_rows(self, key: BatchKey, rows: int) -> None:
        """A forward of so many rows ran out of memory: batches of its key are smaller for a while."""
        key.reduce_rows(rows, self._clock())

    # What waits

    def add(self, job: Job) -> None:
        """Add a job."""
        key = job.prepared.key
        keys = (*self._waiting, *self._running_rows, *(batch.key for batch in self._again))
        if all(each.model != key.model for each in keys):
            self._fair_share.join(key.model, key.devices)
        self._set_arrival(job)
        if job.priority == "interactive" and not job.is_large:
            self._small_came_at.update(dict.fromkeys(key.devices, job.enqueued_at))
        self._waiting.setdefault(key, WaitingJobs()).add(job)

    def remove(self, job: Job) -> None:
        """Remove the rows of a job that are in no batch."""
        rest = [(batch, [each for each in batch.slices if each.job is not job]) for batch in self._again]
        self._again = [batch.take(slices, batch.tries) for batch, slices in rest if slices]
        if job.prepared.key in self._waiting:
            self._waiting[job.prepared.key].remove(job)
            self._forget_if_empty(job.prepared.key)

    def add_decode(self, task: DecodeTask) -> None:
        """Add a picture to decode."""
        self._set_arrival(task)
        self._waiting_decodes.add(task)

    def remove_decode(self, task: DecodeTask) -> None:
        """Remove a picture, unless its decoding has begun."""
        self._waiting_decodes.remove(task)

    def add_again(self, batch: Batch) -> None:
        """Add a batch that has to run once more: it starts before all waiting jobs."""
        self._again.append(batch)

    def remove_model(self, model: str) -> None:
        """Forget a model without waiting or running rows."""
        self._fair_share.remove(model)
        for key in [key for key in self._waiting if key.model == model]:
            del self._waiting[key]  # jobs past their deadline may still be here
        self._again = [batch for batch in self._again if batch.key.model != model]

    def count_waiting_rows(self, model: str) -> int:
        """The rows of a model that are in no running batch; any thread may ask."""
        again = sum(batch.rows for batch in list(self._again) if batch.key.model == model)
        return again + sum(waiting.rows for key, waiting in list(self._waiting.items()) if key.model == model)

    # What starts

    def start_next(self, idle_replicas: IdleReplicas) -> Batch | DecodeTask | None:
        """Start the next batch or decode task; None if nothing can start now.

        ``idle_replicas``: the replicas that can run a batch, by model and device.
        """
        now = self._clock()
        reserved: set[str] = set()  # devices whose slots are kept free for a batch that needs more than there are
        if (again := self._take_again(idle_replicas, reserved, now)) is not None:
            return self._begin(again)
        jobs, task = self._list_first_jobs(idle_replicas, now), self._find_first_decode(now)
        if task is not None and not any(self._precedes(job, task, now) for job in jobs):
            jobs = [job for job in jobs if CPU not in job.prepared.key.devices]
        for job in jobs:
            key = job.prepared.key
            state = self._find_device(job, idle_replicas[key.model], reserved, now)
            if state is None:
                continue
            key.try_more_rows(now)
            candidates = self._waiting[key].list_candidates(now)
            batch = form_batch(candidates, state, self._limit_yielding_rows(candidates, now))
            if batch is not None:
                self._take(batch.slices, batch.device, now)
                self._forget_if_empty(key)
                return self._begin(batch)
            if now - job.enqueued_at > key.costs.estimate_seconds(1):  # others have passed it for long enough
                reserved.add(state.name)
        if task is not None and CPU not in reserved:
            self._waiting_decodes.remove(task)
            self._free_slots[CPU] -= 1
            self._running_decodes += 1
            return task
        return None

    def extend(self, batch: Batch) -> tuple[RowSlice, ...]:
        """Add waiting rows to a batch whose forward has not begun; returns their slices."""
        waiting = self._waiting.get(batch.key)
        if waiting is None:
            return ()
        now, device = self._clock(), self._devices[batch.device]
        candidates = waiting.list_candidates(now)
        yielding_rows = self._limit_yielding_rows([each.job for each in batch.slices] + candidates, now)
        joining = choose_joining(batch, candidates, device, self._running_rows[batch.key], yielding_rows)
        self._take(joining, batch.device, now)
        self._forget_if_empty(batch.key)
        if joining:
            slots, seconds = batch.slots, batch.seconds
            batch.slices += joining
            batch.slots = count_slots(batch.key, batch.rows, device)
            batch.seconds = estimate_seconds(batch.slices)
            batch.reason = find_batch_reason(batch.slices, left_out=0)
            self._running_rows[batch.key] += sum(each.rows for each in joining)
            self._free_slots[batch.device] += slots - batch.slots
            self._fair_share.add(batch, batch.seconds * batch.slots - seconds * slots)
        return joining

    def finish(self, task: Batch | DecodeTask, seconds: float, decode_seconds: float = 0.0) -> None:
        """A batch or decode task has ended after so many seconds: free its slots.

        ``decode_seconds``: the part of them in which the batch decoded pictures.
        """
        if isinstance(task, DecodeTask):
            self._free_slots[CPU] += 1
            self._running_decodes -= 1
        else:
            self._free_slots[task.device] += task.slots
            self._running_rows[task.key] -= task.rows
            if not self._running_rows[task.key]:
                del self._running_rows[task.key]
            self._fair_share.add(task, (seconds - task.seconds) * task.slots)  # measured, not expected
            task.key.note_decode_seconds(decode_seconds / task.rows)
            for row_slice in task.slices:
                row_slice.job.slowdown = seconds / task.seconds if task.seconds else 1.0

    # In which order

    def _list_first_jobs(self, idle_replicas: IdleReplicas, now: float) -> list[Job]:
        """The first job of each key that has a free device, sorted.

        Interactive jobs come before bulk; then the model with the least used time; then the earliest due time.
        """
        jobs = []
        for key, waiting in list(self._waiting.items()):
            if self._list_free_devices(key, idle_replicas.get(key.model, {})):
                job = waiting.find_first(now)
                self._forget_if_empty(key)
                if job is not None:
                    jobs.append(job)

        def order(job: Job) -> tuple[bool, float, float]:
            return is_deferred(job, now), self._fair_share.used_seconds[job.prepared.key.model], job.due_at

        return sorted(jobs, key=order)

    def _find_first_decode(self, now: float) -> DecodeTask | None:
        """The picture to decode next, if the CPU has a slot for it; if batches have all slots, one more is lent.

        So a bad picture is refused at once, and a good one is ready for the next batch, however long forwards take.
        """
        lent_slots = 0 if self._running_decodes else 1
        if CPU not in self._devices or self._free_slots[CPU] + lent_slots <= 0:
            return None
        return self._waiting_decodes.find_first(now)

    def _precedes(self, job: Job, task: DecodeTask, now: float) -> bool:
        """Whether a job on the CPU goes before a picture: more urgent, or as urgent, ready and not much newer."""
        if CPU not in job.prepared.key.devices:
            return False
        if is_deferred(job, now) != (task_is_deferred := is_deferred(task, now)):
            return task_is_deferred
        return self._is_ready(job, now) and job.due_at <= task.due_at + self._bulk_delay

    # What may start

    def _find_device(
        self, job: Job, idle_replicas: Mapping[str, int], reserved: Collection[str], now: float
    ) -> DeviceState | None:
        """The device on which a batch of the job's key may start; of several the one with most free slots."""
        free = self._list_free_devices(job.prepared.key, idle_replicas)
        may_start = [name for name in free if name not in reserved and self._may_start_on_device(name, job, now)]
        if not may_start:
            return None
        name = max(may_start, key=self._free_slots.__getitem__)  # of equals the first
        return DeviceState(name, self._devices[name], self._free_slots[name], idle_replicas[name], len(may_start))

    def _list_free_devices(self, key: BatchKey, idle_replicas: Mapping[str, int]) -> list[str]:
        """The devices of a key that have a free slot and an idle replica of the model."""
        return [name for name in key.devices if self._free_slots[name] > 0 and idle_replicas.get(name, 0) > 0]

    def _may_start_on_device(self, name: str, job: Job, now: float) -> bool:
        """Whether a batch may start beside those of a device; if batches only overlap there, it has to be ready."""
        device = self._devices[name]
        return device.parallel or self._free_slots[name] == device.slots or self._is_ready(job, now)

    def _is_ready(self, job: Job, now: float) -> bool:
        """Whether a forward that begins with this job is worth its start now, though more rows may come."""
        key = job.prepared.key
        rows = key.efficient_rows
        if self._waiting[key].rows >= rows:
            return True
        return now - job.enqueued_at >= MAX_WAIT_IN_FORWARDS * key.estimate_seconds(rows, job.prepared.depth)

    def _limit_yielding_rows(self, jobs: Sequence[Job], now: float) -> float:
        """The most rows, by weight, of yielding jobs in a batch that is chosen from these jobs.

        If a small interactive job arrived recently, the batch takes no longer than an efficient one without
        captures, and is a short one if all these jobs are bulk.
        """
        key = jobs[0].prepared.key
        came_at = max(self._small_came_at.get(name, -math.inf) for name in key.devices)
        if now - came_at >= self._bulk_delay:
            return math.inf
        return key.efficient_rows if any(job.priority == "interactive" for job in jobs) else key.short_rows

    def _take_again(self, idle_replicas: IdleReplicas, reserved: set[str], now: float) -> Batch | None:
        """The first batch to run once more that may start; a device without enough free slots for one is reserved."""
        self._again = [batch for batch in self._again if batch.deadline > now]
        for batch in self._again:
            if not idle_replicas.get(batch.key.model, {}).get(batch.device, 0):
                continue
            if batch.slots <= self._free_slots[batch.device]:
                self._again.remove(batch)
                return batch
            reserved.add(batch.device)
        return None

    # Starting it

    def _begin(self, batch: Batch) -> Batch:
        self._free_slots[batch.device] -= batch.slots
        self._running_rows[batch.key] = self._running_rows.get(batch.key, 0) + batch.rows
        self._fair_share.start(batch)
        return batch

    def _take(self, slices: Sequence[RowSlice], device: str, now: float) -> None:
        """Take rows for a batch; the rest of a large job is due later, so that others can pass it."""
        for row_slice in slices:
            job, due_at = row_slice.job, row_slice.job.due_at
            if job.is_large:
                seconds = job.slowdown * estimate_seconds([row_slice])
                parallel = count_parallel(job.prepared.key, self._devices[device])
                due_at = max(due_at, min(due_at, now) + TURN_FACTOR * seconds / parallel)
            self._waiting[job.prepared.key].take(row_slice, due_at)

    def _set_arrival(self, entry: Job | DecodeTask) -> None:
        entry.enqueued_at = self._clock()
        entry.due_at = entry.enqueued_at + (self._bulk_delay if entry.priority == "bulk" else 0.0)

    def _forget_if_empty(self, key: BatchKey) -> None:
        if not self._waiting[key]:
            del self._waiting[key]
