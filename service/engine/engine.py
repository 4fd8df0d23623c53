"""The road of one request: its model, its place, its plan, its rows, a batch, its features."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from layertap.models.errors import LayertapError, RequestError
from layertap.models.model_info import ModelInfo
from layertap.models.spec import PreprocessSpec
from layertap.service.engine.admit.admission import Admission, AdmissionControl
from layertap.service.engine.collect.answer_cache import AnswerCache
from layertap.service.engine.collect.joined_inputs import join_inputs
from layertap.service.engine.collect.number_checks import add_warnings, is_short
from layertap.service.engine.collect.request_digest import digest_layers, digest_request
from layertap.service.engine.collect.results import collect_features
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.execute.forward_batch import Results
from layertap.service.engine.execute.threads import start_single_threaded
from layertap.service.engine.models.model_manager import ModelManager
from layertap.service.engine.models.model_worker import ModelWorker
from layertap.service.engine.plan.planner import PlannedRequest, Planner
from layertap.service.engine.request import ExtractRequest, Job
from layertap.service.engine.rows.decoder import DecodedInputs, InputDecoder, make_encoded_job
from layertap.service.engine.rows.fetch_inputs import fetch_inputs, fetch_items
from layertap.service.engine.rows.rows import Items
from layertap.service.engine.schedule.job import make_job
from layertap.service.engine.schedule.job_maker import JobMaker
from layertap.service.engine.schedule.sources import count_taken_bytes, fill_tensors, plan_stages
from layertap.service.features import Features
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.inputs.items import ImageItem, UrlItem
from layertap.service.metrics import Metrics, ModelLoad, Snapshot
from layertap.service.pictures.sent import SentPicture
from layertap.service.settings import Settings

T = TypeVar("T")
MAX_LEFT_OUT = 16  # times that a request is asked again without some tensors
SHORT_BODY = 2**16  # bytes that are digested in about the time that a way to another thread and back takes
Answer = tuple[Job, Results]  # with what its forwards gave


class Engine:
    """Requests to features. Used on the event loop, which it never blocks."""

    def __init__(self, manager: ModelManager, fetcher: Fetcher, settings: Settings, metrics: Metrics) -> None:
        self.manager = manager
        self.fetcher = fetcher
        self.settings = settings
        self.metrics = metrics
        self.admission = AdmissionControl(manager.workers, settings, metrics)
        self.planner = Planner(settings, self.run_in_thread)
        self.decoder = InputDecoder(manager.scheduler, self.run_in_thread)
        self.job_maker = JobMaker(self.planner, self.run_in_thread, settings.max_results)
        self._pool = ThreadPoolExecutor(settings.cpu_threads, "side", initializer=start_single_threaded)
        self.answers = AnswerCache(settings.cache_bytes, self._pool)
        manager.on_unload = self.answers.forget

    async def get_worker(self, name: str | None, admission: Admission) -> ModelWorker:
        """The worker that answers a request, the same from first to last; as ``ModelManager.get_worker``."""
        worker = admission.find_worker(name)
        return worker or admission.hold(name, await self.manager.get_worker(name, admission.deadline))

    async def extract(self, request: ExtractRequest, admission: Admission) -> Features:
        """What layers of a model compute for a request's inputs; any error of the tree."""
        return await self.compute_once(request, admission, partial(self._extract, request, admission))

    async def compute_once(
        self, request: ExtractRequest, admission: Admission, compute: Callable[[], Awaitable[Features]]
    ) -> Features:
        """What ``compute`` gives for a request, or gave for an equal one where answers are kept; what it raises.

        What is at a URL may change, so that such requests are computed each time.
        """
        rows = request.timings.facts.rows
        self._describe(request)

        async def compute_checked() -> Features:
            features = await compute()
            check = partial(add_warnings, features)
            return check() if is_short(features) else await self.run_in_thread(check, admission.deadline)

        features = await self._compute_once(request, admission, compute_checked)
        worker = await self.get_worker(request.model, admission)
        features = replace(
            features, warnings=(*worker.model.warnings, *_warn_of_embedding(request, worker.model), *features.warnings)
        )
        request.timings.describe(rows=rows + features.rows)
        return features

    async def _compute_once(
        self, request: ExtractRequest, admission: Admission, compute: Callable[[], Awaitable[Features]]
    ) -> Features:
        if not self.answers.max_bytes or any(isinstance(item, UrlItem) for _, item in request.items):
            return await compute()
        worker = await self.get_worker(request.model, admission)
        with self.metrics.get_statistics(worker.name).measure_lookup() as lookup:

            async def compute_measured() -> Features:
                with lookup.compute():
                    return await compute()

            key = (worker.generation, await self._digest(request, admission))
            features, result = await self.answers.get_or_compute(key, compute_measured, admission.deadline)
            if result != "miss":
                admission.reserve_bytes(features.nbytes)
        self.metrics.count_cached(result)
        request.timings.notes["cache"] = result
        return features

    async def extract_parts(self, request: ExtractRequest, admission: Admission) -> list[Features]:
        """As ``extract``, in one part where all inputs have one shape, else in one for each of them."""
        worker = await self.get_worker(request.model, admission)
        statistics = self.metrics.get_statistics(worker.name)
        with statistics.measure_request(request.timings.steps), admission.queue_rows(worker, len(request.items)):
            planned = await self.planner.plan(request, worker, admission.deadline)
            request.timings.describe(rows=max(request.timings.facts.rows, planned.rows))
            admission.resize(planned.rows)  # before anything is decoded, or run to get to know a shape
            items = await fetch_inputs(planned, self.fetcher, admission)
            admission.reserve_bytes(planned.nbytes)
            answers = await self._decode_and_run(planned, items, admission)
            return await self._collect_features(answers, admission.deadline)

    async def fetch(self, request: ExtractRequest, admission: Admission) -> ExtractRequest:
        """The request with a picture in place of each URL, for who extracts from it several times; RequestError."""
        if not any(isinstance(item, UrlItem) for _, item in request.items):
            return request
        worker = await self.get_worker(request.model, admission)
        count = len(request.items)
        items = await fetch_items(request, worker.model.model_inputs, count, self.fetcher, admission)
        failed = [(place, item) for place, item in items if isinstance(item, LayertapError)]
        faults = tuple(error.to_fault(f"/inputs/{place}", place) for place, error in failed)
        if len(faults) == count:
            raise RequestError.from_faults((*request.faults, *faults))
        fetched = tuple((place, item) for place, item in items if not isinstance(item, LayertapError))
        return replace(request, items=fetched, faults=(*request.faults, *faults))

    async def fetch_shown(self, request: ExtractRequest, admission: Admission) -> ExtractRequest:
        """As ``fetch``, for a reply that shows the pictures; planned first: what is refused fetches nothing."""
        if any(isinstance(item, UrlItem) for _, item in request.items):
            worker = await self.get_worker(request.model, admission)
            await self.planner.plan(request, worker, admission.deadline)
        return await self.fetch(request, admission)

    async def dry_run(self, request: ExtractRequest, admission: Admission) -> list[Job]:
        """A request up to its forwards, and no further; any error of the tree."""
        self._describe(request)
        return await _ask_again(request, lambda asked: self._dry_run(asked, admission))

    async def _dry_run(self, request: ExtractRequest, admission: Admission) -> list[Job]:
        worker = await self.get_worker(request.model, admission)
        planned = await self.planner.plan(request, worker, admission.deadline)
        items = await fetch_inputs(planned, self.fetcher, admission)
        admission.reserve_bytes(planned.nbytes)
        if not items:
            return [make_job(planned, {}, request.faults, deadline=admission.deadline)]
        return await self._prepare(planned, await self.decoder.decode(planned, items, admission.deadline), admission)

    def list_pictures(
        self, request: ExtractRequest, features: Features, admission: Admission
    ) -> tuple[SentPicture | None, ...]:
        """What the rows of an answer are pictures of, for those who show them; empty where rows are no single inputs.

        None stands for what was no picture, or is at a URL and was not fetched before. Empty too where a library's own
        processor makes the rows: which part of a picture a model sees is not known then.
        """
        worker = admission.find_worker(request.model)
        spec = worker.model.model_inputs.preprocess if worker is not None else None
        items = [item for place, item in request.items if place not in features.skipped]
        if not isinstance(spec, PreprocessSpec) or len(items) != features.rows:
            return ()
        limit = self.settings.max_pixels
        return tuple(SentPicture(item.data, spec, limit) if isinstance(item, ImageItem) else None for item in items)

    async def run_in_thread(self, function: Callable[[], T], deadline: float) -> T:
        """Run something that computes, but no pictures and no forwards, in a pool of threads; DeadlineError."""
        return await wait_until(deadline, asyncio.get_running_loop().run_in_executor(self._pool, function))

    def estimate_wait(self, name: str | None) -> float:
        """Seconds until a model (None: the default) has answered all that is here now, or let it go by its deadline."""
        worker = self.manager.find_worker(name)
        seconds = self.admission.estimate_wait(worker, worker.rows) if worker else 0.0
        return min(seconds, self.settings.deadline_s)

    def take_snapshot(self) -> Snapshot:
        """What is so at this moment, for the metrics; called by any thread."""
        entries, workers = list(self.manager.registry), self.manager.list_workers()
        answering = dict(self.manager.workers)  # new requests; others finish what they have
        waiting = sum(self.manager.scheduler.count_waiting_rows(worker) for worker in workers)
        rows = sum(worker.rows for worker in workers)
        ceilings = {name: worker.max_batch_rows for name, worker in answering.items()}
        return Snapshot(
            queue_rows=waiting,
            queue_bytes=self.admission.used_bytes,
            cache_bytes=self.answers.used_bytes,
            running_rows=max(rows - waiting, 0),
            states={entry.spec.name: entry.state for entry in entries},
            hooks={entry.spec.name: entry.model.hooks for entry in entries if entry.model is not None},
            max_batch_rows={name: rows for name, rows in ceilings.items() if rows},
            memory_bytes={entry.spec.name: entry.memory_bytes for entry in entries if entry.model is not None},
            loads={name: self._measure_load(worker) for name, worker in answering.items() if worker.is_active},
            max_queue_rows=self.settings.max_queue_rows,
            max_queue_bytes=self.settings.max_queue_bytes,
            max_connections=self.settings.max_connections,
            device_slots=self.manager.scheduler.count_slots(),
        )

    def _measure_load(self, worker: ModelWorker) -> ModelLoad:
        return ModelLoad(
            admitted_rows=worker.rows,
            waiting_rows=self.manager.scheduler.count_waiting_rows(worker),
            queue_seconds=self.admission.estimate_wait(worker, worker.rows),
            replicas=worker.replicas,
            busy_replicas=worker.busy_replicas,
        )

    async def close(self) -> None:
        """Finish what was submitted, then end all threads."""
        await self.manager.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _describe(self, request: ExtractRequest) -> None:
        """Note what a request is about, for logs and traces: it may be one of several parts of a larger one."""
        timings = request.timings
        timings.describe(
            model=self.manager.find_name(request.model),
            layers=digest_layers(request),
            selectors=len(request.selectors),
            rows=timings.facts.rows + len(request.items),
        )

    async def _digest(self, request: ExtractRequest, admission: Admission) -> str:
        digest = partial(digest_request, request)
        short = admission.nbytes <= SHORT_BODY
        return digest() if short else await self.run_in_thread(digest, admission.deadline)

    async def _extract(self, request: ExtractRequest, admission: Admission) -> Features:
        parts = await _ask_again(request, lambda asked: self.extract_parts(asked, admission))
        if len(parts) == 1:
            return parts[0]
        return await self.run_in_thread(partial(join_inputs, parts), admission.deadline)

    async def _decode_and_run(self, planned: PlannedRequest, items: Items, admission: Admission) -> list[Answer]:
        """The jobs of the rows that items are made into, and what their forwards gave."""
        make = partial(make_job, planned, faults=planned.request.faults, deadline=admission.deadline)
        answer: DecodedInputs | Answer
        if (job := make_encoded_job(planned, items, make)) is not None:
            answer = await self.decoder.run_encoded(planned, items, job)
        elif planned.rows == len(items) == 1 and not planned.request.input_options:
            answer = await self.decoder.decode_and_run(planned, items, make, admission.deadline)
        else:
            answer = await self.decoder.decode(planned, items, admission.deadline)
        if isinstance(answer, tuple):
            return [answer]
        jobs = await self._prepare(planned, answer, admission)
        admission.resize(sum(job.rows for job in jobs))
        return await self._run(jobs, admission.deadline)

    async def _run(self, jobs: list[Job], deadline: float) -> list[Answer]:
        """Jobs and what their forwards gave, stage by stage where some take what others have."""
        if not any(job.spec.plan.extra for job in jobs):
            return list(zip(jobs, await self.manager.scheduler.run(jobs), strict=True))
        answers: dict[int, Answer] = {}
        for stage in plan_stages(jobs):
            ready = [partial(fill_tensors, jobs[number], tuple(answers.values())) for number in stage]
            filled = await self.run_in_thread(partial(_call_all, ready), deadline)
            results = await self.manager.scheduler.run(filled)
            answers |= dict(zip(stage, zip(filled, results, strict=True), strict=True))
        return [answers[number] for number in range(len(jobs))]

    async def _prepare(self, planned: PlannedRequest, decoded: DecodedInputs, admission: Admission) -> list[Job]:
        """The jobs of rows that are decoded, planned anew where they are not what was expected."""
        jobs = await self.job_maker.make_jobs(planned, decoded, admission.deadline)
        needed = sum(job.nbytes + count_taken_bytes(job) for job in jobs)
        admission.reserve_bytes(max(needed - planned.nbytes, 0))
        return jobs

    async def _collect_features(self, answers: list[Answer], deadline: float) -> list[Features]:
        for job, _ in answers:
            self.metrics.count_answered(job.model, job.rows)
        collect = partial(_collect, answers)
        if len(answers) == 1:
            return collect()
        return await self.run_in_thread(collect, deadline)


async def _ask_again(request: ExtractRequest, ask: Callable[[ExtractRequest], Awaitable[T]]) -> T:
    """What ``ask`` gives for a request, or for what its globs leave of it once an error has named tensors."""
    for _ in range(MAX_LEFT_OUT):
        try:
            return await ask(request)
        except LayertapError as error:
            request = request.leave_out(error)
    return await ask(request)


def _warn_of_embedding(request: ExtractRequest, model: ModelInfo) -> tuple[str, ...]:
    """Why the model's embedding may mislead, where it is asked for."""
    asked = request.embedding is not None and not request.embedding.layer
    return model.model_embedding.warnings if asked and model.model_embedding is not None else ()


def _call_all(functions: Sequence[Callable[[], T]]) -> list[T]:
    return [function() for function in functions]


def _collect(answers: list[Answer]) -> list[Features]:
    return [collect_features(job, results) for job, results in answers]
