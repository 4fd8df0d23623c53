"""A sweep's road: the unedited rows first, then rows that are edited otherwise each, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from layertap.models import fingerprint
from layertap.models.capture.batch_slices import JoinedRows
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.errors import RequestError
from layertap.models.gradients.objectives import make_target
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.labels import name_classes
from layertap.models.selection.hook_points import InputOptions, Objective, Reduction, Selector, Sweep
from layertap.models.selection.plan import Capture, Result
from layertap.service.engine.admit.admission import Ticket, check_results, check_sizes
from layertap.service.engine.admit.planned_work import CHUNK_ROWS, PlannedWork, WorkPlan, check_changed_inputs
from layertap.service.engine.batch import ForwardSpec, Job, Results
from layertap.service.engine.collect.joined_inputs import join_inputs
from layertap.service.engine.collect.results import collect_features, make_receipt
from layertap.service.engine.engine import Answer, Engine
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.request import ExtractRequest, ReplyOptions
from layertap.service.engine.rows.predicted_rows import predict_rows
from layertap.service.engine.rows.sources import count_taken_bytes, fill_tensors, prepare_sources
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features, Receipt, TopEffect
from layertap.service.settings import Settings
from layertap.service.sweep.places import METRIC, Place, PlaceFinder, SweptInput, freeze_noise

CHUNK_S = 0.25  # that rows which are queued together are to take, where more than CHUNK_ROWS do
CHUNK_BYTES = 2**26  # of inputs that are queued together
CHUNK_JOBS = 64  # of different places
SMALLER = "fewer 'layers', or only some 'channels', 'heads' or 'tokens' of them, or fewer 'values' or inputs"
OnProgress = Callable[[int, int], None]  # edits that are done, and all


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep whose rows are decoded and whose places are found: nothing of it is refused any more."""

    request: ExtractRequest
    sweep: Sweep
    handle: ModelHandle
    inputs: Sequence[SweptInput]
    work: PlannedWork

    @property
    def values(self) -> Sequence[float | None]:
        """What is tried at each entry, one after the other."""
        return self.sweep.values or (None,)


async def prepare(engine: Engine, plan: WorkPlan, request: ExtractRequest, ticket: Ticket) -> PreparedSweep:
    """A request's sweep, checked before any forward, those that survey a new shape excepted.

    RequestError, TooLargeError, QueueTooLongError where it can't be done in time, and what ``Engine.dry_run`` raises.
    """
    sweep = request.sweep
    if sweep is None:
        raise ValueError("the request asks for no sweep")
    if request.reply.format.is_picture:
        raise NotAcceptableError("a sweep is not drawn", hint="ask for JSON, npz or safetensors")
    handle = await engine.get_handle(request.model, ticket)
    request = await engine.fetch(request, ticket)
    asked = await engine.run_in_thread(partial(_make_unedited, request, handle), ticket.deadline)
    jobs = await engine.dry_run(asked, ticket, tuple)
    request.timings.facts.rows = 0  # they are counted when they are answered
    find = partial(_describe_inputs, request, sweep, jobs, handle, engine.settings)
    inputs = await engine.run_in_thread(find, ticket.deadline)
    ticket.reserve_bytes(sum(count_taken_bytes(_make_edited(each)) for each in inputs))
    count = sum(each.count(len(sweep.values or (None,))) for each in inputs)
    rows = sum(bool(each.places) for each in inputs)
    check_changed_inputs(count, rows, engine.settings, f"try {SMALLER}")
    check_sizes([count + len(inputs)], [4 * (count + len(inputs))], len(inputs), request.reply)
    seconds = sum(each.count(len(sweep.values or (None,))) * _estimate_seconds(each.job) for each in inputs)
    work = PlannedWork(plan, handle, count, seconds, SMALLER)
    work.check(ticket.deadline)
    return PreparedSweep(request, sweep, handle, inputs, work)


async def run(
    engine: Engine, prepared: PreparedSweep, ticket: Ticket, on_progress: OnProgress = lambda done, count: None
) -> Features:
    """The metric of each edit under its place's key, float32 (inputs, *axes), and of the unedited inputs.

    What ``Engine.extract`` raises.
    """
    return await engine.compute_once(prepared.request, ticket, partial(_run, engine, prepared, ticket, on_progress))


