"""A request through the engine in two steps: ``prepare`` does everything before the forward, ``run`` the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TypeVar

from torch import Tensor

from models import fingerprint
from models.catalog import Catalog
from models.errors import Fault, InputError, LayertapError, RequestError, TooLargeError
from models.loaded import LoadedModel, Shapes
from models.plan import Plan, Result
from models.points import path_text
from models.pooling import Reduced
from service.engine.fleet import Fleet, within
from service.engine.job import Ask, Job
from service.engine.planning import plan_of
from service.engine.rows import Rows, joined, rows_of, shape_of
from service.errors import DeadlineError
from service.features import Array, Features, Receipt
from service.inputs import Item
from service.settings import Settings

T = TypeVar("T")
SURVEY_ROWS = 5  # one, one and three rows in three forwards
OnHost = tuple[Array, Array | None]  # values, and the scale of int8
Items = Sequence[tuple[int, Item]]
Attempt = Rows | LayertapError
SizeCheck = Callable[[Plan, int], None]


class Engine:
    """Requests to features. Used on the event loop, which it never blocks."""

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self.fleet = fleet
        self.settings = settings
        self.pool = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode")

    async def close(self) -> None:
        """Finish what was submitted, then end all threads."""
        await self.fleet.close()
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, run: Callable[[], T], deadline: float) -> T:
        """Run something that computes in the pool of the decoders."""
        return await within(deadline, asyncio.get_running_loop().run_in_executor(self.pool, run))

    async def extract(self, ask: Ask, fits: SizeCheck) -> Features:
        """The features of a request: what ``prepare`` and ``run`` do, with a place in the queue; QueueFullError."""
        model = await self.fleet.model(ask.model, ask.deadline)
        with self.fleet.admitted(model, len(ask.items)) as hold:
            job = await self.prepare(ask, fits)
            hold(job.rows)
            return await self.run(job)

    async def prepare(self, ask: Ask, fits: SizeCheck) -> Job:
        """Everything before the forward, the cheapest first: names, sizes, then pixels.

        ``fits`` is asked whether the reply may be so large, before decoding and again if the rows have another shape
        than the configured one. RequestError, TooLargeError, UnavailableError, DeadlineError.
        """
        model = await self.fleet.model(ask.model, ask.deadline)
        catalog, plan = model.catalog, await self._plan(ask, model.catalog)
        fits(plan, max(len(ask.items), 1))
        inputs: dict[str, Tensor] = {}
        faults, rows = ask.faults, 1
        if ask.items:
            inputs, faults = await self._decode(ask, model)
            rows = len(next(iter(inputs.values())))
            check_count(rows, self.settings)
            catalog = await self._catalog(model, shape_of(inputs), ask.deadline)
            plan = await self._plan(ask, catalog) if catalog is not model.catalog else plan
            fits(plan, rows)
        prints = await self.off_loop(lambda: _fingerprints(model, plan), ask.deadline)
        return Job(model, catalog, plan, inputs, rows, ask.deadline, faults, ask.timings, prints)

    async def run(self, job: Job) -> Features:
        """Run a job in its model's thread; DeadlineError, LayerNotReachedError."""
        submitted = time.perf_counter()

        def extract(model: LoadedModel) -> dict[str, OnHost]:
            job.timings.add("queue", time.perf_counter() - submitted)
            if time.monotonic() >= job.deadline:
                raise DeadlineError("the deadline passed before the forward began")
            with job.timings.step("forward"):
                taken = model.extract(job.inputs, job.plan, job.catalog, self.settings.max_batch_rows)
            with job.timings.step("copy"):
                on_host = {capture: _on_host(reduced) for capture, reduced in taken.items()}
            return {result.key: on_host[result.capture] for result in job.plan.results}

        return _features(job, await self.fleet.call(job.model, extract, job.deadline))

    async def _plan(self, ask: Ask, catalog: Catalog) -> Plan:
        return await self.off_loop(lambda: plan_of(ask, catalog, self.settings.max_results), ask.deadline)

    async def _catalog(self, model: LoadedModel, shapes: Shapes, deadline: float) -> Catalog:
        if shapes == model.shapes:
            return model.catalog
        if shapes not in model.catalogs:
            _check_survey(model, shapes, self.settings)
        return await self.fleet.call(model, lambda loaded: loaded.catalog_for(shapes), deadline)

    async def _decode(self, ask: Ask, model: LoadedModel) -> tuple[dict[str, Tensor], tuple[Fault, ...]]:
        """The rows of all good items and the faults of all others, in the order of the inputs."""
        with ask.timings.step("decode"):
            attempts = await asyncio.gather(*(self._try(item, model, ask.deadline) for _, item in ask.items))
        parts: list[Rows] = []
        faults = list(ask.faults)
        for place, attempt in _placed(ask.items, attempts):
            if isinstance(attempt, LayertapError):
                faults.append(Fault(attempt.detail, attempt.hint, f"/inputs/{place}", place))
                if ask.on_error == "fail" and isinstance(attempt, TooLargeError):
                    raise TooLargeError(attempt.detail, hint=attempt.hint, faults=(faults[-1],))
            elif parts and shape_of(attempt) != shape_of(parts[0]):
                shapes = f"{_shown(shape_of(attempt))}, the first good one {_shown(shape_of(parts[0]))}"
                faults.append(Fault(f"this input has shape {shapes}", "send one shape a request", input=place))
            else:
                parts.append(attempt)
        faults.sort(key=lambda fault: fault.input or 0)
        if faults and (ask.on_error == "fail" or not parts):
            raise RequestError(faults[0].detail, hint=faults[0].hint, faults=tuple(faults))
        return joined(parts), tuple(faults)

    async def _try(self, item: Item, model: LoadedModel, deadline: float) -> Sequence[Attempt]:
        try:
            return await self.off_loop(lambda: rows_of(item, model, self.settings), deadline)
        except (InputError, TooLargeError) as error:
            return [error]


