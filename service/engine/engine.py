"""A request through the engine in two steps: ``prepare`` does everything before the forward, ``run`` the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TypeVar

from torch import Tensor

from layertap.models import fingerprint
from layertap.models.capture import verification
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.text_lengths import TextLengths, measure_lengths
from layertap.models.compiled.compiled_plan import CompiledPlan, find_compiled_plan
from layertap.models.devices.dtypes import DTYPES
from layertap.models.errors import Fault, InputError, LayertapError, RequestError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.loaded_model import LoadedModel, check_rows_fit
from layertap.models.resume.resumption import Resumption, find_start
from layertap.models.selection.embedding import reduce_embedding
from layertap.models.selection.plan import Plan
from layertap.models.spec import InputSpec, Preprocessed, Shapes
from layertap.service.engine.batch import BatchQueue, QueuedRequest
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.decoder import (
    Attempt,
    Fetched,
    Items,
    Rows,
    count_rows,
    decode_item,
    find_preprocessed_by,
    get_row_shapes,
    is_reshaped,
    join_rows,
    pad_texts,
    predict_shapes,
)
from layertap.service.engine.fetch_inputs import fetch_inputs
from layertap.service.engine.limits import check_batch, check_count, check_graph, check_survey, show_shapes
from layertap.service.engine.model_manager import ModelManager
from layertap.service.engine.plan_cache import FingerprintedPlan, make_fingerprinted_plan, scale_plan
from layertap.service.engine.request import ExtractRequest, Job
from layertap.service.engine.results import collect_features
from layertap.service.engine.worker_thread import start_single_threaded
from layertap.service.features import Features
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings

T = TypeVar("T")
log = logging.getLogger("layertap")
FEW_NUMBERS = 2**17  # what is no more is looked through in less than half a millisecond
SizeCheck = Callable[[Plan, int], None]
Hold = Callable[[int], None]


@dataclass(frozen=True)
class _PlannedRequest:
    """A request with its plan, by what is known of its rows: as they were sent, then as they are.

    ``takes`` says what rows must be like: as the model takes them, or outputs of a layer. ``identity`` is the model's
    part of the fingerprints.
    """

    ask: ExtractRequest
    model: LoadedModel
    takes: ModelInputs
    resumption: Resumption | None
    catalog: Catalog
    plan: FingerprintedPlan
    identity: str
    preprocessed: Preprocessed
    shapes: Shapes
    rows: int


class Engine:
    """Requests to features. Used on the event loop, which it never blocks."""

    def __init__(self, fleet: ModelManager, fetcher: Fetcher, settings: Settings, metrics: Metrics) -> None:
        self.manager = fleet
        self.fetcher = fetcher
        self.settings = settings
        self.metrics = metrics
        self.pool = ThreadPoolExecutor(settings.cpu_threads, "side", initializer=start_single_threaded)

    async def close(self) -> None:
        """Finish what was submitted, then end all threads."""
        await self.manager.close()
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def run_in_thread(self, run: Callable[[], T], deadline: float) -> T:
        """Run something that computes, but no pictures and no forwards, in a pool of threads."""
        return await wait_until(deadline, asyncio.get_running_loop().run_in_executor(self.pool, run))

    async def extract(self, ask: ExtractRequest, fits: SizeCheck) -> Features:
        """The features of a request: what ``prepare`` and ``run`` do, with a place in the queue; QueueFullError."""
        model = await self.manager.get_model(ask.model, ask.deadline)
        with self.manager.admit(model, len(ask.items), ask.deadline) as hold:
            job = await self.prepare(ask, fits, model, hold)
            hold(job.rows)
            return await self.run(job)

    async def prepare(
        self, ask: ExtractRequest, fits: SizeCheck, model: LoadedModel | None = None, hold: Hold = lambda rows: None
    ) -> Job:
        """Everything before the forward, the cheapest first: names, sizes, what is elsewhere, then pixels.

        ``fits`` is asked whether the reply may be so large, before decoding, by the shapes that arrays have, and again
        when the rows are there; ``model`` is given where a place in its queue is held, and ``hold``, which makes it one
        for another number of rows. RequestError, TooLargeError, UnavailableError, DeadlineError.
        """
        model = model or await self.manager.get_model(ask.model, ask.deadline)
        request = await self._plan_sent(_with_embedding(ask, model), model)
        likely = await self._likely(request)
        fits(likely, request.rows)
        items = await fetch_inputs(request.ask, request.takes, self.fetcher, hold)
        reserved = likely.nbytes(request.rows) + request.rows * _row_bytes(request.takes.specs, request.shapes)
        ask.reserve(reserved)
        if not ask.items:
            return _job(request, {}, ask.faults)
        inputs, faults, sent = await self._decode(ask, items, request.takes)
        request = await self._plan_rows(request, inputs, sent, fits)
        job = _job(request, inputs, faults)
        self._check_forward(job)
        ask.reserve(max(job.nbytes - reserved, 0))
        return job

    async def run(self, job: Job) -> Features:
        """Run a job with others that take the same shape; DeadlineError, LayerNotReachedError."""
        parts = await self.manager.scheduler.run(self._work(job), job)
        self.metrics.count_answered(job.model.spec.name, job.rows)
        if len(parts) == 1:
            return collect_features(job, parts)
        return await self.run_in_thread(lambda: collect_features(job, parts), job.deadline)

    def _work(self, job: Job) -> QueuedRequest:
        resident = self.manager.get_worker(job.model)
        extra = verification.list_extra_captures(job.plan, job.catalog) if job.verify else frozenset()
        return QueuedRequest(
            queue=self._lane(job),
            rows=job.rows,
            depth=1.0 if job.verify or job.compiled else job.plan.cost,
            row_bytes=_kept_bytes(job) + 2 * sum(each.nbytes(1) for each in extra),
            priority=job.priority,
            deadline=job.deadline,
            requires_isolation=job.isolated or job.verify or resident.requires_isolation or not job.plan.may_share,
            unsplittable=job.together or not job.plan.may_split,
        )

    def _lane(self, job: Job) -> BatchQueue:
        resident = self.manager.get_worker(job.model)
        return resident.get_queue(
            job.catalog, get_row_shapes(job.inputs), job.plan.has_graph, job.compiled, job.together
        )

    def _check_forward(self, job: Job) -> None:
        """TooLargeError, InputError where the rows that must share a forward are more than one may have."""
        lane = self._lane(job)
        check_graph(job.plan, lane)
        if job.together:
            check_batch(job.rows, lane)
        else:
            check_rows_fit(job.plan, job.catalog, job.rows, lane.max_rows)

    async def _plan_sent(self, ask: ExtractRequest, model: LoadedModel) -> _PlannedRequest:
        """A request's plan before anything is decoded, by the shapes that arrays have; RequestError, TooLargeError."""
        resumption = await self._resumption(ask, model, model.shapes, model.catalog)
        takes = model.model_inputs if resumption is None else model.model_inputs.replace_by_output(resumption.takes)
        catalog = model.catalog if resumption is None else resumption.catalog
        given = [item for _, item in ask.items]
        shapes, rows = predict_shapes(given, takes)
        preprocessed = find_preprocessed_by(given, takes, shapes)
        identity = _identity(model, takes, preprocessed, shapes)
        plan = await self._planned(ask, model, catalog, identity, _unknown(takes) if ask.items else None)
        if ask.verify:
            verification.check_possible(plan.plan, catalog)
        check_count(rows, self.settings)
        return _PlannedRequest(ask, model, takes, resumption, catalog, plan, identity, preprocessed, shapes, rows)

    async def _plan_rows(
        self, request: _PlannedRequest, inputs: Rows, sent: Sequence[Fetched], fits: SizeCheck
    ) -> _PlannedRequest:
        """The plan for rows that are there: of another shape, length or origin than was expected they have another."""
        ask, model, takes, plan = request.ask, request.model, request.takes, request.plan
        rows, shapes = len(next(iter(inputs.values()))), get_row_shapes(inputs)
        preprocessed = find_preprocessed_by(sent, takes, shapes)
        identity = _identity(model, takes, preprocessed, shapes)
        lengths = await self._lengths(inputs, takes, ask.deadline)
        resumption, catalog = request.resumption, request.catalog
        if shapes != takes.shapes:
            if lengths is None:
                fits(scale_plan(plan.plan, shapes, model.shapes), rows)
            whole = _shapes_of(inputs, model, takes)
            catalog = await self._catalog(model, whole, ask.deadline)
            resumption = await self._resumption(ask, model, whole, catalog)
            catalog = catalog if resumption is None else resumption.catalog
        if shapes != takes.shapes or lengths is not None or identity != request.identity:
            plan = await self._planned(ask, model, catalog, identity, lengths)
        fits(plan.plan, rows)
        return _PlannedRequest(ask, model, takes, resumption, catalog, plan, identity, preprocessed, shapes, rows)

    async def _lengths(self, rows: Rows, takes: ModelInputs, deadline: float) -> TextLengths | None:
        """How many tokens the texts of rows have; None of a model that takes none."""
        if takes.text is None:
            return None
        measure = partial(measure_lengths, rows, takes.text)
        small = sum(value.numel() for value in rows.values()) <= FEW_NUMBERS
        return measure() if small else await self.run_in_thread(measure, deadline)

    async def _resumption(
        self, ask: ExtractRequest, model: LoadedModel, shapes: Shapes, catalog: Catalog
    ) -> Resumption | None:
        """How the request's forwards of rows of a shape go on from a layer, where they do; RequestError."""
        if ask.resume is None:
            return None
        try:
            start = await self.run_in_thread(
                partial(find_start, ask.resume, catalog), ask.deadline
            )  # a glob may take long
            return model.catalogs.get_resumption(start[0], shapes) or await self.manager.call_model(
                model, lambda loaded: loaded.catalogs.verify_resumption(*start, shapes), ask.deadline
            )
        except RequestError as error:
            raise RequestError(
                error.detail, hint=error.hint, faults=(Fault(error.detail, error.hint, "/resume"),)
            ) from None

    async def _planned(
        self, ask: ExtractRequest, model: LoadedModel, catalog: Catalog, identity: str, lengths: TextLengths | None
    ) -> FingerprintedPlan:
        plans = self.manager.get_worker(model).plans
        known = plans.get(catalog, identity, ask, lengths)
        if known is None:
            known = await self.run_in_thread(
                lambda: make_fingerprinted_plan(ask, identity, catalog, self.settings.max_results, lengths),
                ask.deadline,
            )
            plans.put(ask, identity, known, lengths)
        return known

    async def _likely(self, request: _PlannedRequest) -> Plan:
        """What a plan for the configured shape is for rows of another: exactly, where that shape is known already."""
        ask, model, plan, shapes = request.ask, request.model, request.plan.plan, request.shapes
        if ask.resume is not None or shapes == model.shapes:
            return plan
        if model.text is not None:  # how much of a tensor is a text's own, its mask tells later
            return scale_plan(plan, tuple(map(min, shapes, model.shapes)), model.shapes)
        known = model.catalogs.get_catalog(shapes)
        if known is None:
            return scale_plan(plan, shapes, model.shapes)
        return (await self._planned(ask, model, known, request.identity, None)).plan

    async def _catalog(self, model: LoadedModel, shapes: Shapes, deadline: float) -> Catalog:
        known = model.catalogs.get_catalog(shapes)
        if known is not None:
            return known
        check_survey(model, shapes, self.settings)
        try:
            return await self.manager.call_model(model, lambda loaded: loaded.catalogs.survey(shapes), deadline)
        except InputError as error:
            fields = {"model": model.spec.name, "shape": show_shapes(shapes)}
            log.info("a model's forward raised", exc_info=error, extra={"fields": fields})
            raise

    async def _decode(
        self, ask: ExtractRequest, items: Items, takes: ModelInputs
    ) -> tuple[dict[str, Tensor], tuple[Fault, ...], list[Fetched]]:
        """The rows of all good items and the faults of all others, in the order of the inputs; the good ones."""
        with ask.timings.step("decode"):
            tries = [self._try(item, takes, ask) for _, item in items]
            attempts = [await tries[0]] if len(tries) == 1 else await asyncio.gather(*tries)
            if takes.text is not None:
                even = partial(pad_texts, items, attempts, takes.text)
                attempts = even() if len(tries) == 1 else await self.run_in_thread(even, ask.deadline)
        parts: list[Rows] = []
        sent: list[Fetched] = []
        faults = list(ask.faults)
        for place, item, attempt in _placed(items, attempts):
            if isinstance(attempt, LayertapError):
                faults.append(Fault(attempt.detail, attempt.hint, f"/inputs/{place}", place))
                if ask.on_error == "fail" and isinstance(attempt, TooLargeError):
                    raise TooLargeError(attempt.detail, hint=attempt.hint, faults=(faults[-1],))
            elif ask.resume is not None and takes.text is None and get_row_shapes(attempt) != takes.shapes:
                faults.append(_misfit(attempt, takes, place))
            elif parts and get_row_shapes(attempt) != get_row_shapes(parts[0]):
                faults.append(_mismatch(attempt, parts[0], place))
            else:
                parts.append(attempt)
                sent.append(item)
        faults.sort(key=lambda fault: fault.input or 0)
        if faults and (ask.on_error == "fail" or not parts):
            raise RequestError(faults[0].detail, hint=faults[0].hint, faults=tuple(faults))
        if len(parts) == 1:
            return join_rows(parts), tuple(faults), sent
        return await self.run_in_thread(lambda: join_rows(parts), ask.deadline), tuple(faults), sent

    async def _try(self, item: Fetched, takes: ModelInputs, ask: ExtractRequest) -> Sequence[Attempt]:
        if isinstance(item, LayertapError):
            return [item]
        run = partial(decode_item, item, takes, self.settings)
        try:
            return await self.manager.scheduler.decode(takes.model, run, count_rows, ask.priority, ask.deadline)
        except (InputError, TooLargeError) as error:
            return [error]