async def _run(engine: Engine, prepared: PreparedSweep, ticket: Ticket, on_progress: OnProgress) -> Features:
    work, handle = prepared.work, prepared.handle
    with work.count(ticket.deadline):
        answers = await engine.run_jobs([_make_base(each, work.rows) for each in prepared.inputs], handle, ticket)
        begin = partial(_begin, prepared, answers)
        rows = await engine.run_in_thread(begin, ticket.deadline)
        for chunk in _cut(rows, _count_chunk_rows(prepared, engine.settings)):
            await work.wait_for_turn(ticket.deadline)
            with ticket.return_bytes():
                jobs = await engine.run_in_thread(partial(_make_jobs, chunk), ticket.deadline)
                ticket.reserve_bytes(sum(job.nbytes for job in jobs))
                results = await engine.run_jobs(jobs, handle, ticket)
            for edit, (_, found) in zip(chunk, results, strict=True):
                edit.keep(found)
            work.done += sum(edit.count for edit in chunk)
            on_progress(work.done, work.rows)
    return await engine.run_in_thread(partial(_collect, prepared, rows), ticket.deadline)


@dataclass(frozen=True)
class _Row:
    """An input whose unedited answer is there: its job, with what its changes take of others, and room for metrics."""

    swept: SweptInput
    job: Job
    results: Results
    places: tuple[Place, ...]
    values: Sequence[float | None]
    number: str
    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class _Edit:
    """Some entries of one place, ``start`` and those after it, edited with one value, a row each."""

    row: _Row
    place: int
    value: int
    start: int
    count: int

    def make_job(self) -> Job:
        """The job of these rows."""
        row, job, value = self.row, self.row.job, self.row.values[self.value]
        changes = row.places[self.place].changes
        if value is not None:
            number: dict[str, Any] = {row.number: value}
            changes = tuple(replace(each, operation=replace(each.operation, **number)) for each in changes)
        fixed = freeze_noise(job.spec.plan.resolved_interventions, job.first_row)
        changes = freeze_noise(changes, job.first_row)
        plan = replace(job.spec.plan, results=(row.swept.metric,), interventions=(fixed, changes), extra=frozenset())
        return replace(
            job,
            spec=replace(job.spec, plan=plan),
            inputs={name: each.expand(self.count, *each.shape[1:]) for name, each in job.inputs.items()},
            rows=self.count,
            first_row=self.start,
            isolated=job.isolated or not plan.may_share,
            unsplittable=job.unsplittable or not plan.may_split,
            taken_rows=0,
            joined=JoinedRows(self.count),
        )

    def keep(self, results: Results) -> None:
        """Put what was measured where it belongs."""
        array = self.row.arrays[self.place]
        measured = results[self.row.swept.metric.capture].values.numpy()
        array[self.start : self.start + self.count, self.value] = measured


def _make_jobs(chunk: Sequence[_Edit]) -> list[Job]:
    return [edit.make_job() for edit in chunk]


def _make_unedited(request: ExtractRequest, handle: ModelHandle) -> ExtractRequest:
    """A request for the unedited metric, each input by itself; RequestError where the model has no such objective."""
    model = handle.model.for_tower(predict_rows([item for _, item in request.items], handle.model.model_inputs).tower)
    objective = request.for_input(request.items[0][0]).objective or Objective()
    try:
        resolved = resolve_objective(objective, model.catalog)
    except RequestError as error:
        raise RequestError.from_faults([error.to_fault("/objective")]) from None
    point = resolved.point
    metric = Selector(
        point.text, point.layer, point.call, point.path, point.site, None, Reduction(metric=resolved.objective), METRIC
    )
    options = {
        index: replace(request.input_options.get(index, InputOptions()), objective=None) for index, _ in request.items
    }
    return replace(
        request,
        selectors=(metric,),
        objective=None,
        sweep=None,
        input_options=options,
        reply=ReplyOptions(max_bytes=None),
    )


