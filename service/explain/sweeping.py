"""Runs a sweep: the unedited rows, then the edited ones, one edit per row, a few at a time, or a gradient instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from layertap.models.catalog.catalog import BACKWARD_FACTOR
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.errors import Fault, RequestError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.labels import name_classes
from layertap.models.plan.objectives import make_target
from layertap.models.plan.operations import estimate_effects
from layertap.models.plan.plan import Capture, ResolvedIntervention, Result, ResultSize
from layertap.models.plan.planner import resolve_objective
from layertap.models.plan.requested import InputOptions, Objective, Reduction, Sweep
from layertap.models.plan.selectors import make_selector
from layertap.models.points import Point
from layertap.models.run import fingerprint
from layertap.models.run.batch_slices import JoinedRows
from layertap.service.engine.admit.admission import AdmissionControl, Ticket
from layertap.service.engine.admit.planned_work import CHUNK_ROWS, OnProgress, PlannedWork, check_changed_inputs
from layertap.service.engine.batch import Job, Results
from layertap.service.engine.collect.joined_inputs import join_inputs
from layertap.service.engine.collect.results import collect_features, make_receipt
from layertap.service.engine.engine import Answer, Engine
from layertap.service.engine.execute.item_rows import predict_rows
from layertap.service.engine.limits import check_count, check_results, check_sizes
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.prepare.planner import find_model, needs_functions
from layertap.service.engine.prepare.sources import count_taken_bytes, fill_tensors, prepare_sources
from layertap.service.engine.request import ExtractRequest, ReplyOptions, SentInputs
from layertap.service.errors import NotAcceptableError
from layertap.service.explain.sweep_places import METRIC, Place, PlaceFinder, SweptInput, freeze_noise
from layertap.service.features import Array, Features, Receipt, TopEffect
from layertap.service.inputs.items import ArraysItem
from layertap.service.settings import Settings

CHUNK_S = 0.25  # duration of the rows that are queued together, unless CHUNK_ROWS take longer
CHUNK_BYTES = 2**26  # of the inputs of rows that are queued together
CHUNK_JOBS = 64  # that are queued together, each with its own place
SMALLER = "fewer 'layers', or only some 'channels', 'heads' or 'tokens' of them, or fewer 'values' or inputs"


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep with decoded rows and known places, before its forwards."""

    request: ExtractRequest
    sent: SentInputs
    sweep: Sweep
    handle: ModelHandle
    inputs: Sequence[SweptInput]
    work: PlannedWork


