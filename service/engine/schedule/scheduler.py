"""Starts what the batcher says: batches in their models' threads, decoding in a pool. Answers go to the event loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from layertap.service.engine.deadline import set_deadline
from layertap.service.engine.execute.executor import ModelFunction
from layertap.service.engine.execute.forward_batch import ForwardBatch, Results
from layertap.service.engine.execute.futures import call_and_catch, deliver, settle
from layertap.service.engine.execute.threads import start_single_threaded
from layertap.service.engine.models.unavailable import failure_error
from layertap.service.engine.request import Job
from layertap.service.engine.rows.rows import ItemAttempts, count_rows
from layertap.service.engine.schedule.batch import CPU, Batch, DeviceSlots, QueuedRequest
from layertap.service.engine.schedule.batch_jobs import RunningBatch, make_forward_batch, record_batch, record_unserved
from layertap.service.engine.schedule.batcher import Batcher, Clock
from layertap.service.engine.schedule.in_flight import InFlight, PendingDecode, start_jobs
from layertap.service.metrics import Metrics
from layertap.service.types import Priority

if TYPE_CHECKING:
    from layertap.service.engine.models.model_handle import ModelHandle

log = logging.getLogger("layertap")


class Scheduler:
    """One for a process. Its methods may be called from any thread unless they say otherwise.

    ``failure`` says why this process can't go on, where that is so (CUDA asks for a new one after some errors of a
    device): nothing is answered any more. ``on_failure`` is told once, in any thread. ``gpu_streams``: forwards that a
    GPU may have begun at a time.
    """

    def __init__(
        self,
        metrics: Metrics,
        slots: int,
        clock: Clock = time.monotonic,
        on_failure: Callable[[str], None] = lambda reason: None,
        gpu_streams: int = 1,
    ) -> None:
        self.slots = slots
        self.failure = ""
        self._gpu_streams = gpu_streams
        self._on_failure = on_failure
        self._metrics = metrics
        self._batcher = Batcher({CPU: DeviceSlots(slots)}, clock)
        self._lock = threading.RLock()
        self._handles: dict[str, ModelHandle] = {}  # by their keys
        self._in_flight: dict[QueuedRequest, InFlight] = {}
        self._pool = ThreadPoolExecutor(slots, "decode", initializer=start_single_threaded)

    def add_model(self, handle: ModelHandle, devices: Sequence[str]) -> None:
        """A model is loaded on some devices: its replicas take batches from now on."""
        with self._lock:
            self._handles[handle.key] = handle
            for device in set(devices) - {CPU}:
                self._batcher.add_device(device, DeviceSlots(self._gpu_streams, parallel=False))

    def remove_model(self, handle: ModelHandle) -> Future[None]:
        """Take no more for a model; done when all that was given is, and its threads are told to end."""
        with self._lock:
            if handle.key not in self._handles:
                handle.drained = Future()
                handle.drained.set_result(None)
            elif handle.drained is None:
                handle.drained = Future()
                self._dispatch()
            return handle.drained

    def is_idle(self, handle: ModelHandle) -> bool:
        """Whether a model has nothing to do."""
        with self._lock:
            return handle.is_idle and not self._batcher.count_waiting_rows(handle.key)

    def count_waiting_rows(self, handle: ModelHandle) -> int:
        """Rows of a model that are in no batch yet."""
        with self._lock:
            return self._batcher.count_waiting_rows(handle.key)

    def count_slots(self) -> dict[str, int]:
        """How many batches of one slot each device runs at once, by device."""
        with self._lock:
            return self._batcher.count_slots()

    def close(self) -> None:
        """End the pool; models have been removed before."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def call(self, handle: ModelHandle, function: ModelFunction) -> Future[Any]:
        """Run a function of a model in its first replica's thread, when it does nothing else."""
        future: Future[Any] = Future()
        with self._lock:
            handle.calls.append((function, future))
            self._dispatch()
        return future

    def fail_permanently(self, reason: str) -> None:
        """Nothing can be answered any more: whoever waits is told."""
        with self._lock:
            if not self.failure:
                self.failure = reason
                self._on_failure(reason)
            for queued, flight in self._in_flight.items():
                self._batcher.remove(queued)
                deliver([(flight.answer, failure_error(reason))])
            self._in_flight.clear()
            for handle in self._handles.values():
                while handle.calls:
                    _, future = handle.calls.popleft()
                    if future.set_running_or_notify_cancel():
                        future.set_exception(failure_error(reason))

    async def decode(
        self, handle: ModelHandle, decode: Callable[[], ItemAttempts], priority: Priority, deadline: float
    ) -> ItemAttempts:
        """Run something that decodes for a model when the batcher lets it.

        Called on the event loop. Cancelled before its turn, or past the deadline (DeadlineError), it never runs.
        """
        return cast("ItemAttempts", await self.decode_and_run(handle, decode, priority, deadline))

    async def decode_and_run(
        self, handle: ModelHandle, decode: Callable[[], ItemAttempts | Job], priority: Priority, deadline: float
    ) -> ItemAttempts | tuple[Job, Results]:
        """As ``decode``; a job that it gives is queued at once, in the same thread, and comes back with its results."""
        task = PendingDecode(priority=priority, handle=handle, decode=decode, flight=InFlight())
        with self._lock:
            self._batcher.add_decode(task)
            self._dispatch()
        answer = await self._wait(task.flight, deadline, task)
        return next(zip(task.flight.jobs.values(), answer, strict=True)) if task.flight.jobs else answer

    async def run(self, jobs: Sequence[Job]) -> list[Results]:
        """The results of jobs of a request, in the host's memory.

        Called on the event loop. Cancelled, or past the deadline (DeadlineError), what still waits never runs.
        """
        flight = InFlight()
        with self._lock:
            if self.failure:
                raise failure_error(self.failure)
            self._queue(flight, jobs)
            self._dispatch()
        results: list[Results] = await self._wait(flight, jobs[0].queued.deadline)
        return results

    async def _wait(self, flight: InFlight, deadline: float, task: PendingDecode | None = None) -> Any:
        timer = set_deadline(flight.answer, deadline)
        try:
            return await flight.answer
        finally:
            timer.cancel()
            with self._lock:
                if task is not None:
                    self._batcher.remove_decode(task)  # hold no picture that nobody waits for
                self._forget(flight)
            flight.record()
            if flight.jobs and not flight.started:
                record_unserved(self._metrics, next(iter(flight.jobs)))

    def _queue(self, flight: InFlight, jobs: Sequence[Job]) -> None:
        """Let jobs wait for their forwards; under the lock."""
        for job in jobs:
            flight.add_job(job)
            self._in_flight[job.queued] = flight
            self._batcher.add(job.queued)

    def _forget(self, flight: InFlight) -> None:
        """Let nothing wait that is still there of a flight; under the lock."""
        for queued in flight.jobs:
            if self._in_flight.pop(queued, None) is not None:
                self._batcher.remove(queued)

    def _dispatch(self, decoder: bool = False) -> PendingDecode | None:
        """Start all that may start now; under the lock.

        Something to decode is handed back to a ``decoder``: going on takes less time than waking another thread.
        """
        for handle in self._handles.values():
            if handle.calls and 0 in handle.idle_replicas:
                handle.idle_replicas.remove(0)
                handle.submit(0, partial(self._call, handle, *handle.calls.popleft()))
        handed_back: PendingDecode | None = None
        workers = self._handles.items()
        while starting := self._batcher.start_next({key: each.count_idle_replicas() for key, each in workers}):
            if isinstance(starting, Batch):
                self._start(starting)
            elif decoder and handed_back is None:
                handed_back = cast("PendingDecode", starting)
            else:
                self._pool.submit(self._decode_on, cast("PendingDecode", starting))
        for handle in list(self._handles.values()):
            handle.note_waiting_rows(self._batcher.count_waiting_rows(handle.key))
            self._end_if_idle(handle)
        return handed_back

    def _decode_on(self, task: PendingDecode | None) -> None:
        """Decode, and go on as long as there is something; in a thread of the pool."""
        try:
            while task is not None:
                self._run_decode(task)
                with self._lock:
                    task = self._dispatch(decoder=True)
        except BaseException:  # a bug of ours, which would cost a slot for good
            log.critical("decoding failed", exc_info=True)
            self.fail_permanently("a thread that decodes failed")
            if task is not None:
                deliver([(task.flight.answer, failure_error(self.failure))])

    def _run_decode(self, task: PendingDecode) -> None:
        """Decode, and queue what is ready to run; in a thread of the pool."""
        started, flight = time.perf_counter(), task.flight
        result = RuntimeError("nobody waits") if flight.answer.done() else call_and_catch(task.decode)
        ended = time.perf_counter()
        with self._lock:
            self._batcher.finish(task, ended - started)
            if not isinstance(result, Exception):
                rows = result.rows if isinstance(result, Job) else count_rows(result)
                task.handle.add_decode_time((ended - started) / self.slots, rows)
                self._metrics.add_busy_seconds(task.handle.name, CPU, ended - started)
            if isinstance(result, Job):
                if flight.answer.done():  # cancelled or late: nothing is queued that nobody would take off again
                    return
                if not self.failure:
                    flight.decoded = ended
                    self._queue(flight, [result])
                    return
                result = failure_error(self.failure)
        deliver([(flight.answer, result)])

    def _end_if_idle(self, handle: ModelHandle) -> None:
        """End a model's threads as soon as it has nothing left to do; under the lock."""
        if handle.drained is not None and self.is_idle(handle):
            del self._handles[handle.key]
            self._batcher.remove_model(handle.key)
            handle.close()
            handle.drained.set_result(None)

    def _start(self, batch: Batch) -> None:
        handle = self._handles[batch.key.model]
        replica = handle.take_idle_replica(batch.device)
        running = RunningBatch(batch, start_jobs(batch.slices, self._in_flight))
        handle.submit(replica, partial(self._run, handle, replica, running))

    def _extend(self, running: RunningBatch) -> ForwardBatch | None:
        """What joins a batch before its forward; None where nothing does. In the thread of its replica."""
        with self._lock:
            before = running.batch
            running.batch = self._batcher.extend(before)
            if running.batch is before:
                return None
            running.jobs |= start_jobs(running.batch.slices[len(before.slices) :], self._in_flight)
            self._dispatch()  # a batch of several rows may need fewer slots than one of a single row
        return make_forward_batch(running.batch, running.jobs, len(before.slices))

    def _run(self, handle: ModelHandle, replica: int, running: RunningBatch) -> None:
        """A batch, from its start to its answers; in the thread of its replica."""
        started = time.perf_counter()
        first = make_forward_batch(running.batch, running.jobs)
        outcome = handle.executor.run_batch(replica, first, partial(self._extend, running))
        seconds = time.perf_counter() - started
        batch = running.batch
        with self._lock:
            if outcome.failure:
                self.fail_permanently(outcome.failure)
            if outcome.failures.too_many_rows is not None:
                self._batcher.reduce_max_rows(batch.key, outcome.failures.too_many_rows)
            self._batcher.finish(batch, seconds, outcome.decode_seconds)
            parallel = self._batcher.count_parallel_batches(batch.key.devices, batch.slots)
            if any(not isinstance(result.results, Exception) for result in outcome.results):
                handle.add_batch_time(batch, seconds, parallel, outcome.decode_seconds > 0)
            handle.idle_replicas.append(replica)
            answers = []
            requests = list(running.jobs)
            for result in outcome.results:
                queued = requests[result.place]
                flight = self._in_flight.get(queued)  # None: cancelled, or failed in another part
                answer = flight.add(queued, batch, result) if flight is not None else None
                if flight is not None and answer is not None:
                    answers.append((flight.answer, answer))
                    self._forget(flight)
            deliver(answers)
            self._dispatch()
        record_batch(self._metrics, batch, outcome.failures, seconds)

    def _call(self, handle: ModelHandle, function: ModelFunction, future: Future[Any]) -> None:
        """Run a function in the thread of the first replica."""
        if future.set_running_or_notify_cancel():
            outcome = handle.executor.call(function)
            if outcome.failure:
                self.fail_permanently(outcome.failure)
            settle(future, failure_error(outcome.failure) if outcome.failure else outcome.result)
        with self._lock:
            handle.idle_replicas.append(0)
            self._dispatch()