def _describe_inputs(
    request: ExtractRequest, sweep: Sweep, jobs: Sequence[Job], handle: ModelHandle, settings: Settings
) -> list[SweptInput]:
    """What is tried on each input; RequestError, TooLargeError."""
    finder = PlaceFinder(sweep, handle.model.text)
    inputs = [finder.describe(job, request.for_input(job.input_index or 0).objective or Objective()) for job in jobs]
    check_results(1 + max(len(each.places) for each in inputs), settings.max_results)
    prepared = prepare_sources([_make_edited(each) for each in inputs])
    return [
        replace(each, job=replace(each.job, spec=_add_extra(each.job, edited)))
        for each, edited in zip(inputs, prepared, strict=True)
    ]


def _add_extra(job: Job, edited: Job) -> ForwardSpec:
    """What a job's unedited forward gives, with what edited ones take of it."""
    return replace(job.spec, plan=replace(job.spec.plan, extra=edited.spec.plan.extra))


def _make_edited(swept: SweptInput) -> Job:
    """An input's job with all edits of the sweep at once: never run, but looked at for what they take of others."""
    plan = swept.job.spec.plan
    interventions = (*plan.interventions, *(place.changes for place in swept.places))
    return replace(swept.job, spec=replace(swept.job.spec, plan=replace(plan, interventions=interventions)))


def _make_base(swept: SweptInput, work_rows: int) -> Job:
    """The job of an unedited input, with what its objective's class or target is found in."""
    plan, scores = swept.job.spec.plan, swept.scores
    extra = plan.extra | ({scores} if scores is not None else set())
    plan = replace(plan, results=(swept.metric,), extra=frozenset(extra))
    return replace(swept.job, spec=replace(swept.job.spec, plan=plan), work_rows=work_rows)


def _begin(prepared: PreparedSweep, answers: Sequence[Answer]) -> list[_Row]:
    """Each input with its unedited answer, and what its edits take of others'."""
    rows = []
    for swept, (job, results) in zip(prepared.inputs, answers, strict=True):
        places = tuple(_fill(place, job, answers) for place in swept.places)
        arrays = tuple(np.empty((prod(place.sizes), len(prepared.values)), np.float32) for place in places)
        settled = _settle(swept, results)
        rows.append(_Row(settled, job, results, places, prepared.values, prepared.sweep.number, arrays))
    return rows


def _fill(place: Place, job: Job, answers: Sequence[Answer]) -> Place:
    """A place whose changes have what they take of other inputs; RequestError where that has another length."""
    plan = replace(job.spec.plan, interventions=(place.changes,))
    filled = fill_tensors(replace(job, spec=replace(job.spec, plan=plan)), answers)
    return replace(place, changes=filled.spec.plan.resolved_interventions)


def _settle(swept: SweptInput, results: Results) -> SweptInput:
    """An input whose objective has the class, or the target, that its unedited scores decide."""
    objective, scores = swept.objective.objective, swept.scores
    if scores is None:
        return swept
    position = objective.position
    captured = (0,) if position is not None and len(position) == 1 else position  # of one, only that was captured
    values = RowTensor(results[scores].values.float(), scores.info).at(captured).value
    if objective.target == "unedited":
        objective = replace(objective, target=tuple(make_target(values, objective)[0].tolist()))
    else:
        objective = replace(objective, klass=int(values.argmax(1)))
    return replace(swept, objective=replace(swept.objective, objective=objective))


def _estimate_seconds(job: Job) -> float:
    """A low estimate of the seconds of one edited row on one thread, by what was measured at loading."""
    rows = 1 if job.catalog.crosses_rows else CHUNK_ROWS
    return job.spec.plan.cost * job.catalog.costs.estimate_seconds(rows) / rows