async def prepare(engine: Engine, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> PreparedSweep:
    """Check and plan a request's sweep; no forward runs, except to survey a new shape.

    RequestError, TooLargeError, QueueTooLongError if it can't be done in time, and what ``Engine.dry_run`` raises.
    """
    sweep = request.sweep
    if sweep is None:
        raise ValueError("the request asks for no sweep")
    if request.reply.format.is_picture:
        raise NotAcceptableError("a sweep is not drawn", hint="ask for JSON, npz or safetensors")
    handle = await engine.get_handle(request.model, ticket)
    sent = split_batch(await engine.fetch(request, sent, ticket), handle.model.model_inputs, engine.settings)
    _check_source(sent, sweep)
    if needs_functions(request):
        await engine.planner.survey(handle, find_model(handle, sent).shapes, ticket.deadline, functions=True)
    asked = await engine.run_in_thread(partial(_make_unedited, request, sent, handle), ticket.deadline)
    jobs = await engine.dry_run(asked, sent, ticket, tuple)
    ticket.timings.facts.rows = 0  # rows are counted when they are answered
    finder = PlaceFinder(sweep, handle.model.text, engine.planner.list_projections(handle))
    find = partial(_describe_inputs, request, finder, jobs, engine.settings)
    inputs = await engine.run_in_thread(find, ticket.deadline)
    work = _plan_work(engine.admission, request, sweep, handle, inputs)
    work.check(ticket.deadline)
    edited = await engine.run_in_thread(partial(_list_edited, inputs), ticket.deadline)
    ticket.reserve_bytes(sum(map(count_taken_bytes, edited)))
    inputs = await engine.run_in_thread(partial(_prepare_sources, inputs, edited), ticket.deadline)
    return PreparedSweep(request, sent, sweep, handle, inputs, work)


async def run(engine: Engine, prepared: PreparedSweep, ticket: Ticket, on_progress: OnProgress) -> Features:
    """The metric of each edit by its place's key, float32 (inputs, *axes), and of the unedited inputs.

    Raises as ``Engine.extract``.
    """
    request = prepared.request
    before = engine.begin(request, prepared.sent, ticket)
    features = await _run(engine, prepared, ticket, on_progress)
    return await engine.finish(features, request, ticket, before)


async def _run(engine: Engine, prepared: PreparedSweep, ticket: Ticket, on_progress: OnProgress) -> Features:
    work, handle = prepared.work, prepared.handle
    with work.count():
        answers = await engine.run_jobs([_make_base(each, work.rows) for each in prepared.inputs], handle, ticket)
        begin = partial(_begin, prepared, answers)
        rows = await engine.run_in_thread(begin, ticket.deadline)
        if prepared.sweep.attribution:
            await _attribute(engine, prepared, rows, ticket)
            on_progress(work.rows, work.rows)
            return await engine.run_in_thread(partial(_collect, prepared, rows), ticket.deadline)
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
class SweptRow:
    """An input with its unedited results: its job, with the tensors for its changes, and arrays for the metrics."""

    swept: SweptInput
    job: Job
    results: Results
    places: tuple[Place, ...]
    sweep: Sweep
    arrays: tuple[Array, ...]

    def list_changes(self, place: int, value: int) -> tuple[ResolvedIntervention, ...]:
        """The changes of a place with one of the values."""
        changes, tried = self.places[place].changes, self.sweep.tried[value]
        if tried is not None:
            number: dict[str, Any] = {self.sweep.number: tried}
            changes = tuple(replace(each, operation=replace(each.operation, **number)) for each in changes)
        return freeze_noise(changes, self.job.first_row)


@dataclass(frozen=True)
class Edit:
    """Edits of one place with one value: ``count`` entries from ``start`` on, each on a row of its own."""

    row: SweptRow
    place: int
    value: int
    start: int
    count: int

    def make_job(self) -> Job:
        """The job of these rows."""
        row, job = self.row, self.row.job
        fixed = freeze_noise(job.plan.resolved_interventions, job.first_row)
        changes = row.list_changes(self.place, self.value)
        plan = replace(job.plan, results=(row.swept.metric,), interventions=(fixed, changes), extra=frozenset())
        prepared = replace(
            job.prepared,
            spec=replace(job.prepared.spec, plan=plan),
            row_bytes=job.prepared.row_bytes + plan.temporary_bytes,
            isolated=job.prepared.isolated or plan.isolated,
            unsplittable=job.prepared.unsplittable or plan.unsplittable,
        )
        return replace(
            job,
            prepared=prepared,
            inputs={name: each.expand(self.count, *each.shape[1:]) for name, each in job.inputs.items()},
            rows=self.count,
            first_row=self.start,
            joined=JoinedRows(self.count),
        )

    def keep(self, results: Results) -> None:
        """Store the metrics of these rows."""
        array = self.row.arrays[self.place]
        measured = results[self.row.swept.metric.capture].values
        array[self.start : self.start + self.count, self.value] = measured


async def _attribute(engine: Engine, prepared: PreparedSweep, rows: Sequence[SweptRow], ticket: Ticket) -> None:
    """Estimate the metric of all edits by values and gradients of the unedited rows, some places at a time."""
    request = prepared.request
    wanted = replace(
        request,
        objective=request.objective or Objective(),
        sweep=None,
        input_options={index: request.input_options.get(index, InputOptions()) for index, _ in prepared.sent.items},
        on_error="fail",
        reply=ReplyOptions(),
    )
    count = max(len(row.places) for row in rows)
    widest = max(len(place.changes) for row in rows for place in row.places)
    step = max(1, engine.settings.max_results // (2 * widest))  # a value and a gradient of each change
    for start in range(0, count, step):
        numbers = range(start, min(start + step, count))
        changes = [each for row in rows for place in row.places[start : start + step] for each in place.changes]
        points = dict.fromkeys(point for each in changes for point in (each.point, each.point.gradient))
        selectors = tuple(make_selector(point, point.text) for point in points)
        with ticket.return_bytes():
            parts = await engine.extract_parts(replace(wanted, selectors=selectors), prepared.sent, ticket)
            for row, part in zip(rows, parts, strict=True):
                for number in numbers[: len(row.places) - start]:
                    await engine.run_in_thread(partial(_estimate, row, number, part.arrays), ticket.deadline)


def _estimate(row: SweptRow, number: int, found: Mapping[str, Array]) -> None:
    """Store the estimated metrics of a place's edits in a row."""
    (metric,) = row.results[row.job.plan.results[0].capture].values

    def read(change: ResolvedIntervention, point: Point) -> RowTensor:
        tensor = RowTensor.from_hook(torch.tensor(found[point.text]), change.info, row.job.token_mask)
        return next(tensor.strip()) if tensor.is_padded else tensor

    tensors = [(read(each, each.point), read(each, each.point.gradient)) for each in row.places[number].changes]
    for value in range(len(row.sweep.tried)):
        changes = row.list_changes(number, value)
        effects = [estimate_effects(*each, change.operation) for each, change in zip(tensors, changes, strict=True)]
        row.arrays[number][:, value] = metric + torch.stack(effects).sum(0).flatten().numpy()


def _make_jobs(chunk: Sequence[Edit]) -> list[Job]:
    return [edit.make_job() for edit in chunk]


def split_batch(sent: SentInputs, inputs: ModelInputs, settings: Settings) -> SentInputs:
    """The inputs with one item for each row if its body is a batch in one array; TooLargeError."""
    (_, item), *others = sent.items
    if others or not isinstance(item, ArraysItem) or not item.may_batch:
        return sent
    rows = predict_rows([item], inputs).count
    check_count(rows, settings)
    if rows == 1 or any(len(array) != rows for array in item.arrays.values()):
        return sent
    return replace(
        sent,
        items=tuple(
            (row, replace(item, arrays={name: array[row] for name, array in item.arrays.items()}, may_batch=False))
            for row in range(rows)
        ),
    )


def _check_source(sent: SentInputs, sweep: Sweep) -> None:
    """RequestError if the source of the edits is not an input, or no other input is left to edit."""
    inputs = [index for index, _ in sent.items]
    source = sweep.places[0].operation.source
    if source is not None and (source.input not in inputs or len(inputs) == 1):
        hint = "name one of the inputs, counted from 0, and send those that are edited beside it"
        raise RequestError.from_faults([Fault(f"'from' names input {source.input}", hint, "/from/input")])


def _make_unedited(request: ExtractRequest, sent: SentInputs, handle: ModelHandle) -> ExtractRequest:
    """A request for the unedited metric of each input; RequestError if the model has no such objective."""
    objective = request.for_input(sent.items[0][0]).objective or Objective()
    try:
        resolved = resolve_objective(objective, find_model(handle, sent).catalog)
    except RequestError as error:
        raise RequestError.from_faults([error.to_fault("/objective")]) from None
    metric = replace(make_selector(resolved.point, METRIC), reduction=Reduction(metric=resolved.objective))
    options = {
        index: replace(request.input_options.get(index, InputOptions()), objective=None) for index, _ in sent.items
    }
    return replace(
        request,
        selectors=(metric,),
        objective=None,
        input_options=options,
        reply=ReplyOptions(),
    )


def _describe_inputs(
    request: ExtractRequest, finder: PlaceFinder, jobs: Sequence[Job], settings: Settings
) -> list[SweptInput]:
    """The edits of each input; RequestError, TooLargeError."""
    inputs = [finder.describe(job, request.for_input(job.input_index or 0).objective or Objective()) for job in jobs]
    check_results(1 + max(len(each.places) for each in inputs), settings.max_results)
    return inputs


def _plan_work(
    control: AdmissionControl, request: ExtractRequest, sweep: Sweep, handle: ModelHandle, inputs: Sequence[SweptInput]
) -> PlannedWork:
    """The planned work of all edits; TooLargeError if it, or the reply, exceeds a limit."""
    counts = [each.count(sweep) for each in inputs]
    count, numbers = sum(counts), sum(counts) + len(inputs)
    check_sizes([ResultSize(METRIC, "float32", numbers, 4 * numbers)], len(inputs), request.reply)
    if sweep.attribution:  # a forward of each, and one with a backward
        count = sum(map(bool, counts))
        return PlannedWork(control, handle, count, BACKWARD_FACTOR * count * _estimate_seconds(inputs[0].job), SMALLER)
    check_changed_inputs(count, sum(map(bool, counts)), control.settings, f"try {SMALLER}")
    seconds = sum(each * _estimate_seconds(swept.job) for each, swept in zip(counts, inputs, strict=True))
    return PlannedWork(control, handle, count, seconds, SMALLER)


def _prepare_sources(inputs: Sequence[SweptInput], edited: Sequence[Job]) -> list[SweptInput]:
    """The inputs with captures for the edits of others, and with fingerprints that include their sources."""
    prepared = prepare_sources(edited)
    return [
        replace(
            each,
            job=each.job.with_plan(extra=job.plan.extra),
            fingerprint=job.prepared.fingerprints[METRIC],
        )
        for each, job in zip(inputs, prepared, strict=True)
    ]


def _list_edited(inputs: Sequence[SweptInput]) -> list[Job]:
    """Each input's job with all edits at once: never run, only used to find what they take of other inputs."""
    changes = [tuple(place.changes for place in each.places) for each in inputs]
    return [
        each.job.with_plan(interventions=(*each.job.plan.interventions, *edits))
        for each, edits in zip(inputs, changes, strict=True)
    ]


def _make_base(swept: SweptInput, work_rows: int) -> Job:
    """The job of an unedited input, with the scores that determine its objective's class or target."""
    scores = frozenset[Capture]() if swept.scores is None else {swept.scores}
    base = swept.job.with_plan(results=(swept.metric,), extra=swept.job.plan.extra | scores)
    return replace(base, work_rows=work_rows)


def _begin(prepared: PreparedSweep, answers: Sequence[Answer]) -> list[SweptRow]:
    """Each input with its unedited results and the tensors that its edits take of others."""
    rows = []
    for swept, (job, results) in zip(prepared.inputs, answers, strict=True):
        places = tuple(_fill(place, job, answers) for place in swept.places)
        arrays = tuple(np.empty((prod(place.sizes), len(prepared.sweep.tried)), np.float32) for place in places)
        rows.append(SweptRow(_settle(swept, results), job, results, places, prepared.sweep, arrays))
    return rows


def _fill(place: Place, job: Job, answers: Sequence[Answer]) -> Place:
    """A place with the tensors that its changes take of other inputs; RequestError if their lengths differ."""
    filled = fill_tensors(job.with_plan(interventions=(place.changes,)), answers)
    return replace(place, changes=filled.plan.resolved_interventions)


def _settle(swept: SweptInput, results: Results) -> SweptInput:
    """Fix the objective's class or target from the unedited scores."""
    objective, scores = swept.objective.objective, swept.scores
    if scores is None:
        return swept
    position = objective.position
    captured = (0,) if position is not None and len(position) == 1 else position  # a single token is captured alone
    values = RowTensor(torch.tensor(results[scores].values, dtype=torch.float32), scores.info).at(captured).value
    if objective.target == "unedited":
        objective = replace(objective, target=tuple(make_target(values, objective)[0].tolist()))
    else:
        objective = replace(objective, klass=int(values.argmax(1)))
    return replace(swept, objective=replace(swept.objective, objective=objective))


def _estimate_seconds(job: Job) -> float:
    """A low estimate of the seconds of one edited row on one thread, by the load-time measurement."""
    rows = 1 if job.prepared.catalog.crosses_rows else CHUNK_ROWS
    return job.plan.cost * job.prepared.catalog.costs.estimate_seconds(rows) / rows


def _count_chunk_rows(prepared: PreparedSweep, settings: Settings) -> int:
    """The number of rows to queue at a time: more for a fast model, at most half of the queue."""
    job, room = prepared.inputs[0].job, settings.max_queue_rows // 2
    rows = max(CHUNK_ROWS, int(CHUNK_S / max(_estimate_seconds(job), 1e-9)))  # a metric may take no time
    of_row = sum(each[:1].nbytes for each in job.inputs.values())
    return max(min(rows, room, CHUNK_BYTES // max(of_row, 1)), 1)


def _cut(rows: Sequence[SweptRow], size: int) -> Iterator[list[Edit]]:
    """All edits in chunks of at most ``size`` rows and ``CHUNK_JOBS`` jobs."""
    chunk: list[Edit] = []
    for edit in _list_edits(rows, size):
        if chunk and (sum(each.count for each in chunk) + edit.count > size or len(chunk) == CHUNK_JOBS):
            yield chunk
            chunk = []
        chunk.append(edit)
    if chunk:
        yield chunk


def _list_edits(rows: Sequence[SweptRow], size: int) -> Iterator[Edit]:
    for row in rows:
        for number, place in enumerate(row.places):
            total = prod(place.sizes)
            for value in range(len(row.sweep.tried)):
                for start in range(0, total, size):
                    yield Edit(row, number, value, start, min(size, total - start))


def _collect(prepared: PreparedSweep, rows: Sequence[SweptRow]) -> Features:
    """The features of all inputs; source inputs have their unedited metric everywhere."""
    edited = next(row for row in rows if row.places)
    parts = [_collect_row(prepared, row, edited, swept) for row, swept in zip(rows, prepared.inputs, strict=True)]
    features = join_inputs(parts)
    if not prepared.sweep.top:
        return features
    effects = [_compute_effects(part) for part in parts]
    left_out = sum(int((~np.isfinite(each)).sum()) for part in effects for each in part.values())
    warning = f"top_effects leaves out {left_out} edits whose metric is not finite"
    return replace(
        features,
        top_effects=tuple(
            _find_effects(part, prepared.sweep.top) if row.places else ()
            for row, part in zip(rows, effects, strict=True)
        ),
        warnings=(*features.warnings, *([warning] if left_out else [])),
    )


def _collect_row(prepared: PreparedSweep, row: SweptRow, edited: SweptRow, swept: SweptInput) -> Features:
    sweep, resolved = prepared.sweep, row.swept.objective
    features = collect_features(row.job, row.results)
    metric = features.arrays[METRIC]
    places = row.places or edited.places
    arrays = row.arrays or [np.full((prod(place.sizes), len(sweep.tried)), metric) for place in places]
    kind, klass, layer = resolved.objective.kind, resolved.objective.klass, resolved.point.layer
    classes = (klass,) if isinstance(klass, int) else None
    labels = name_classes(row.job.prepared.labels, classes, layer) if classes is not None else None
    shared: dict[str, Any] = {"layout": None, "metric": kind, "classes": classes, "labels": labels, "space": ""}
    objective = fingerprint.digest_changes([swept.objective])
    digest = _digest("metric", row.job.prepared.fingerprints[METRIC], objective)
    edited_from = _digest("metric", swept.fingerprint, objective)
    receipts = {METRIC: replace(features.receipts[METRIC], **shared, axes=(), fingerprint=digest)}
    made_by = f"{'attribution' if sweep.attribution else 'sweep'} {list(sweep.axes)} {list(sweep.values)}"
    axes = (*sweep.axes, *(["value"] if sweep.values else []))
    for place in swept.places or places:
        made = _digest(made_by, edited_from, place.fingerprint)
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
    """The receipt of a place, whose tensor is not in the reply."""
    tap = place.changes[0]
    result = Result(
        place.key, Capture(tap.point, tap.info, Reduction()), job.prepared.catalog.layers[tap.point.layer].type
    )
    named = replace(job, prepared=replace(job.prepared, fingerprints={place.key: digest}))
    truncated = job.cut if any(job.cut) else None
    return replace(make_receipt(named, result), row_axis=0, entries_per_row=1, row_order="", truncated=truncated)


def _digest(made_by: str, result: str, changes: str | None) -> str:
    return fingerprint.digest_explanation(made_by, [result, changes or ""])


def _compute_effects(features: Features) -> dict[str, Array]:
    """The effects of an input's edits by the place's key, float64 (*axes)."""
    (metric,) = features.arrays[METRIC].astype(np.float64)
    return {key: array[0] - metric for key, array in features.arrays.items() if key != METRIC}


def _find_effects(effects: Mapping[str, Array], count: int) -> tuple[TopEffect, ...]:
    """The largest finite effects in either direction, the largest first."""
    keys, starts = list(effects), np.cumsum([0, *(each.size for each in effects.values())])
    flat = np.concatenate([each.ravel() for each in effects.values()])
    (finite,) = np.isfinite(flat).nonzero()
    best = finite[np.argsort(-np.abs(flat[finite]), kind="stable")[:count]]
    found = []
    for position in best.tolist():
        place = int(np.searchsorted(starts, position, "right")) - 1
        index = np.unravel_index(position - int(starts[place]), effects[keys[place]].shape)
        found.append(TopEffect(keys[place], tuple(map(int, index)), float(flat[position])))
    return tuple(found)
