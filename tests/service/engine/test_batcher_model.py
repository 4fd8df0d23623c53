"""Any order of events: what a batcher starts is compared with plain lists of what was asked of it."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from layertap.service.engine.batch import Batch, Job, RowSlice
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.prepared_request import PreparedRequest
from layertap.service.engine.schedule.batcher import Batcher
from layertap.service.engine.schedule.waiting import SlotWait
from layertap.service.types import Priority
from tests.service.engine.batcher_harness import BULK_DELAY, CPU_LIKE, RunningTask
from tests.service.engine.batcher_reference import DEVICES, REPLICAS, BatcherReference, ExpectedRequest, IdleReplicas


class BatcherEvents(RuleBasedStateMachine):
    """Requests, pictures, ends and failures in any order."""

    @initialize()
    def start(self) -> None:
        self.reference = BatcherReference()
        self.batcher = Batcher(DEVICES, lambda: self.reference.now, BULK_DELAY)
        self.reference.get_queue = self.batcher.get_queue
        self.slots_by_size: dict[tuple[BatchKey, int | None, int], int] = {}

    # What can happen

    @rule(
        number=st.integers(0, 7),
        rows=st.integers(1, 3) | st.integers(1, 14),
        depths=st.lists(st.sampled_from([0.125, 0.375, 0.5, 0.875, 1.0]), min_size=1, max_size=3),
        row_bytes=st.sampled_from([0, 0, 1, 4, 30]),
        bulk=st.booleans(),
        seconds_left=st.sampled_from([math.inf, math.inf, math.inf, 0.0, 0.5, 3.0, 9.0]),
        flag=st.sampled_from(["", "", "", "isolated", "unsplittable"]),
    )
    def add(
        self, number: int, rows: int, depths: list[float], row_bytes: int, bulk: bool, seconds_left: float, flag: str
    ) -> None:
        key, now = self.reference.keys[number], self.reference.now
        flags: dict[str, Any] = {flag: True} if flag else {}
        priority: Priority = "bulk" if bulk else "interactive"
        for depth in depths:  # several of one key, which may share a forward
            prepared = PreparedRequest(key=key, depth=depth, row_bytes=row_bytes, **flags)
            request = Job(prepared, rows, priority, now + seconds_left)
            self.reference.requests.append(ExpectedRequest(request, self.batcher.get_queue(key), now))
            self.batcher.add(request)

    @precondition(lambda self: self.reference.requests)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        expected = data.draw(st.sampled_from(self.reference.requests))
        expected.removed = True
        self.batcher.remove(expected.request)

    @rule(bulk=st.booleans())
    def add_decode(self, bulk: bool) -> None:
        task = SlotWait("bulk" if bulk else "interactive")
        self.reference.pictures.append((task, self.reference.now + BULK_DELAY * bulk))
        self.batcher.add_wait(task)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.5, 5.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.reference.now += seconds

    @rule(busy_models=st.sets(st.sampled_from("abcde"), max_size=2), most=st.integers(1, 6))
    def start_some(self, busy_models: set[str], most: int) -> None:
        for _ in range(most):
            idle_replicas = {
                model: dict.fromkeys(counts, 0) if model in busy_models else counts
                for model, counts in self.reference.idle_replicas().items()
            }
            if not self.start_next(idle_replicas):
                break

    @precondition(lambda self: self.reference.running)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    def finish(self, data: st.DataObject, seconds: float) -> None:
        task = data.draw(st.sampled_from(self.reference.running))
        self.reference.running.remove(task)
        self.finish_task(task, seconds)

    @rule(number=st.integers(0, 7), rows=st.integers(1, 20))
    def reduce_max_rows(self, number: int, rows: int) -> None:
        self.batcher.reduce_max_rows(self.reference.keys[number], rows)

    # What must hold

    @invariant()
    def counted(self) -> None:
        """Rows that wait: those that can still run at least, those that may have expired at most."""
        for model in REPLICAS:
            waiting = [
                request for request in self.reference.requests if request.key.model == model and not request.removed
            ]
            can_run = sum(request.waiting_rows for request in waiting if request.request.deadline > self.reference.now)
            most = sum(request.waiting_rows for request in waiting)
            assert can_run <= self.batcher.count_waiting_rows(model) <= most

    def start_next(self, idle_replicas: IdleReplicas) -> bool:
        """Start once and judge what came; whether anything did."""
        reference = self.reference
        task = self.batcher.start_next(idle_replicas)
        if isinstance(task, Batch):
            self.check_key(task, idle_replicas)
            self.check_slices(task)
            for row_slice in task.slices:
                self.record(row_slice)
        elif isinstance(task, SlotWait):
            self.check_picture(task, idle_replicas)
        else:
            startable = reference.startable_keys(idle_replicas)
            assert all(reference.is_reserved(device, idle_replicas) for _, device in startable)
            assert not (reference.pictures and reference.can_decode()) or reference.is_reserved("cpu", idle_replicas)
        if task is not None:
            reference.running.append(task)
        lent_slots = {"cpu": 1 if reference.decoding() == 1 else 0}
        assert all(reference.free_slots(device) >= -lent_slots.get(device, 0) for device in DEVICES)
        return task is not None

    def check_key(self, batch: Batch, idle_replicas: IdleReplicas) -> None:
        """The key was allowed to run, had an idle replica, and nothing more urgent of its device could have run."""
        reference, key = self.reference, batch.key
        first = reference.waiting(key)[0]
        assert not reference.would_overlap(batch.device) or reference.is_ready(key, first)
        assert idle_replicas[key.model][batch.device] > 0
        assert reference.free_slots(batch.device) == max(
            reference.free_slots(device)
            for device in key.devices
            if device == batch.device or (idle_replicas[key.model][device] > 0 and not reference.would_overlap(device))
        )
        assert not reference.lacks_slots(key)
        if first.deferred(reference.now):
            rivals = [rival for rival, device in reference.startable_keys(idle_replicas) if device == batch.device]
            assert all(reference.waiting(rival)[0].deferred(reference.now) for rival in rivals)
        if batch.device == "cpu" and reference.pictures:
            assert reference.may_precede_picture(*reference.next_picture())

    def check_slices(self, batch: Batch) -> None:
        """Whose rows these are: the oldest of those that may share, as many as are allowed, and the reason is true."""
        key, queue = batch.key, self.batcher.get_queue(batch.key)
        assert all(row_slice.start < row_slice.stop for row_slice in batch.slices)
        assert batch.rows == sum(row_slice.stop - row_slice.start for row_slice in batch.slices)
        answers = [self.expected(requests, reason, batch) for requests, reason in self.reference.sharing(key)]
        slices = [(row_slice.job, row_slice.start, row_slice.stop) for row_slice in batch.slices]
        assert (slices, batch.reason) in answers
        if not batch.slices[0].job.prepared.unsplittable:
            assert batch.rows <= queue.fitting_rows
            assert batch.padded_rows == queue.padded_rows
            used_bytes = sum(
                (stop - start) * (key.costs.row_bytes + of.prepared.row_bytes) for of, start, stop in slices
            )
            assert used_bytes <= key.max_bytes or batch.rows == 1
        first, costs = batch.slices[0].job, key.costs
        if first.priority == "bulk" and not queue.padded_rows and not first.prepared.isolated:
            others = any(row_slice.job.priority == "interactive" for row_slice in batch.slices)
            short = costs.base + batch.rows * costs.per_row <= 3 * (costs.base + costs.per_row) + 1e-9
            assert short or others or not any(map(self.reference.is_interactive_device, key.devices))
        assert batch.depth == max(row_slice.job.prepared.depth for row_slice in batch.slices)
        single_row = (queue.padded_rows or batch.rows) == 1 and key.costs.speedup > 1
        assert batch.slots == (DEVICES[batch.device].slots if single_row else 1)
        assert self.slots_by_size.setdefault((key, queue.padded_rows, batch.rows), batch.slots) == batch.slots

    def expected(
        self, requests: list[ExpectedRequest], reason: str, batch: Batch
    ) -> tuple[list[tuple[Job, int, int]], str]:
        """The batch that had to be formed of these requests, given how many rows it has."""
        slices, rows = [], batch.rows
        if requests[0].request.prepared.unsplittable:
            rows = requests[0].rows
        for request in requests:
            count = min(request.waiting_rows, rows)
            if count:
                slices.append((request.request, request.taken_rows, request.taken_rows + count))
            rows -= count
        if reason == "shared":
            several_depths = len({request.prepared.depth for request, _, _ in slices}) > 1
            reason = "single" if len(slices) == 1 else "sharing_pays" if several_depths else "same_depth"
        return slices, reason

    def check_picture(self, task: SlotWait, idle_replicas: IdleReplicas) -> None:
        """It is the next one, and no forward had to go first that could."""
        reference = self.reference
        picture = reference.next_picture()
        assert task is picture[0]
        assert reference.can_decode()
        keys = [key for key, device in reference.startable_keys(idle_replicas) if device == "cpu"]
        assert not reference.must_precede_picture(keys, *picture)
        reference.pictures.remove(picture)

    def finish_task(self, task: RunningTask, seconds: float) -> None:
        """End something, and know how much longer it took than expected."""
        self.batcher.finish(task, seconds)
        if isinstance(task, Batch):
            requests = [row_slice.job for row_slice in task.slices]
            for expected in self.reference.requests:
                if expected.request in requests:
                    expected.slowdown = seconds / task.seconds

    def record(self, row_slice: RowSlice) -> None:
        request = next(request for request in self.reference.requests if request.request is row_slice.job)
        assert not request.removed
        assert request.request.deadline > self.reference.now
        assert row_slice.start == request.taken_rows
        request.take(row_slice.stop, self.reference.now)

    def teardown(self) -> None:
        """Run all that waits: it ends, every row was given that was neither removed nor expired, all slots are free."""
        if not hasattr(self, "batcher"):
            return
        reference = self.reference
        rows = sum(request.waiting_rows for request in reference.requests)
        for _ in range(rows + len(reference.pictures) + len(reference.running) + 1):
            while self.start_next(reference.idle_replicas()):
                pass
            if not reference.running:
                break
            reference.now += 0.3
            self.finish_task(reference.running.pop(0), 1.0)
        assert not reference.running
        assert not reference.pictures
        left = [request for request in reference.requests if request.waiting_rows and not request.removed]
        assert all(request.request.deadline <= reference.now for request in left)
        assert [self.batcher.count_waiting_rows(model) for model in REPLICAS] == [0] * len(REPLICAS)
        assert self.all_slots_are_free()

    def all_slots_are_free(self) -> bool:
        """Whether every device has all its slots again: as many batches start as there are, and not one more."""
        for device, slots in DEVICES.items():
            for _ in range(slots.slots + 1):
                key = BatchKey(f"x-{device}", (device,), CPU_LIKE, 1)
                self.batcher.add(Job(PreparedRequest(key=key, isolated=True), 1))
        idle_replicas = {f"x-{device}": {device: 9} for device in DEVICES}
        tasks = [self.batcher.start_next(idle_replicas) for _ in range(9)]
        models = [task.key.model for task in tasks if isinstance(task, Batch)]
        return all(models.count(f"x-{device}") == slots.slots for device, slots in DEVICES.items())


TestBatcherEvents = BatcherEvents.TestCase
# Without shrinking, which takes minutes here: what a failure says of a batch is short enough.
TestBatcherEvents.settings = settings(max_examples=80, stateful_step_count=40, phases=[Phase.generate])
