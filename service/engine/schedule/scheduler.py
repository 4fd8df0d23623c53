"""Starts what the batcher selects: batches in their models' executors, decoding and calls on slots of the CPU."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from layertap.models.errors import LayertapError, RequestError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.service.engine.batch import CPU, Batch, BatchFailures, BatchResult, Job, Results, RowSlice, SliceResult
from layertap.service.engine.deadline import deadline_error, wait_until
from layertap.service.engine.execute.batch_runner import refuse
from layertap.service.engine.execute.executor import Executor, ModelFunction
from layertap.service.engine.execute.threads import wrap_error
from layertap.service.engine.rows import ItemAttempts, count_rows
from layertap.service.engine.schedule.batch_formation import DeviceSlots
from layertap.service.engine.schedule.batch_keys import Pace
from layertap.service.engine.schedule.batcher import Batcher, Clock
from layertap.service.engine.schedule.waiting import DecodeTask
from layertap.service.errors import failure_error, unloading_error
from layertap.service.inputs.items import LocalItem
from layertap.service.metrics import Metrics
from layertap.service.timings import Span
from layertap.service.types import Priority

T = TypeVar("T")
LONGEST_S = 86_400.0  # a timer can't be infinite
EARLY_S = 0.05  # event loop timers may end so much too soon, because its clock has milliseconds
log = logging.getLogger("layertap")


@dataclass(eq=False)
class ScheduledModel:
    """A model that takes batches; ``busy`` counts its running tasks, ``on_idle`` is called when it has none.

    ``on_crossing`` is called when its rows turn out to affect each other, with the layer that showed it and the number
    of ``shared_answers`` before. ``make_error`` is set while the model can't be asked.
    """

    key: str
    name: str
    executor: Executor
    pace: Pace
    on_idle: Callable[[], None]
    on_crossing: Callable[[str, int], None]
    busy: int = 0
    shared_answers: int = 0
    make_error: Callable[[], Exception] | None = None


@dataclass(eq=False, kw_only=True)
class Turn(DecodeTask):
    """A wait for a slot of the CPU; ``begun`` is set once it has one."""

    begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class InFlight:
    """The jobs of a request that wait or run; ``answer`` gets the results of each job.

    ``started``: a batch with some of them has begun.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.answer: asyncio.Future[list[Results]] = asyncio.get_running_loop().create_future()
        self.started = False
        self._submitted = time.perf_counter()
        self._missing = sum(job.rows for job in jobs)
        self._results: dict[Job, Results] = {}
        self._parts: list[SliceResult] = []

    def add(self, job: Job, batch: Batch, result: SliceResult) -> None:
        """Store the results of some rows; the answer is set by the first error, or by the last rows."""
        self._parts.append(result)
        job.timings.notes.update(fill=f"{result.rows}/{batch.key.max_rows}", depth=f"{batch.depth:.4g}")
        outcome = result.results
        if isinstance(outcome, (RequestError, TooLargeError)) and job.input_index is not None:
            outcome = outcome.of_input(job.input_index)
        if isinstance(outcome, Exception):
            self.fail(outcome)
            return
        self._results[job] = outcome
        self._missing -= result.stop - result.start
        if not self._missing and not self.answer.done():
            self.answer.set_result([self._results[each] for each in self.jobs])

    def fail(self, error: Exception) -> None:
        """Set the answer to an error, if there is none yet."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def expire(self) -> None:
        """Set the answer to DeadlineError, if there is none yet."""
        self.fail(deadline_error())

    def record(self) -> None:
        """Add the duration of each step to the request's timings."""
        timings, parts = self.jobs[0].timings, self._parts
        spans: list[Span] = []
        for part in parts:
            spans += (("decode", *part.decode, 0), ("forward", *part.forward, part.rows), ("copy", *part.copy, 0))
            timings.facts.batch_rows = max(timings.facts.batch_rows, part.rows)
        if parts:
            timings.add_parts(self._submitted, spans)
        elif not self.started:
            timings.add_span("queue", self._submitted, time.perf_counter())