def _job(request: _PlannedRequest, inputs: dict[str, Tensor], faults: tuple[Fault, ...]) -> Job:
    ask, plan, catalog = request.ask, request.plan, request.catalog
    together = ask.isolated and catalog.batches and not catalog.rowwise and request.rows > 1
    fingerprints = (
        {key: fingerprint.digest_batch(each) for key, each in plan.fingerprints.items()} if together else None
    )
    return Job(
        request.model,
        catalog,
        plan.plan,
        inputs,
        request.rows,
        ask.deadline,
        faults,
        ask.timings,
        fingerprints or plan.fingerprints,
        ask.isolated,
        ask.priority,
        ask.verify,
        request.resumption,
        _compiled(ask, request.model, plan.plan, request.shapes) if inputs else None,
        together,
        request.preprocessed,
    )


def _unknown(takes: ModelInputs) -> TextLengths | None:
    """How many tokens texts may have that nobody looked at yet."""
    if takes.text is None:
        return None
    most = takes.text.max_tokens
    return TextLengths(1, most, most, most, known=False)


def _shapes_of(rows: Rows, model: LoadedModel, takes: ModelInputs) -> Shapes:
    """The shape of the model's own inputs: rows that a layer made of texts have as many tokens as these."""
    if takes is model.model_inputs or takes.text is None:
        return get_row_shapes(rows)
    tokens = rows[takes.text.ids].shape[1 + takes.text.axis]
    return tuple((tokens,) for _ in model.inputs)


