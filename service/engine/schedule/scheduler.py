"""Starts what the batcher selects: batches in their models' executors, decoding on slots of the CPU; and surveys."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from layertap.models.inputs.model_inputs import ModelInputs
from layertap.service.engine.batch import CPU, Batch, BatchFailures, BatchResult, Job, LastingFailure, Results
from layertap.service.engine.deadline import deadline_error
from layertap.service.engine.execute.executor import Executor, fail_batch
from layertap.service.engine.execute.model_calls import ModelFunction
from layertap.service.engine.execute.threads import wrap_error
from layertap.service.engine.rows import ItemAttempts, count_rows
from layertap.service.engine.schedule.batcher import Batcher, Clock
from layertap.service.engine.schedule.pace import Pace
from layertap.service.engine.schedule.waiting import DeviceSlots, SlotWait
from layertap.service.errors import FAILURE_RETRY_S, UnavailableError, failure_error, unloading_error
from layertap.service.inputs.items import LocalItem
from layertap.service.metrics import Metrics
from layertap.service.timings import Span
from layertap.service.types import Priority

LONGEST_S = 86_400.0  # a timer can't be infinite
EARLY_S = 0.05  # event loop timers may end so much too soon, because its clock has milliseconds
log = logging.getLogger("layertap")


@dataclass(eq=False)
class ScheduledModel:
    """A model that takes batches; ``key`` is unique to this loaded version.

    ``busy`` counts its running batches and functions, ``on_idle`` is called when it has none. ``on_crossing`` is called
    when its rows turn out to affect each other, with the layer that showed it and the number of ``shared_answers``
    before; ``on_failure`` when it can't answer any more. ``make_error`` is set while the model can't be asked.
    """

    key: str
    name: str
    executor: Executor
    pace: Pace
    on_idle: Callable[[], None]
    on_crossing: Callable[[str, int], None]
    on_failure: Callable[[LastingFailure], None]
    busy: int = 0
    shared_answers: int = 0
    make_error: Callable[[], Exception] | None = None


class Scheduler:
    """Starts the batches, decodes and calls of all models. For the event loop only.

    ``failure``: why this process can't answer any more, if so (CUDA needs a new process after some device errors, and
    forwards that hang keep their slots); ``on_failure`` is called with it once. ``gpu_streams``: the most forwards that
    run on a GPU at once. ``batcher`` decides what waits and what runs next.
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
        self._idle: dict[str, Mapping[str, int]] = {}  # the idle replicas of each model, by device
        self._jobs: set[Job] = set()  # that wait or run
        self._decodes: dict[str, set[asyncio.Future[ItemAttempts]]] = defaultdict(set)  # by model, that wait or run
        self._tasks: set[asyncio.Future[Any]] = set()  # the loop itself keeps no reference
        # Surveys run beside forwards, in none of their slots.
        self._surveys = asyncio.Semaphore(max(slots - 1, 1))
        self._noted: set[str] = set()  # models whose executors know that rows of theirs wait

    def add_model(self, model: ScheduledModel) -> None:
        """Start scheduling batches of a model."""
        self._models[model.key], self._idle[model.key] = model, model.executor.idle
        for device in set(model.executor.devices) - {CPU}:
            self.batcher.add_device(device, DeviceSlots(self._gpu_streams, parallel=False))
        model.executor.start(self._dispatch)
        self._dispatch()

    def remove_model(self, key: str) -> None:
        """Forget a model without waiting or running work."""
        if self._models.pop(key, None) is not None:
            del self._idle[key]
            self._decodes.pop(key, None)
            self.batcher.remove_model(key)

    def is_idle(self, key: str) -> bool:
        """Whether a model has no waiting or running work."""
        model = self._models.get(key)
        return model is None or (not model.busy and not self.batcher.count_waiting_rows(key))

    def refuse(self, key: str, make_error: Callable[[], Exception] | None) -> None:
        """Fail all current and future jobs of a model with an error; None ends this."""
        if (model := self._models.get(key)) is not None:
            model.make_error = make_error
        if make_error is None:
            return
        for job in self._jobs:
            if job.prepared.key.model == key:
                job.fail(make_error())
        for answer in self._decodes.get(key, ()):
            if not answer.done():
                answer.set_exception(make_error())

    def _fail(self, model: ScheduledModel, failure: LastingFailure) -> Exception:
        """Refuse the requests of a model, or all if a device has failed; returns the error for them."""
        if failure.of_device:
            self.fail_permanently(failure.reason)
            return failure_error(self.failure)
        model.on_failure(failure)
        if model.make_error is None:  # it loads
            return UnavailableError(failure.reason, retry_after=FAILURE_RETRY_S)
        return model.make_error()

    def fail_permanently(self, reason: str) -> None:
        """Stop answering for good: all waiting requests get UnavailableError."""
        if not self.failure:
            self.failure = reason
            self._on_failure(reason)
        for job in self._jobs:
            job.fail(failure_error(reason))

    async def run(self, jobs: Sequence[Job]) -> list[Results]:
        """The results of a request's jobs, in host memory.

        If cancelled, or past the deadline (DeadlineError), the waiting rows never run.
        """
        if self.failure:
            raise failure_error(self.failure)
        model = self._get_model(jobs[0].prepared.key.model)
        loop, submitted = asyncio.get_running_loop(), time.perf_counter()
        for job in jobs:
            job.answer = loop.create_future()
        answer = jobs[0].answer if len(jobs) == 1 else asyncio.gather(*[job.answer for job in jobs])
        timer = _expire_at(jobs[0].deadline, answer)
        try:
            for job in jobs:
                self._jobs.add(job)
                self.batcher.add(job)
            self._dispatch()
            await answer
            return [job.answer.result() for job in jobs]
        except BaseException:
            for job in jobs:
                self.batcher.remove(job)
                job.answer.cancel()
            self._note_idle(model)
            raise
        finally:
            timer.cancel()
            self._jobs.difference_update(jobs)
            if not _record_parts(jobs, submitted):
                late = time.monotonic() >= jobs[0].deadline - EARLY_S
                self._metrics.count("expired_total" if late else "cancelled_total", model.name)

    async def decode(
        self, key: str, items: Sequence[LocalItem], inputs: ModelInputs, priority: Priority, deadline: float
    ) -> ItemAttempts:
        """Decode items of a model when the batcher starts them.

        If cancelled before that, or past the deadline (DeadlineError), they are not decoded. ModelLostError,
        UnavailableError.
        """
        model = self._get_model(key)
        answer: asyncio.Future[ItemAttempts] = asyncio.get_running_loop().create_future()

        async def run(wait: SlotWait) -> None:  # to its end, even if the caller is gone
            started = time.perf_counter()
            try:
                attempts = await model.executor.decode(items, inputs)
            except (Exception, asyncio.CancelledError) as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                seconds = time.perf_counter() - started
                model.pace.add_decode(seconds / self.slots, count_rows(attempts))
                self._metrics.count("busy_seconds_total", model.name, CPU, by=seconds)
                if not answer.done():
                    answer.set_result(attempts)
            finally:
                self.batcher.finish(wait, time.perf_counter() - started)
                self._leave(model)

        wait = SlotWait(priority, lambda wait: self._keep(asyncio.ensure_future(run(wait))))
        if (workers := model.executor.find_decoders(items, inputs)) is not None:  # older batches want these too
            wait.idle = workers
        self.batcher.add_wait(wait)
        model.busy += 1
        self._dispatch()
        timer = _expire_at(deadline, answer)
        self._decodes[key].add(answer)
        try:
            return await answer
        finally:
            timer.cancel()
            self._decodes.get(key, set()).discard(answer)
            if self.batcher.remove_wait(wait):
                self._leave(model)

    async def survey(self, key: str, function: ModelFunction, seconds: float) -> Any:
        """As ``call``, once fewer surveys run, of all models, than there are slots; one runs in any case."""
        async with self._surveys:
            return await self.call(key, function, seconds)

    async def call(self, key: str, function: ModelFunction, seconds: float = math.inf) -> Any:
        """The result of a function of a model, or its error; if cancelled, what runs is ended.

        OverdueError once it has run for so many seconds; ModelLostError, UnavailableError.
        """
        model = self._get_model(key)
        model.busy += 1
        try:
            outcome = await model.executor.call(function, seconds)
        finally:
            self._leave(model)
        if outcome.failure is not None:
            raise self._fail(model, outcome.failure)
        if isinstance(outcome.result, Exception):
            raise outcome.result
        return outcome.result

    def _get_model(self, key: str) -> ScheduledModel:
        model = self._models.get(key)
        if model is None:
            raise unloading_error(key.partition("@")[0], 1.0)
        if model.make_error is not None:
            raise model.make_error()
        return model

    def _dispatch(self) -> None:
        """Start everything that may start now."""
        idle = self._idle if not self.failure else {}
        while (starting := self.batcher.start_next(idle)) is not None:
            if isinstance(starting, SlotWait):
                starting.begin(starting)
            else:
                model = self._models[starting.key.model]
                model.busy += 1
                running = self._start(model, starting)
                running.add_done_callback(partial(self._end, model, starting, time.perf_counter()))
                self._keep(running)
        waiting = self.batcher.find_waiting_models()
        if waiting != self._noted:
            for key in (waiting ^ self._noted) & self._models.keys():
                self._models[key].executor.note_waiting_rows(key in waiting)
            self._noted = waiting

    def _start(self, model: ScheduledModel, batch: Batch) -> asyncio.Future[BatchResult]:
        try:
            return model.executor.run(batch, partial(self._extend, batch))
        except Exception as error:  # the batch was not sent
            failed: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
            failed.set_result(fail_batch(batch, error))
            return failed

    def _extend(self, batch: Batch) -> Batch | None:
        """Add waiting rows to a batch whose forward has not begun; returns them as a batch, or None."""
        joining = self.batcher.extend(batch)
        if not joining:
            return None
        self._dispatch()  # a batch of several rows may need fewer slots than one of a single row
        return replace(batch, slices=tuple(joining))

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, model: ScheduledModel, batch: Batch, started: float, ended: asyncio.Future[BatchResult]) -> None:
        """Answer the jobs of a batch that has ended; an error fails only these."""
        seconds = time.perf_counter() - started
        result = ended.result()
        decode_seconds = result.decode_seconds
        try:
            if result.failure is not None and result.failure.ended is not None:
                self._lose_slots(batch, started, result.failure.ended)
            else:
                self.batcher.finish(batch, seconds, decode_seconds)
            if self._answer(model, batch, result):
                parallel = self.batcher.count_parallel_batches(batch.key.devices, batch.slots)
                model.pace.add_batch(batch, seconds, parallel, decoded=decode_seconds > 0)
            self._record(batch, result.failures, seconds)
        except Exception as error:
            log.exception("a batch could not be answered", extra={"fields": {"model": model.name}})
            for each in batch.slices:
                each.job.fail(wrap_error(error))
        finally:
            self._leave(model)

    def _lose_slots(self, batch: Batch, started: float, ended: asyncio.Future[Any]) -> None:
        """A batch that hangs keeps its slots until it has ended after all; without any the process can't go on."""

        def regain(_: asyncio.Future[Any]) -> None:
            self.batcher.finish(batch, time.perf_counter() - started)
            self._dispatch()

        ended.add_done_callback(regain)
        if not self.batcher.lose(batch):
            self.fail_permanently(f"forwards that do not end have all slots of {batch.device}")

    def _answer(self, model: ScheduledModel, batch: Batch, result: BatchResult) -> bool:
        """Pass results on to their requests; returns whether there are any."""
        if result.failure is not None:
            self._fail(model, result.failure)
        if result.crossing:
            self._metrics.count("crossing_total", model.name)
            model.on_crossing(result.crossing, model.shared_answers)
            self.batcher.limit_to_one_row(model.key)
        elif batch.rows > 1:
            model.shared_answers += len(result.results)
        if result.failures.too_many_rows is not None:
            self.batcher.reduce_max_rows(batch.key, result.failures.too_many_rows)
        has_results = False
        for each in result.results:
            has_results = has_results or not isinstance(each.results, Exception)
            job = batch.slices[each.index].job
            if not job.answer.done():  # else it was cancelled, or failed in another part
                job.timings.notes.update(fill=f"{each.rows}/{batch.key.max_rows}", depth=f"{batch.depth:.4g}")
                job.add(each)
        for again in result.again:
            if waiting := [each for each in again.slices if not each.job.answer.done()]:
                self.batcher.add_again(again.take(waiting, again.tries))
        return has_results

    def _leave(self, model: ScheduledModel) -> None:
        """Note that work of a model has ended: other work may start."""
        model.busy -= 1
        self._dispatch()
        self._note_idle(model)

    def _note_idle(self, model: ScheduledModel) -> None:
        if not model.busy and not self.batcher.count_waiting_rows(model.key):
            model.on_idle()

    def _record(self, batch: Batch, failures: BatchFailures, seconds: float) -> None:
        """Count a batch, its seconds and its failures in the metrics."""
        metrics, model = self._metrics, batch.key.name
        requests = len(set(map(attrgetter("job"), batch.slices)))
        max_rows, depth = max(batch.key.max_rows, batch.rows), min(batch.depth, 1.0)
        metrics.observe_batch(model, batch.rows, max_rows, requests, depth, seconds, batch.reason)
        metrics.count("busy_seconds_total", model, batch.device, by=seconds * batch.slots)
        if failures.out_of_memory or failures.memory_splits or failures.error_splits:
            metrics.count("out_of_memory_total", model, by=failures.out_of_memory)
            metrics.count("split_total", model, "memory", by=failures.memory_splits)
            metrics.count("split_total", model, "error", by=failures.error_splits)


def _record_parts(jobs: Sequence[Job], submitted: float) -> bool:
    """Add the duration of each step to the request's timings; returns whether a forward of it began."""
    timings, spans = jobs[0].timings, list[Span]()
    for job in jobs:
        for part in job.parts:
            spans += (("decode", *part.decode, 0), ("forward", *part.forward, part.rows), ("copy", *part.copy, 0))
            timings.facts.batch_rows = max(timings.facts.batch_rows, part.rows)
    if spans:
        timings.add_parts(submitted, spans)
        return True
    if any(job.waiting_rows < job.rows for job in jobs):
        return True
    timings.add_span("queue", submitted, time.perf_counter())
    return False


def _expire_at(deadline: float, answer: asyncio.Future[Any]) -> asyncio.TimerHandle:
    """Set DeadlineError on a future at a deadline on the monotonic clock, if it is not done; cancel what is returned.

    ``wait_until`` in a third of the time, for a future that nobody else waits for.
    """

    def expire() -> None:
        if not answer.done():
            answer.set_exception(deadline_error())

    left = max(deadline - time.monotonic(), 0.0)
    return asyncio.get_running_loop().call_later(min(left, LONGEST_S), expire)
