"""The steps of a request: find its model, admit it, plan it, decode its rows, run them in batches, collect features."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from layertap.models.errors import LayertapError, OtherCallsError, RequestError
from layertap.models.model_info import ModelInfo
from layertap.service.engine.admit.admission import AdmissionControl, Ticket
from layertap.service.engine.admit.planned_work import WorkPlan
from layertap.service.engine.batch import Job, Results, UndecodedError
from layertap.service.engine.collect.joined_inputs import join_inputs
from layertap.service.engine.collect.results import FEW_NUMBERS, FEW_RESULTS, add_warnings, collect_features
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.execute.threads import start_single_threaded
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.models.model_manager import ModelManager
from layertap.service.engine.prepare.fetch_inputs import fetch_inputs
from layertap.service.engine.prepare.job_maker import JobMaker, make_encoded_job, make_job, refuse_picture
from layertap.service.engine.prepare.planner import PlannedRequest, Planner
from layertap.service.engine.prepare.sources import count_taken_bytes, fill_tensors, plan_stages
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.rows import Items
from layertap.service.features import Features, warn_of_cuts
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.metrics import Metrics, Snapshot
from layertap.service.settings import Settings

T = TypeVar("T")
U = TypeVar("U")
MAX_LEFT_OUT = 16  # retries of a request, each leaving out tensors that failed
MAX_REPLANS = 8  # runs of an input whose forward makes other calls each time
Answer = tuple[Job, Results]  # a job and its forwards' results


class Engine:
    """Computes the features of requests. For the event loop only, which it never blocks."""

    def __init__(self, manager: ModelManager, fetcher: Fetcher, settings: Settings, metrics: Metrics) -> None:
        self.manager = manager
        self.fetcher = fetcher
        self.settings = settings
        self.metrics = metrics
        self.admission = AdmissionControl(manager.handles, settings, metrics)
        self.work_plan = WorkPlan(settings, metrics)
        self.planner = Planner(settings, self.run_in_thread)
        self.job_maker = JobMaker(manager.scheduler, self.planner, self.run_in_thread, settings.max_results)
        self._pool = ThreadPoolExecutor(settings.cpu_threads, "side", initializer=start_single_threaded)

    async def get_handle(self, name: str | None, ticket: Ticket) -> ModelHandle:
        """The handle that answers a request until its end; raises as ``ModelManager.get_handle``."""
        if (held := ticket.handles.get(name)) is not None:
            return held
        return ticket.hold(name, await self.manager.get_handle(name, ticket.deadline, ticket.timings))

    async def extract(self, request: ExtractRequest, ticket: Ticket) -> Features:
        """The features of a request; any LayertapError."""

        async def compute() -> Features:
            parts = await _ask_again(request, lambda asked: self.extract_parts(asked, ticket))
            if len(parts) == 1:
                return parts[0]
            return await self.run_in_thread(partial(_consume, join_inputs, parts), ticket.deadline)

        return await self.compute(request, ticket, compute)

    async def compute(
        self, request: ExtractRequest, ticket: Ticket, compute: Callable[[], Awaitable[Features]]
    ) -> Features:
        """The result of ``compute`` with what its user is warned of; raises what ``compute`` raises."""
        rows = request.timings.facts.rows
        self._describe(request)
        handle = await self.get_handle(request.model, ticket)
        features = await compute()
        check = partial(add_warnings, features)
        few = features.has_at_most(FEW_RESULTS, FEW_NUMBERS)
        features = check() if few else await self.run_in_thread(check, ticket.deadline)
        request.timings.facts.rows = rows + features.rows
        of_model = (*handle.model.warnings, *_warn_of_embedding(request, handle.model))
        warnings = (*of_model, *features.warnings, *warn_of_cuts(features))
        return replace(features, warnings=warnings) if warnings != features.warnings else features

    async def extract_parts(self, request: ExtractRequest, ticket: Ticket) -> list[Features]:
        """As ``extract``, in one part if all inputs have one shape, else in one part per input."""
        handle = await self.get_handle(request.model, ticket)
        with ticket.queue_rows(handle, len(request.items)):
            planned, items = await self._plan_and_fetch(request, handle, ticket)
            answers = await self._decode_and_run(planned, items, ticket)
            for job, _ in answers:
                self.metrics.count("rows_total", job.key.name, by=job.rows)
            collect = partial(_consume, _collect, answers)
            has_few_results = sum(len(job.spec.plan.results) for job, _ in answers) <= FEW_RESULTS
            return collect() if has_few_results else await self.run_in_thread(collect, ticket.deadline)

    async def dry_run(self, request: ExtractRequest, ticket: Ticket, describe: Callable[[list[Job]], T]) -> T:
        """Plan a request without running it: the result of ``describe``, in a thread, for its jobs; LayertapError."""
        self._describe(request)
        handle = await self.get_handle(request.model, ticket)

        async def prepare(asked: ExtractRequest) -> T:
            with ticket.queue_rows(handle, len(asked.items)):
                planned, items = await self._plan_and_fetch(asked, handle, ticket)
                if items:
                    jobs = await self._make_jobs(planned, items, ticket)
                else:
                    jobs = [make_job(planned, {}, deadline=ticket.deadline)]
                return await self.run_in_thread(partial(_consume, describe, jobs), ticket.deadline)

        return await _ask_again(request, prepare)

    async def run_jobs(self, jobs: list[Job], handle: ModelHandle, ticket: Ticket) -> list[Answer]:
        """Run planned jobs in the model's queue, and return each with its results."""
        with ticket.queue_rows(handle, sum(job.rows for job in jobs)):
            answers = await self._run(jobs, ticket.deadline)
        for job in jobs:
            self.metrics.count("rows_total", job.key.name, by=job.rows)
        return answers

    async def fetch(self, request: ExtractRequest, ticket: Ticket) -> ExtractRequest:
        """The request with its URLs replaced by pictures, for callers that extract from it several times or show them.

        RequestError. Planned first if possible, so that a refused request fetches nothing.
        """
        if not request.has_urls:
            return request
        handle = await self.get_handle(request.model, ticket)
        if request.explanation is None and request.sweep is None:
            await self.planner.plan(request, handle, ticket.deadline)
        count = len(request.items)
        items = await fetch_inputs(request, handle.model.model_inputs, count, self.fetcher, ticket)
        failed = [(index, item) for index, item in items if isinstance(item, LayertapError)]
        faults = tuple(error.to_fault(f"/inputs/{index}", index) for index, error in failed)
        if len(faults) == count:
            raise RequestError.from_faults((*request.faults, *faults))
        fetched = tuple((index, item) for index, item in items if not isinstance(item, LayertapError))
        return replace(request, items=fetched, faults=(*request.faults, *faults))

    async def run_in_thread(self, function: Callable[[], T], deadline: float) -> T:
        """Run a CPU-bound function, not decoding or forwards, in a thread pool; DeadlineError."""
        return await wait_until(deadline, asyncio.get_running_loop().run_in_executor(self._pool, function))

    def estimate_wait(self, name: str | None) -> float:
        """Seconds until a model (None: the default) has answered or expired all rows that it has now."""
        handle = self.manager.find_handle(name)
        seconds = self.admission.estimate_wait(handle, handle.rows) if handle else 0.0
        return min(seconds, self.settings.deadline_s)

    def take_snapshot(self) -> Snapshot:
        """Current values of the metrics' gauges; any thread may call it."""
        entries, handles = list(self.manager.registry), self.manager.list_handles()
        batcher = self.manager.scheduler.batcher
        answering = dict(self.manager.handles).items()  # handles for new requests; others finish theirs
        active = {name: handle for name, handle in answering if handle.is_active}
        waiting = sum(batcher.count_waiting_rows(handle.key) for handle in handles)
        replicas = {name: len(handle.executor.devices) for name, handle in active.items()}
        idle = {name: sum(handle.executor.count_idle().values()) for name, handle in active.items()}
        limits = ("max_queue_rows", "max_queue_bytes", "max_connections")
        return {
            "queue_rows": waiting,
            "queue_bytes": self.admission.used_bytes,
            "running_rows": max(sum(handle.rows for handle in handles) - waiting, 0),
            **{name: getattr(self.settings, name) for name in limits},
            "device_slots": batcher.count_slots(),
            "model_state": {(entry.spec.name, entry.state): 1 for entry in entries},
            "model_hooks": {entry.spec.name: entry.model.hooks for entry in entries if entry.model is not None},
            "model_memory_bytes": {entry.spec.name: entry.memory_bytes for entry in entries if entry.model is not None},
            "batch_ceiling_rows": {name: most for name, each in active.items() if (most := each.batch_keys.max_rows)},
            "model_admitted_rows": {name: handle.rows for name, handle in active.items()},
            "model_waiting_rows": {name: batcher.count_waiting_rows(handle.key) for name, handle in active.items()},
            "model_queue_seconds": {
                name: self.admission.estimate_wait(each, each.rows) for name, each in active.items()
            },
            "model_replicas": replicas,
            "model_busy_replicas": {name: count - idle[name] for name, count in replicas.items()},
        }

    async def close(self) -> None:
        """Finish submitted work, then end all threads."""
        await self.manager.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _describe(self, request: ExtractRequest) -> None:
        """Note a request's model and layers for logs and traces; it may be a part of a larger request."""
        facts = request.timings.facts
        facts.model, facts.layers = self.manager.find_name(request.model), request.digest_layers()
        facts.selectors = len(request.selectors)
        facts.rows += len(request.items)

    async def _plan_and_fetch(
        self, request: ExtractRequest, handle: ModelHandle, ticket: Ticket
    ) -> tuple[PlannedRequest, Items]:
        """A request's plan and its items; the ticket then holds the plan's rows and bytes."""
        planned = await self.planner.plan(request, handle, ticket.deadline)
        request.timings.facts.rows = max(request.timings.facts.rows, planned.rows)
        ticket.resize(planned.rows)  # before decoding and surveys
        items: Items = planned.request.local_items
        if planned.request.has_urls:
            items = await fetch_inputs(planned.request, planned.inputs, planned.rows, self.fetcher, ticket)
        ticket.reserve_bytes(planned.nbytes)
        return planned, items

    async def _decode_and_run(self, planned: PlannedRequest, items: Items, ticket: Ticket) -> list[Answer]:
        """Decode items, run their rows, and return the jobs with their results."""
        if (job := make_encoded_job(planned, items, ticket.deadline)) is not None:
            try:
                return await self._run([job], ticket.deadline)
            except UndecodedError as error:
                items = refuse_picture(items, error)
            except OtherCallsError:
                planned = planned.with_inputs_apart()
        jobs = await self._make_jobs(planned, items, ticket)
        ticket.resize(sum(job.rows for job in jobs))
        try:
            return await self._run(jobs, ticket.deadline)
        except OtherCallsError:
            if any(job.plan_again for job in jobs):
                raise
        return await self._decode_and_run(planned.with_inputs_apart(), items, ticket)

    async def _run(self, jobs: list[Job], deadline: float) -> list[Answer]:
        """Run jobs, in stages if some take tensors of others, and return each with its results."""
        if not any(job.spec.plan.extra for job in jobs):
            if any(job.spec.plan.calls for job in jobs):
                return await self._follow_all(jobs)
            return list(zip(jobs, await self.manager.scheduler.run(jobs), strict=True))
        answers: dict[int | None, Answer] = {}  # by input index
        for stage in plan_stages(jobs):
            filled = await self.run_in_thread(partial(_fill, stage, tuple(answers.values())), deadline)
            results = await self.manager.scheduler.run(filled)
            answers |= {job.input_index: (job, found) for job, found in zip(filled, results, strict=True)}
        return [answers[job.input_index] for job in jobs]

    async def _follow_all(self, jobs: Sequence[Job]) -> list[Answer]:
        tasks = [asyncio.ensure_future(self._follow(job)) for job in jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # if one fails the request, the others are of no use
            for task in tasks:
                task.cancel()

    async def _follow(self, job: Job) -> Answer:
        """Run a job that is planned again if its forward makes other calls than planned; returns the one that ran.

        A change at a call that counts from the last needs their number beforehand: a first run changes nothing.
        """
        counts_calls = job.spec.plan.counts_back
        for left in reversed(range(MAX_REPLANS)):
            trial = job.with_plan(interventions=()) if counts_calls else job
            try:
                (results,) = await self.manager.scheduler.run([trial])
            except OtherCallsError as error:
                if job.plan_again is None or not left or (job.spec.plan.counts_back and not counts_calls):
                    raise
                job = await job.plan_again(error.counts)
            else:
                if not counts_calls:
                    break
            counts_calls = False
        return job, results

    async def _make_jobs(self, planned: PlannedRequest, items: Items, ticket: Ticket) -> list[Job]:
        """The jobs of items, replanned if their rows are not as predicted."""
        jobs = await self.job_maker.make_jobs(planned, items, ticket.deadline)
        needed = sum(job.nbytes + count_taken_bytes(job) for job in jobs)
        ticket.reserve_bytes(max(needed - planned.nbytes, 0))
        return jobs


async def _ask_again(request: ExtractRequest, ask: Callable[[ExtractRequest], Awaitable[T]]) -> T:
    """The result of ``ask``, retried without the tensors of globs that an error names."""
    for _ in range(MAX_LEFT_OUT):
        try:
            return await ask(request)
        except LayertapError as error:
            request = request.leave_out(error)
    return await ask(request)


def _warn_of_embedding(request: ExtractRequest, model: ModelInfo) -> tuple[str, ...]:
    """Warnings about the model's embedding, if it is requested."""
    asked = request.embedding is not None and not request.embedding.layer
    return model.model_embedding.warnings if asked and model.model_embedding is not None else ()


def _fill(jobs: Sequence[Job], answers: Sequence[Answer]) -> list[Job]:
    return [fill_tensors(job, answers) for job in jobs]


def _consume(function: Callable[[list[U]], T], values: list[U]) -> T:
    """The function's result; then free the values one by one, so that other threads get the GIL in between."""
    result = function(values)
    while values:
        values.pop()
    return result


def _collect(answers: list[Answer]) -> list[Features]:
    return [collect_features(job, results) for job, results in answers]
