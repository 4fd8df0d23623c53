"""Starts what the policy says: batches in their replicas' threads, decoding in a pool. Answers go to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from layertap.models.devices import transfer
from layertap.models.errors import LayertapError
from layertap.models.loaded_model import LoadedModel
from layertap.service.engine.batch import CPU, Batch, DecodeTask, DeviceSlots, QueuedRequest
from layertap.service.engine.batch_runner import (
    BatchRunner,
    Interval,
    Results,
    SliceResult,
    find_lasting_failure,
    wrap_error,
)
from layertap.service.engine.batcher import Batcher, Clock
from layertap.service.engine.deadline import set_deadline
from layertap.service.engine.request import Job
from layertap.service.engine.worker_thread import WorkerThread, start_single_threaded
from layertap.service.errors import UnavailableError
from layertap.service.metrics import Metrics
from layertap.service.types import Priority

T = TypeVar("T")
LOST_RETRY_S = 60.0
SMOOTHING = 0.2  # the newest batch's part in a mean
EARLY_S = 0.05  # an event loop counts from where its turn began, in milliseconds: its timers may end so much too soon


@dataclass
class ReplicaThreads:
    """A model's replicas at work: a thread for each, and which of them do nothing now.

    ``forward_pace``, ``decode_pace``: seconds of all slots that a row took of late. ``calls`` want the first replica
    for themselves.
    """

    model: LoadedModel
    workers: list[WorkerThread]
    forward_seconds_per_row: float
    decode_seconds_per_row: float = 0.0
    idle: list[int] = field(default_factory=list)
    calls: deque[tuple[Callable[[LoadedModel], Any], Future[Any]]] = field(default_factory=deque)
    drained: Future[None] | None = None

    @property
    def seconds_per_row(self) -> float:
        """Seconds that the device takes for a row, as of late."""
        return self.forward_seconds_per_row + self.decode_seconds_per_row


@dataclass(eq=False)
class _InFlight:
    """A request whose rows wait or run; ``parts`` are the results so far, by their first row."""

    job: Job
    answer: asyncio.Future[list[Results]]
    missing: int  # rows without results
    submitted: float
    started: bool = False
    parts: dict[int, Results] = field(default_factory=dict)
    forwards: list[Interval] = field(default_factory=list)
    copies: list[Interval] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def note(self, batch: Batch, outcome: SliceResult) -> None:
        """Keep when a part of it ran, in which company."""
        self.forwards.append(outcome.forward)
        self.copies.append(outcome.copy)
        self.notes["fill"] = f"{outcome.rows}/{batch.queue.max_rows}"
        self.notes["depth"] = f"{batch.depth:.4g}"

    def steps(self) -> dict[str, float]:
        """Seconds by step, each counted once though parts ran side by side; ``queue`` is when none of them ran."""
        if not self.forwards:
            return {}
        forward = _covered(self.forwards)
        busy = _covered([*self.forwards, *self.copies])
        end = max(end for _, end in self.copies)
        return {"queue": max(end - self.submitted - busy, 0.0), "forward": forward, "copy": busy - forward}


class Scheduler:
    """One for a process. Its methods may be called from any thread unless they say otherwise.

    ``lost`` says why this process can't go on, where that is so (CUDA asks for a new one after some errors of a
    device): nothing is answered any more. ``on_loss`` is told once, in any thread. ``streams``: forwards that a GPU may
    have begun at a time.
    """

    def __init__(
        self,
        metrics: Metrics,
        slots: int,
        clock: Clock = time.monotonic,
        on_loss: Callable[[str], None] = lambda reason: None,
        streams: int = 1,
    ) -> None:
        self._streams = streams
        self.slots = slots
        self.failure = ""
        self._on_loss = on_loss
        self._metrics = metrics
        self._policy = Batcher({CPU: DeviceSlots(slots)}, clock)
        self._lock = threading.RLock()
        self._crews: dict[str, ReplicaThreads] = {}
        self._pending: dict[QueuedRequest, _InFlight] = {}
        self._decoding: dict[DecodeTask, Callable[[], None]] = {}
        self._pool = ThreadPoolExecutor(slots, "decode", initializer=start_single_threaded)

    def add_model(self, name: str, crew: ReplicaThreads) -> None:
        """A model is loaded: its replicas take batches from now on."""
        with self._lock:
            crew.idle = list(range(len(crew.workers)))
            self._crews[name] = crew
            if crew.model.device.type != CPU:
                self._policy.add_device(str(crew.model.device), DeviceSlots(self._streams, parallel=False))

    def remove_model(self, name: str) -> Future[None]:
        """Take no more for a model; done when all that was given is, and its threads are told to end."""
        with self._lock:
            crew = self._crews.get(name)
            gone: Future[None] = Future()
            if crew is None:
                gone.set_result(None)
                return gone
            crew.drained = crew.drained or gone
            self._dispatch()
            return crew.drained

    def get_threads(self, name: str) -> ReplicaThreads | None:
        """A loaded model's crew, None where it is not loaded or about to go."""
        crew = self._crews.get(name)
        return crew if crew is not None and crew.drained is None else None

    def count_waiting_rows(self, name: str) -> int:
        """Rows of a model that are in no batch yet."""
        with self._lock:
            return self._policy.count_waiting_rows(name)

    def is_idle(self, name: str) -> bool:
        """Whether a model has nothing to do."""
        with self._lock:
            crew = self._crews[name]
            return len(crew.idle) == len(crew.workers) and not crew.calls and not self._policy.count_waiting_rows(name)

    def close(self) -> None:
        """End the pool; models have left before."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def call(self, name: str, run: Callable[[LoadedModel], T]) -> Future[T]:
        """Run a function of a model in its first replica's thread, when it does nothing else."""
        future: Future[T] = Future()
        with self._lock:
            crew = self._crews[name]
            crew.calls.append((run, future))
            self._dispatch()
        return future

    def fail_permanently(self, reason: str) -> None:
        """Nothing can be answered any more: whoever waits is told."""
        with self._lock:
            if not self.failure:
                self.failure = reason
                self._on_loss(reason)
            for work, pending in self._pending.items():
                self._policy.remove(work)
                pending.answer.get_loop().call_soon_threadsafe(_deliver, [(pending.answer, failed_error(reason))])
            self._pending.clear()
            for crew in self._crews.values():
                while crew.calls:
                    _, future = crew.calls.popleft()
                    if future.set_running_or_notify_cancel():
                        future.set_exception(failed_error(reason))

    async def decode(
        self, name: str, run: Callable[[], T], count: Callable[[T], int], priority: Priority, deadline: float
    ) -> T:
        """Run something that decodes for a model when the policy lets it; ``count`` tells how many rows it gave.

        Called on the event loop. Cancelled before its turn, or past the deadline (DeadlineError), it never runs.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        preparation = DecodeTask(priority)
        with self._lock:
            crew = self._crews.get(name)
            self._decoding[preparation] = partial(self._decoded, crew, preparation, run, count, answer)
            self._policy.add_decode(preparation)
            self._dispatch()
        timer = set_deadline(answer, deadline)
        try:
            return await answer
        finally:
            timer.cancel()
            if not _given(answer):  # hold no picture that nobody waits for
                with self._lock:
                    if self._decoding.pop(preparation, None) is not None:
                        self._policy.remove_decode(preparation)

    async def run(self, work: QueuedRequest, job: Job) -> list[Results]:
        """A job's results in the host's memory, in one part or several whose rows follow each other.

        Called on the event loop. Cancelled, or past the deadline (DeadlineError), what still waits never runs.
        """
        answer: asyncio.Future[list[Results]] = asyncio.get_running_loop().create_future()
        pending = _InFlight(job, answer, work.rows, time.perf_counter())
        with self._lock:
            if self.failure:
                raise failed_error(self.failure)
            self._pending[work] = pending
            self._policy.add(work)
            self._dispatch()
        timer = set_deadline(answer, job.deadline)
        try:
            return await answer
        finally:
            timer.cancel()
            with self._lock:
                if self._pending.pop(work, None) is not None:
                    self._policy.remove(work)
            for name, seconds in pending.steps().items():
                job.timings.add(name, seconds)
            job.timings.notes.update(pending.notes)
            if not pending.started:
                self._unserved(work)

    def _dispatch(self, decoder: bool = False) -> Callable[[], None] | None:
        """Start all that may start now; under the lock.

        Something to decode is handed back to a ``decoder``: going on takes less time than waking another thread.
        """
        mine: Callable[[], None] | None = None
        for crew in self._crews.values():
            if crew.calls and 0 in crew.idle:
                crew.idle.remove(0)
                crew.workers[0].post(partial(self._called, crew, *crew.calls.popleft()))
        while (
            what := self._policy.start_next({name: len(crew.idle) for name, crew in self._crews.items()})
        ) is not None:
            if isinstance(what, DecodeTask):
                task = self._decoding.pop(what)
                if decoder and mine is None:
                    mine = task
                else:
                    self._pool.submit(self._decode_on, task)
            else:
                self._start(what)
        for name in [name for name, crew in self._crews.items() if crew.drained is not None]:
            self._let_go(name)
        return mine

    def _decode_on(self, task: Callable[[], None] | None) -> None:
        """Decode, and go on as long as there is something; in a thread of the pool."""
        while task is not None:
            task()
            with self._lock:
                task = self._dispatch(decoder=True)

    def _let_go(self, name: str) -> None:
        """End a model's threads as soon as it has nothing left to do; under the lock."""
        if not self.is_idle(name):
            return
        crew = self._crews.pop(name)
        self._policy.remove_model(name)
        for worker in crew.workers:
            worker.stop()
        if crew.drained is not None:
            crew.drained.set_result(None)

    def _start(self, batch: Batch) -> None:
        crew = self._crews[batch.queue.model]
        crew.idle.sort()
        number = crew.idle.pop(0)
        jobs = {}
        for part in batch.slices:
            pending = self._pending[part.request]
            pending.started = True
            jobs[part.request] = pending.job
        crew.workers[number].post(partial(self._ran, crew, number, batch, jobs))

    def _ran(self, crew: ReplicaThreads, number: int, batch: Batch, jobs: dict[QueuedRequest, Job]) -> None:
        """A batch, from its start to its answers; in the thread of its replica."""
        begun = time.perf_counter()
        execution = BatchRunner(crew.model, crew.model.replicas[number], batch, jobs, batch.slots)
        outcomes = execution.run()
        seconds = time.perf_counter() - begun
        with self._lock:
            if execution.failure:
                self.fail_permanently(execution.failure)
            if execution.failures.too_many is not None:
                self._policy.reduce_max_rows(batch.queue, execution.failures.too_many)
            self._policy.finish(batch, seconds)
            beside = min(self._policy.count_parallel_batches(batch.queue.device, batch.slots), len(crew.workers))
            # In rows of the configured shape: a few large pictures say nothing of the small ones that wait.
            weight = batch.queue.costs.per_row / crew.model.catalog.costs.per_row
            spent = seconds / beside / batch.rows / weight
            crew.forward_seconds_per_row += SMOOTHING * (spent - crew.forward_seconds_per_row)
            crew.idle.append(number)
            self._answer(batch, outcomes)
            self._dispatch()
        self._report(batch, execution, seconds)

    def _answer(self, batch: Batch, outcomes: list[SliceResult]) -> None:
        """Hand over what is complete, all of it in one go to the event loop; under the lock."""
        ready: list[tuple[asyncio.Future[list[Results]], list[Results] | LayertapError | RuntimeError]] = []
        for outcome in outcomes:
            work, pending = outcome.part.request, self._pending.get(outcome.part.request)
            if pending is None:
                continue  # cancelled, or failed in another part
            pending.note(batch, outcome)
            if isinstance(outcome.results, Exception):
                ready.append((pending.answer, outcome.results))
            else:
                pending.parts[outcome.part.start] = outcome.results
                pending.missing -= outcome.part.stop - outcome.part.start
                if pending.missing:
                    continue
                ready.append((pending.answer, [pending.parts[start] for start in sorted(pending.parts)]))
            self._policy.remove(work)
            del self._pending[work]
        if ready:
            ready[0][0].get_loop().call_soon_threadsafe(_deliver, ready)

    def _report(self, batch: Batch, execution: BatchRunner, seconds: float) -> None:
        model, lane = batch.queue.model, batch.queue
        requests = len({part.request for part in batch.slices})
        self._metrics.observe_batch(
            model, batch.rows, max(lane.max_rows, batch.rows), requests, min(batch.depth, 1.0), seconds, batch.reason
        )
        for _ in range(execution.failures.out_of_memory):
            self._metrics.count_out_of_memory(model)
        for _ in range(execution.failures.memory):
            self._metrics.count_split(model, "memory")
        for _ in range(execution.failures.error):
            self._metrics.count_split(model, "error")

    def _unserved(self, work: QueuedRequest) -> None:
        """Count a request that never came to a forward."""
        late = time.monotonic() >= work.deadline - EARLY_S
        (self._metrics.count_expired if late else self._metrics.count_cancelled)(work.queue.model)

    def _called(self, crew: ReplicaThreads, run: Callable[[LoadedModel], T], future: Future[T]) -> None:
        if future.set_running_or_notify_cancel():
            found = _caught(partial(_ended, run, crew.model))
            reason = (
                find_lasting_failure(found, crew.model, crew.model.replicas[0]) if isinstance(found, Exception) else ""
            )
            if reason:
                self.fail_permanently(reason)
                found = failed_error(reason)
            _settle(future, found)
        with self._lock:
            crew.idle.append(0)
            self._dispatch()

    def _decoded(
        self,
        crew: ReplicaThreads | None,
        preparation: DecodeTask,
        run: Callable[[], T],
        count: Callable[[T], int],
        answer: asyncio.Future[T],
    ) -> None:
        begun = time.perf_counter()
        found = RuntimeError("nobody waits") if answer.done() else _caught(run)
        seconds = time.perf_counter() - begun
        rows = 0 if isinstance(found, Exception) else count(found)
        with self._lock:
            self._policy.finish(preparation, seconds)
            if crew is not None and rows:
                crew.decode_seconds_per_row += SMOOTHING * (seconds / self.slots / rows - crew.decode_seconds_per_row)
        answer.get_loop().call_soon_threadsafe(_deliver, [(answer, found)])