class Scheduler:
    """Starts the batches, decodes and calls of all models. For the event loop only.

    ``failure``: why this process can't answer any more, if so (CUDA needs a new process after some device errors);
    ``on_failure`` is called with it once. ``gpu_streams``: the most forwards that run on a GPU at once. ``batcher``
    decides what waits and what runs next.
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
        self.batcher = Batcher({CPU: DeviceSlots(slots)}, clock)
        self._models: dict[str, ScheduledModel] = {}
        self._in_flight: dict[Job, InFlight] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def add_model(
        self,
        key: str,
        name: str,
        executor: Executor,
        pace: Pace,
        on_idle: Callable[[], None],
        on_crossing: Callable[[str, int], None] = lambda layer, shared_answers: None,
    ) -> None:
        """Start scheduling batches of a model; ``key`` is unique to this loaded version."""
        self._models[key] = ScheduledModel(key, name, executor, pace, on_idle, on_crossing)
        for device in set(executor.devices) - {CPU}:
            self.batcher.add_device(device, DeviceSlots(self._gpu_streams, parallel=False))
        executor.start(self._dispatch)
        self._dispatch()

    def remove_model(self, key: str) -> None:
        """Forget a model without waiting or running work."""
        if self._models.pop(key, None) is not None:
            self.batcher.remove_model(key)

    def is_idle(self, key: str) -> bool:
        """Whether a model has no waiting or running work."""
        model = self._models.get(key)
        return model is None or (not model.busy and not self.batcher.count_waiting_rows(key))

    def refuse(self, key: str, make_error: Callable[[], Exception] | None) -> None:
        """Fail all current and future jobs of a model with an error; None ends this."""
        if (model := self._models.get(key)) is not None:
            model.make_error = make_error
        for job, flight in list(self._in_flight.items()):
            if job.prepared.key.model == key and make_error is not None:
                flight.fail(make_error())

    def fail_permanently(self, reason: str) -> None:
        """Stop answering for good: all waiting requests get UnavailableError."""
        if not self.failure:
            self.failure = reason
            self._on_failure(reason)
        for flight in list(self._in_flight.values()):
            flight.fail(failure_error(reason))

    async def run(self, jobs: Sequence[Job]) -> list[Results]:
        """The results of a request's jobs, in host memory.

        If cancelled, or past the deadline (DeadlineError), the waiting rows never run.
        """
        if self.failure:
            raise failure_error(self.failure)
        self._get_model(jobs[0].prepared.key.model)
        flight = InFlight(jobs)
        left = max(jobs[0].deadline - time.monotonic(), 0.0)
        # What ``wait_until`` does, in a third of the time; possible because nobody else sees the future.
        timer = asyncio.get_running_loop().call_later(min(left, LONGEST_S), flight.expire)
        try:
            for job in jobs:
                self._in_flight[job] = flight
                self.batcher.add(job)
            self._dispatch()
            return await flight.answer
        finally:
            timer.cancel()
            for job in jobs:
                self._in_flight.pop(job, None)
                self.batcher.remove(job)
            flight.record()
            if not flight.started:  # no forward of the request began
                late = time.monotonic() >= jobs[0].deadline - EARLY_S
                self._metrics.count("expired_total" if late else "cancelled_total", jobs[0].prepared.key.name)
            self._note_idle(jobs[0].prepared.key.model)

    async def decode(
        self, key: str, items: Sequence[LocalItem], inputs: ModelInputs, priority: Priority, deadline: float
    ) -> ItemAttempts:
        """Decode items of a model when the batcher starts them.

        If cancelled before that, or past the deadline (DeadlineError), they are not decoded. ModelLostError,
        UnavailableError.
        """
        model = self._get_model(key)

        async def decode() -> ItemAttempts:
            started = time.perf_counter()
            attempts = await model.executor.decode(items, inputs)
            seconds = time.perf_counter() - started
            model.pace.add_decode(seconds / self.slots, count_rows(attempts))
            self._metrics.count("busy_seconds_total", model.name, CPU, by=seconds)
            return attempts

        return await self._take_turn(model, decode, priority, deadline)

    async def call(
        self, key: str, function: ModelFunction, keep: Callable[[Any], None], deadline: float, limit_s: float
    ) -> Any:
        """The result of a function of a model. ``keep`` is called with it even if the caller has gone.

        DeadlineError; ModelLostError. The call may be stopped after ``limit_s`` seconds.
        """
        model = self._get_model(key)

        async def call() -> Any:
            outcome = await model.executor.call(function, limit_s)
            if outcome.failure:
                self.fail_permanently(outcome.failure)
                raise failure_error(outcome.failure)
            if isinstance(outcome.result, Exception):
                raise outcome.result
            keep(outcome.result)
            return outcome.result

        return await self._take_turn(model, call, "interactive", deadline)

    async def _take_turn(
        self, model: ScheduledModel, work: Callable[[], Coroutine[Any, Any, T]], priority: Priority, deadline: float
    ) -> T:
        """The result of ``work``, run in a slot of the CPU; it runs to its end even if the caller is gone."""
        turn = Turn(priority=priority)
        self.batcher.add_decode(turn)
        model.busy += 1
        self._dispatch()
        try:
            await wait_until(deadline, turn.begun) if not turn.begun.done() else None
        except BaseException:
            if turn.begun.done() and not turn.begun.cancelled():
                self.batcher.finish(turn, 0.0)
            self.batcher.remove_decode(turn)
            self._leave(model)
            raise
        return await wait_until(deadline, asyncio.shield(self._start_task(self._finish_turn(model, turn, work()))))

    async def _finish_turn(self, model: ScheduledModel, turn: Turn, work: Awaitable[T]) -> T:
        started = time.perf_counter()
        try:
            return await work
        finally:
            self.batcher.finish(turn, time.perf_counter() - started)
            self._leave(model)

    def _get_model(self, key: str) -> ScheduledModel:
        model = self._models.get(key)
        if model is None:
            raise unloading_error(key.partition("@")[0], 1.0)
        if model.make_error is not None:
            raise model.make_error()
        return model

    def _dispatch(self) -> None:
        """Start everything that may start now."""
        models = self._models if not self.failure else {}
        while starting := self.batcher.start_next({key: each.executor.count_idle() for key, each in models.items()}):
            if isinstance(starting, Batch):
                model = models[starting.key.model]
                model.busy += 1
                self._note_started(starting.slices)
                running = model.executor.run(starting, partial(self._extend, starting))
                self._start_task(self._run(model, starting, running))
            elif (turn := cast("Turn", starting)).begun.done():  # cancelled just now
                self.batcher.finish(turn, 0.0)
            else:
                turn.begun.set_result(None)
        for key, model in models.items():
            model.executor.note_waiting_rows(self.batcher.count_waiting_rows(key) > 0)

    def _extend(self, batch: Batch) -> Batch | None:
        """Add waiting rows to a batch whose forward has not begun; returns them as a batch, or None."""
        joining = self.batcher.extend(batch)
        if not joining:
            return None
        self._note_started(joining)
        self._dispatch()  # a batch of several rows may need fewer slots than one of a single row
        return replace(batch, slices=joining)

    def _note_started(self, slices: Sequence[RowSlice]) -> None:
        for each in slices:
            if (flight := self._in_flight.get(each.job)) is not None:
                flight.started = True

    def _start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it

    async def _run(self, model: ScheduledModel, batch: Batch, running: Awaitable[BatchResult]) -> None:
        """Run a batch and answer its jobs; an error fails only these."""
        started = time.perf_counter()
        try:
            result = await running
        except (Exception, asyncio.CancelledError) as error:  # a pool that shuts down cancels
            log.exception("a batch failed", extra={"fields": {"model": model.name}})
            result = refuse(batch, error if isinstance(error, LayertapError) else wrap_error(error))
        seconds = time.perf_counter() - started
        try:
            self._finish(model, batch, result, seconds)
            self._record(batch, result.failures, seconds)
        except Exception as error:
            log.exception("a batch could not be answered", extra={"fields": {"model": model.name}})
            for each in batch.slices:
                if (flight := self._in_flight.get(each.job)) is not None:
                    flight.fail(wrap_error(error))
        finally:
            self._leave(model)

    def _finish(self, model: ScheduledModel, batch: Batch, result: BatchResult, seconds: float) -> None:
        decode_seconds = result.decode_seconds
        self.batcher.finish(batch, seconds, decode_seconds)
        if result.failure:
            self.fail_permanently(result.failure)
        if result.crossing:
            self._metrics.count("crossing_total", model.name)
            model.on_crossing(result.crossing, model.shared_answers)
        elif batch.rows > 1:
            model.shared_answers += len(result.results)
        if result.failures.too_many_rows is not None:
            self.batcher.reduce_max_rows(batch.key, result.failures.too_many_rows)
        if any(not isinstance(each.results, Exception) for each in result.results):
            parallel = self.batcher.count_parallel_batches(batch.key.devices, batch.slots)
            model.pace.add_batch(batch, seconds, parallel, decoded=decode_seconds > 0)
        for each in result.results:
            job = batch.slices[each.index].job
            flight = self._in_flight.get(job)
            if flight is not None:  # else it was cancelled, or failed in another part
                flight.add(job, batch, each)
        for again in result.again:
            waiting = [each for each in again.slices if each.job in self._in_flight]
            if waiting:
                self.batcher.add_again(again.take(waiting, again.tries))

    def _leave(self, model: ScheduledModel) -> None:
        """Note that a task of a model has ended: others may start."""
        model.busy -= 1
        self._dispatch()
        self._note_idle(model.key)

    def _note_idle(self, key: str) -> None:
        model = self._models.get(key)
        if model is not None and self.is_idle(key):
            model.on_idle()

    def _record(self, batch: Batch, failures: BatchFailures, seconds: float) -> None:
        """Count a batch, its seconds and its failures in the metrics."""
        metrics, model = self._metrics, batch.key.name
        requests = len({each.job for each in batch.slices})
        max_rows, depth = max(batch.key.max_rows, batch.rows), min(batch.depth, 1.0)
        metrics.observe_batch(model, batch.rows, max_rows, requests, depth, seconds, batch.reason)
        metrics.count("busy_seconds_total", model, batch.device, by=seconds * batch.slots)
        metrics.count("out_of_memory_total", model, by=failures.out_of_memory)
        metrics.count("split_total", model, "memory", by=failures.memory_splits)
        metrics.count("split_total", model, "error", by=failures.error_splits)
