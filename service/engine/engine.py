"""The steps of a request: find its model, admit it, prepare it, run it in batches, collect features."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from layertap.models.errors import InputError, LayerNotReachedError, LayertapError, OtherForwardError, RequestError
from layertap.models.points import Point
from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.admit.admission import AdmissionControl, Ticket
from layertap.service.engine.admit.unsent_replies import UnsentReplies
from layertap.service.engine.batch import Job, Results, UndecodedError
from layertap.service.engine.collect.joined_inputs import check_entries, join_inputs, list_entries
from layertap.service.engine.collect.results import add_warnings, collect_features, find_tokens
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.execute.threads import start_single_threaded
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.models.model_manager import ModelManager
from layertap.service.engine.prepare.fetch_inputs import fetch_inputs
from layertap.service.engine.prepare.job_maker import JobMaker, make_encoded_job, refuse_picture
from layertap.service.engine.prepare.planned_request import PlannedRequest
from layertap.service.engine.prepare.planner import Planner, complete_texts
from layertap.service.engine.prepare.sources import count_taken_bytes, fill_tensors, plan_stages
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.engine.rows import Items
from layertap.service.engine.short_work import is_short
from layertap.service.engine.stored_projections import StoredProjections
from layertap.service.features import Features, warn_of_cuts
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.inputs.items import UrlItem
from layertap.service.metrics import Metrics, Snapshot
from layertap.service.settings import Settings

T = TypeVar("T")
U = TypeVar("U")
SIZE = attrgetter("size")
MAX_LEFT_OUT = 16  # retries of a request, each leaving out tensors that failed
INPUT_ERRORS = (InputError, LayerNotReachedError)  # what a forward may refuse an input with
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
        self.unsent = UnsentReplies(settings.max_unsent_bytes)
        self.projections = StoredProjections(settings.max_projection_bytes)
        self.planner = Planner(settings, self.run_in_thread, self.projections)
        self.job_maker = JobMaker(manager.scheduler, self.planner, self.run_in_thread, settings.max_results)
        self._pool = ThreadPoolExecutor(settings.cpu_threads, "side", initializer=start_single_threaded)
        self._long_bodies = ThreadPoolExecutor(1, "long-bodies", initializer=start_single_threaded)

    async def get_handle(self, name: str | None, ticket: Ticket) -> ModelHandle:
        """The handle that answers a request until its end; raises as ``ModelManager.get_handle``."""
        if (held := ticket.handles.get(name)) is not None:
            return held
        if (handle := self.manager.find_ready(name)) is None:
            handle = await self.manager.get_handle(name, ticket.deadline, ticket.timings)
        return ticket.hold(name, handle)

    async def extract(self, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> Features:
        """The features of a request; any LayertapError."""
        before = self.begin(request, sent, ticket)
        parts = await self.extract_parts(request, sent, ticket)
        if len(parts) > 1 or request.combines:
            features = await self.run_in_thread(partial(_consume, join_inputs, parts), ticket.deadline)
        else:
            features = parts[0]
        if request.generate is not None and (key := find_tokens(features)) is not None:
            handle = ticket.handles[request.model]
            texts = await handle.decode_tokens(features.arrays[key], ticket.deadline)
            features = replace(features, texts=texts)
        return await self.finish(features, request, ticket, before)

    def begin(self, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> int:
        """Note what a request is about, for logs and traces; returns its rows so far, of which it may be a part."""
        facts = ticket.timings.facts
        facts.model, facts.layers = self.manager.find_name(request.model), request.layers_digest
        facts.selectors = len(request.selectors)
        before, facts.rows = facts.rows, facts.rows + len(sent.items)
        return before

    async def finish(self, features: Features, request: ExtractRequest, ticket: Ticket, before: int) -> Features:
        """The features with what their user is warned of; ``before`` is what ``begin`` returned."""
        if is_short(results=len(features.arrays), counted_numbers=sum(map(SIZE, features.arrays.values()))):
            features = add_warnings(features)
        else:
            features = await self.run_in_thread(partial(add_warnings, features), ticket.deadline)
        ticket.timings.facts.rows = before + features.rows
        model = ticket.handles[request.model].model
        of_model = (*model.warnings, *_warn_of_embedding(request, model))
        of_cuts = warn_of_cuts(features) if features.cut else ()
        warnings = (*of_model, *features.warnings, *of_cuts)
        return replace(features, warnings=warnings) if warnings != features.warnings else features

    async def extract_parts(self, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> list[Features]:
        """As ``extract``, in one part if all inputs have one shape, else in one part per input."""
        handle = ticket.handles.get(request.model) or await self.get_handle(request.model, ticket)
        try:
            ticket.enter_queue(handle, len(sent.items))
            tried = _Tried(sent)
            run = partial(self._decode_and_run, tried=tried, ticket=ticket)
            answers = await self._with_plan(request, tried, handle, ticket, run)
        finally:
            ticket.leave_queue()
        results = 0
        for job, _ in answers:
            self.metrics.count("rows_total", handle.name, by=job.rows)
            results += len(job.prepared.spec.plan.results)
        if is_short(results=results):
            return _consume(_collect, answers)
        return await self.run_in_thread(partial(_consume, _collect, answers), ticket.deadline)

    async def dry_run(
        self, request: ExtractRequest, sent: SentInputs, ticket: Ticket, describe: Callable[[list[Job]], T]
    ) -> T:
        """Plan a request without running it: the result of ``describe``, in a thread, for its jobs; LayertapError."""
        self.begin(request, sent, ticket)
        handle = await self.get_handle(request.model, ticket)
        tried = _Tried(sent)

        async def make(planned: PlannedRequest, items: Items) -> T:
            jobs = await self._make_jobs(planned, items, tried, ticket)
            return await self.run_in_thread(partial(_consume, describe, jobs), ticket.deadline)

        try:
            ticket.enter_queue(handle, len(sent.items))
            return await self._with_plan(request, tried, handle, ticket, make)
        finally:
            ticket.leave_queue()

    async def run_jobs(self, jobs: list[Job], handle: ModelHandle, ticket: Ticket) -> list[Answer]:
        """Run planned jobs in the model's queue, and return each with its results."""
        try:
            ticket.enter_queue(handle, sum(job.rows for job in jobs))
            answers = await self._run(jobs, ticket.deadline)
        finally:
            ticket.leave_queue()
        for job in jobs:
            self.metrics.count("rows_total", handle.name, by=job.rows)
        return answers

    async def fetch(self, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> SentInputs:
        """The inputs with URLs replaced by pictures, for callers that need the pictures more than once.

        RequestError. Planned first if possible, so that a refused request fetches nothing.
        """
        if not any(isinstance(item, UrlItem) for _, item in sent.items):
            return sent
        handle = await self.get_handle(request.model, ticket)
        if request.explanation is None and request.sweep is None:
            await self.planner.plan(request, sent, handle, ticket.deadline)
        count = len(sent.items)
        items = await fetch_inputs(request, sent, handle.model.model_inputs, count, self.fetcher, ticket)
        failed = [(index, item) for index, item in items if isinstance(item, LayertapError)]
        faults = (*sent.faults, *(error.to_fault(f"/inputs/{index}", index) for index, error in failed))
        if len(failed) == count:
            raise RequestError.from_faults(faults)
        return SentInputs(tuple((index, item) for index, item in items if not isinstance(item, LayertapError)), faults)

    async def run_in_thread(self, function: Callable[[], T], deadline: float) -> T:
        """Run a CPU-bound function, not decoding or forwards, in a thread pool; DeadlineError."""
        return await wait_until(deadline, asyncio.get_running_loop().run_in_executor(self._pool, function))

    async def parse_long(self, function: Callable[[], T], deadline: float) -> T:
        """As ``run_in_thread``, one after another, for work that holds the GIL: the loop has turns in between."""
        return await wait_until(deadline, asyncio.get_running_loop().run_in_executor(self._long_bodies, function))

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
        active = {name: handle for name, handle in answering if handle.state == "ready"}
        waiting = sum(batcher.count_waiting_rows(handle.key) for handle in handles)
        replicas = {name: len(handle.executor.devices) for name, handle in active.items()}
        idle = {name: sum(handle.executor.idle.values()) for name, handle in active.items()}
        limits = ("max_queue_rows", "max_queue_bytes", "max_unsent_bytes", "max_connections")
        return {
            "queue_rows": waiting,
            "queue_bytes": self.admission.used_bytes,
            "unsent_bytes": self.unsent.used_bytes,
            "running_rows": max(sum(handle.rows for handle in handles) - waiting, 0),
            **{name: getattr(self.settings, name) for name in limits},
            "device_slots": batcher.count_slots(),
            "model_state": {(entry.spec.name, entry.state): 1 for entry in entries},
            "model_hooks": {entry.spec.name: entry.model.hooks for entry in entries if entry.model is not None},
            "model_memory_bytes": {entry.spec.name: entry.memory_bytes for entry in entries if entry.model is not None},
            "batch_ceiling_rows": {
                name: most for name, each in active.items() if (most := batcher.get_max_rows(each.key))
            },
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
        for pool in (self._pool, self._long_bodies):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _with_plan(
        self,
        request: ExtractRequest,
        tried: _Tried,
        handle: ModelHandle,
        ticket: Ticket,
        use: Callable[[PlannedRequest, Items], Awaitable[T]],
    ) -> T:
        """The result of ``use`` for a request's plan and its items; the ticket then holds the plan's rows and bytes.

        Planned and used again without the tensors of globs that an error names.
        """
        left = MAX_LEFT_OUT
        while True:
            try:
                planned = await self.planner.plan(request, tried.sent, handle, ticket.deadline)
                ticket.timings.facts.rows = max(ticket.timings.facts.rows, planned.rows)
                ticket.resize(planned.rows)  # before decoding and surveys
                if tried.items is None:
                    sent = complete_texts(planned.request, tried.sent, handle.model)
                    tried.items = [(index, item) for index, item in sent.items if not isinstance(item, UrlItem)]
                    if len(tried.items) < len(sent.items):
                        inputs, rows = planned.inputs, planned.rows
                        tried.items = await fetch_inputs(request, sent, inputs, rows, self.fetcher, ticket)
                ticket.reserve_bytes(planned.nbytes - tried.nbytes)
                tried.nbytes = planned.nbytes
                return await use(planned, tried.items)
            except LayertapError as error:
                if not left:
                    raise
                request, left = request.leave_out(error), left - 1

    async def _decode_and_run(
        self, planned: PlannedRequest, items: Items, tried: _Tried, ticket: Ticket
    ) -> list[Answer]:
        """Decode items, run their rows, and return the jobs with their results."""
        if (job := make_encoded_job(planned, items, tried.sent.faults, ticket)) is not None:
            try:
                return await self._run([job], ticket.deadline)
            except UndecodedError as error:
                items = refuse_picture(items, error)
            except INPUT_ERRORS as error:
                if not _may_go_apart(planned, error):
                    raise
                planned = planned.with_inputs_apart()
        jobs = await self._make_jobs(planned, items, tried, ticket)
        ticket.resize(sum(job.rows for job in jobs))
        run = partial(self._run_each, planned.request) if planned.apart else self._run
        try:
            answers = await run(jobs, ticket.deadline)
            if any(job.plan_again for job in jobs):  # results may be larger than planned
                ran, reply = [job for job, _ in answers], planned.request.reply
                check_entries(list_entries(ran), len(ran), reply, self.settings.max_results)
            return answers
        except INPUT_ERRORS as error:
            if not _may_go_apart(planned, error):
                raise
        return await self._decode_and_run(planned.with_inputs_apart(), items, tried, ticket)

    async def _run(self, jobs: list[Job], deadline: float) -> list[Answer]:
        """Run jobs, in stages if some take tensors of others, and return each with its results."""
        staged = followed = False
        for job in jobs:
            plan = job.prepared.spec.plan
            has_own_sizes = job.plan_again is not None and not job.prepared.catalog.sizes_known
            staged, followed = staged or bool(plan.extra), followed or bool(plan.calls) or has_own_sizes
        if not staged:
            if followed:
                return await self._follow_all(jobs)
            return list(zip(jobs, await self.manager.scheduler.run(jobs), strict=True))
        answers: dict[int | None, Answer] = {}  # by input index
        for stage in plan_stages(jobs):
            filled = await self.run_in_thread(partial(_fill, stage, tuple(answers.values())), deadline)
            results = await self.manager.scheduler.run(filled)
            answers |= {job.input_index: (job, found) for job, found in zip(filled, results, strict=True)}
        return [answers[job.input_index] for job in jobs]

    async def _run_each(self, request: ExtractRequest, jobs: list[Job], deadline: float) -> list[Answer]:
        """Run jobs of an input each; what their forwards refuse is left out if the request skips it, unless all is."""
        if request.on_error == "fail" or any(job.plan.extra for job in jobs):  # one needs the results of another
            return await self._run(jobs, deadline)
        outcomes = await asyncio.gather(*(self._run([job], deadline) for job in jobs), return_exceptions=True)
        answers, faults = list[Answer](), list(jobs[0].faults)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                answers += outcome
            elif isinstance(outcome, (*INPUT_ERRORS, RequestError)) and request.may_skip(outcome):
                faults.append(outcome.to_fault(f"/inputs/{job.input_index}", job.input_index))
            else:
                raise outcome
        if not answers:
            raise RequestError.from_faults(faults)
        ordered = tuple(sorted(faults, key=lambda fault: fault.input or 0))
        return [(replace(job, faults=ordered), results) for job, results in answers]

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
        counts_calls, sizes_known = job.plan.counts_back, job.prepared.catalog.sizes_known
        for left in reversed(range(MAX_REPLANS)):
            trial = job.with_plan(interventions=()) if counts_calls else job
            try:
                (results,) = await self.manager.scheduler.run([trial])
            except OtherForwardError as error:
                is_final = (job.plan.counts_back and not counts_calls) or (error.shapes and sizes_known)
                if job.plan_again is None or not left or is_final:
                    raise
                job = await job.plan_again(error)
            except LayertapError:
                raise
            except Exception:
                await _check_sizes(job)
                raise
            else:
                await _check_sizes(job)
                if not counts_calls:
                    break
            counts_calls = False
        return job, results

    async def _make_jobs(self, planned: PlannedRequest, items: Items, tried: _Tried, ticket: Ticket) -> list[Job]:
        """The jobs of items, replanned if their rows are not as predicted; the ticket then holds their bytes."""
        jobs = await self.job_maker.make_jobs(planned, items, tried.sent.faults, ticket)
        needed = sum([job.nbytes + count_taken_bytes(job) for job in jobs])
        if needed > tried.nbytes:
            ticket.reserve_bytes(needed - tried.nbytes)
            tried.nbytes = needed
        return jobs


@dataclass
class _Tried:
    """A request's inputs, kept from one try to the next: its items once they are fetched, and the bytes it holds."""

    sent: SentInputs
    items: Items | None = None
    nbytes: int = 0


def _may_go_apart(planned: PlannedRequest, error: LayertapError) -> bool:
    """Whether a job for each input may answer more: each makes its own calls, or those with an error are left out."""
    skips = planned.request.may_skip(error) and not planned.plan.unsplittable
    differs = isinstance(error, OtherForwardError) and not (error.shapes and planned.catalog.sizes_known)
    return not planned.apart and (differs or skips)


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


async def _check_sizes(job: Job) -> None:
    """RequestError if what a job asks for does not fit the sizes that were an example until its forward had them."""
    catalog = job.prepared.catalog
    if catalog.sizes_known or job.plan_again is None:
        return
    as_planned, info = OtherForwardError(""), catalog.outputs[0]
    as_planned.shapes = {Point(".", 0, info.path, "output"): info.shape}
    await job.plan_again(as_planned)