def _with_embedding(ask: ExtractRequest, model: LoadedModel) -> ExtractRequest:
    """The request with the model's embedding as what it names, where it names nothing itself."""
    if ask.embedding is None:
        return ask
    if model.embedding_selector is None:
        raise RequestError(f"model {model.spec.name} has no embedding", hint="name layers")
    return replace(ask, selectors=(reduce_embedding(model.embedding_selector, ask.embedding),))


def _misfit(rows: Rows, takes: ModelInputs, place: int) -> Fault:
    detail = f"an output of {takes.specs[0].name!r} has another shape than {show_shapes(get_row_shapes(rows))}"
    return Fault(detail, f"send shape {show_shapes(takes.shapes)}", input=place)


def _mismatch(rows: Rows, first: Rows, place: int) -> Fault:
    shapes = f"{show_shapes(get_row_shapes(rows))}, the first good one {show_shapes(get_row_shapes(first))}"
    return Fault(f"this input has shape {shapes}", "send one shape a request", input=place)


def _compiled(ask: ExtractRequest, model: LoadedModel, plan: Plan, shapes: Shapes) -> CompiledPlan | None:
    """The graph that answers a request, where one does."""
    if ask.verify or ask.resume is not None or shapes != model.shapes:
        return None
    return find_compiled_plan(model.compiled, plan)


def _kept_bytes(job: Job) -> int:
    """What is kept of a row's forward: a graph gives all its captures, whoever wants which."""
    if job.compiled is None:
        return job.plan.nbytes(1)
    return sum(each.nbytes(1) for each in job.compiled.captures)


def _identity(model: LoadedModel, takes: ModelInputs, preprocessed: Preprocessed, shapes: Shapes) -> str:
    """The model's part of the fingerprints of rows of a shape."""
    return fingerprint.digest_rows(model.identity, preprocessed, shapes if is_reshaped(takes, shapes) else None)


def _placed(items: Items, attempts: Sequence[Sequence[Attempt]]) -> Iterator[tuple[int, Fetched, Attempt]]:
    """Every input's place, its item and what became of it; a batch is one item of several inputs."""
    for (place, item), found in zip(items, attempts, strict=True):
        for row, attempt in enumerate(found):
            yield place + row, item, attempt


def _row_bytes(specs: Sequence[InputSpec], shapes: Shapes) -> int:
    return sum(prod(shape) * DTYPES[spec.dtype].itemsize for spec, shape in zip(specs, shapes, strict=True))