def check_count(inputs: int, settings: Settings) -> None:
    """TooLargeError where a request has more inputs than it may."""
    if inputs > settings.max_inputs:
        raise TooLargeError(
            f"the request has {inputs} inputs, the limit is {settings.max_inputs}", hint="send them in several requests"
        )


def _check_survey(model: LoadedModel, shapes: Shapes, settings: Settings) -> None:
    """TooLargeError for a shape so much larger than the configured one that its catalogue would keep others waiting."""
    ratio = max(prod(new) / prod(known) for new, known in zip(shapes, model.shapes, strict=True))
    seconds, limit = SURVEY_ROWS * ratio * model.catalog.seconds, settings.deadline_s / 4
    if ratio > 1 and seconds > limit:
        raise TooLargeError(
            f"an input of this shape would take about {seconds:.0f} s to get to know, the limit is {limit:.0f} s",
            hint=f"send shape {_shown(model.shapes)}, or configure the model for larger ones",
        )


def _placed(items: Items, attempts: Sequence[Sequence[Attempt]]) -> Iterator[tuple[int, Attempt]]:
    """Every input's place and what became of it; a batch is one item of several inputs."""
    for (place, _), found in zip(items, attempts, strict=True):
        for row, attempt in enumerate(found):
            yield place + row, attempt


def _shown(shapes: Shapes) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _on_host(reduced: Reduced) -> OnHost:
    scale = reduced.scale.cpu().numpy() if reduced.scale is not None else None
    return reduced.values.cpu().numpy(), scale


def _fingerprints(model: LoadedModel, plan: Plan) -> dict[str, str]:
    captures = {result.key: result.capture for result in plan.results}
    return {key: fingerprint.of_result(model.identity, each.point, each.reduction) for key, each in captures.items()}


def _features(job: Job, arrays: dict[str, OnHost]) -> Features:
    return Features(
        model=job.model.spec.name,
        fingerprint=job.fingerprint,
        rows=job.rows,
        arrays={key: array for key, (array, _) in arrays.items()},
        scales={key: scale for key, (_, scale) in arrays.items() if scale is not None},
        receipts={result.key: _receipt(job, result) for result in job.plan.results},
        errors=job.faults,
    )


def _receipt(job: Job, result: Result) -> Receipt:
    point, leaf, how = result.capture.point, result.capture.leaf, result.capture.reduction
    return Receipt(
        layer=point.layer,
        call=point.call,
        module=result.module,
        site=point.site,
        path=path_text(point.path),
        layout=leaf.layout,
        captured=leaf.shape_for(job.rows),
        dtype=leaf.dtype,
        pool=how.pool,
        normalize=how.normalize,
        fingerprint=job.fingerprints[result.key],
        row_axis=leaf.row_axis if how.pool == "none" else 0,
    )