def failed_error(reason: str) -> UnavailableError:
    """The answer where this process can't go on."""
    return UnavailableError(reason, hint="the server has to be restarted", retry_after=LOST_RETRY_S)


def _given(answer: asyncio.Future[Any]) -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None


def _covered(intervals: list[Interval]) -> float:
    """Seconds that lie in at least one of them."""
    seconds, reached = 0.0, 0.0
    for begin, end in sorted(intervals):
        seconds += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return seconds


def _ended(run: Callable[[LoadedModel], T], model: LoadedModel) -> T:
    """What a function gives, once the device has done it: threads with other streams may use it."""
    found = run(model)
    if model.device.type == "cuda":
        transfer.synchronize_stream(model.device)
    return found


def _caught(run: Callable[[], T]) -> T | LayertapError | RuntimeError:
    """What something gives, or what it raises: that belongs to whoever waits."""
    try:
        return run()
    except LayertapError as error:
        return error
    except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio has its own
        return wrap_error(error)


def _settle(future: Future[T], found: T | LayertapError | RuntimeError) -> None:
    if isinstance(found, Exception):
        future.set_exception(found)
    else:
        future.set_result(found)


def _deliver(ready: Sequence[tuple[asyncio.Future[T], T | LayertapError | RuntimeError]]) -> None:
    for answer, found in ready:
        if answer.done():
            continue
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)