def _count_chunk_rows(prepared: PreparedSweep, settings: Settings) -> int:
    """How many rows are queued at a time: more of a quick model, and never more than leave room for other requests."""
    job, room = prepared.inputs[0].job, settings.max_queue_rows // 2
    rows = max(CHUNK_ROWS, int(CHUNK_S / _estimate_seconds(job)))
    of_row = sum(each[:1].nbytes for each in job.inputs.values())
    return max(min(rows, room, CHUNK_BYTES // max(of_row, 1)), 1)


def _cut(rows: Sequence[_Row], size: int) -> Iterator[list[_Edit]]:
    """All edits, so many rows at a time, or a few more jobs than that has room for."""
    chunk: list[_Edit] = []
    for edit in _list_edits(rows, size):
        if chunk and (sum(each.count for each in chunk) + edit.count > size or len(chunk) == CHUNK_JOBS):
            yield chunk
            chunk = []
        chunk.append(edit)
    if chunk:
        yield chunk


def _list_edits(rows: Sequence[_Row], size: int) -> Iterator[_Edit]:
    for row in rows:
        for number, place in enumerate(row.places):
            total = prod(place.sizes)
            for value in range(len(row.values)):
                for start in range(0, total, size):
                    yield _Edit(row, number, value, start, min(size, total - start))


def _collect(prepared: PreparedSweep, rows: Sequence[_Row]) -> Features:
    """The features of all inputs; those that others take of have their unedited metric everywhere."""
    edited = next(row for row in rows if row.places)
    parts = [_collect_row(prepared, row, edited, swept) for row, swept in zip(rows, prepared.inputs, strict=True)]
    effects = tuple(_find_effects(part, prepared.sweep.top) for part in parts) if prepared.sweep.top else ()
    return replace(join_inputs(parts), top_effects=effects)


def _collect_row(prepared: PreparedSweep, row: _Row, edited: _Row, swept: SweptInput) -> Features:
    sweep, kind = prepared.sweep, row.swept.objective.objective.kind
    features = collect_features(row.job, row.results)
    metric = features.arrays[METRIC]
    places = row.places or edited.places
    arrays = row.arrays or [np.full((prod(place.sizes), len(prepared.values)), metric) for place in places]
    klass = row.swept.objective.objective.klass
    classes = (klass,) if isinstance(klass, int) else None
    labels = name_classes(row.job.labels, classes) if classes is not None else None
    shared: dict[str, Any] = {"layout": None, "metric": kind, "classes": classes, "labels": labels}
    digest = _digest("metric", row.job.fingerprints[METRIC], fingerprint.digest_changes([swept.objective]))
    receipts = {METRIC: replace(features.receipts[METRIC], **shared, axes=(), fingerprint=digest)}
    made_by = f"sweep {list(sweep.axes)} {list(sweep.values)}"
    axes = (*sweep.axes, *(["value"] if sweep.values else []))
    for place in swept.places or places:
        made = _digest(made_by, digest, fingerprint.digest_changes(place.changes))
        receipts[place.key] = replace(_make_receipt(row.job, place, made), **shared, axes=axes)
    shapes = [(1, *place.sizes, *([len(sweep.values)] if sweep.values else [])) for place in places]
    return replace(
        features,
        fingerprint=fingerprint.digest_reply(each.fingerprint for each in receipts.values()),
        arrays={METRIC: metric}
        | {place.key: array.reshape(shape) for place, array, shape in zip(places, arrays, shapes, strict=True)},
        receipts=receipts,
    )


def _make_receipt(job: Job, place: Place, digest: str) -> Receipt:
    """Where a place is; what is there is not in the reply."""
    tap = place.changes[0]
    result = Result(place.key, Capture(tap.point, tap.info, Reduction()), job.catalog.layers[tap.point.layer].type)
    receipt = make_receipt(replace(job, fingerprints={place.key: digest}), result)
    return replace(receipt, row_axis=0, entries_per_row=1, row_order="")


def _digest(made_by: str, result: str, changes: str | None) -> str:
    return fingerprint.digest_explanation(made_by, [result, changes or ""])


def _find_effects(features: Features, count: int) -> tuple[TopEffect, ...]:
    """An input's largest effects in either direction, the largest first; what is not finite is none."""
    (metric,) = features.arrays[METRIC]
    keys = [key for key in features.arrays if key != METRIC]
    effects = [features.arrays[key].ravel().astype(np.float64) - metric for key in keys]
    sizes = [len(each) for each in effects]
    flat = np.nan_to_num(np.concatenate(effects), nan=0.0, posinf=0.0, neginf=0.0)
    best = np.argsort(-np.abs(flat), kind="stable")[:count]
    starts = np.cumsum([0, *sizes[:-1]])
    found = []
    for position in best.tolist():
        place = int(np.searchsorted(starts, position, "right")) - 1
        index = np.unravel_index(position - int(starts[place]), features.arrays[keys[place]].shape[1:])
        found.append(TopEffect(keys[place], tuple(map(int, index)), float(flat[position])))
    return tuple(found)
