"""Runs an optimisation: a forward and backward of all inputs, a step of each on the host, and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from layertap.models.errors import SelectorError
from layertap.models.explanations.ascent import Ascent
from layertap.models.inputs.preprocess import find_pixel_range, restore_pixels
from layertap.models.plan.plan import Capture, ResolvedObjective, Result, ResultSize, Tap
from layertap.models.plan.requested import InputOptions, Objective, Optimisation, Reduction
from layertap.models.plan.selectors import make_selector
from layertap.models.run import fingerprint
from layertap.models.run.batch_slices import JoinedRows
from layertap.models.run.model_info import ModelInfo
from layertap.models.spec import PreprocessSpec
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.admit.planned_work import OnProgress, PlannedWork, check_changed_inputs
from layertap.service.engine.batch import Job
from layertap.service.engine.collect.joined_inputs import join_inputs
from layertap.service.engine.collect.results import collect_features
from layertap.service.engine.engine import Answer, Engine
from layertap.service.engine.execute.decode import normalize_rows
from layertap.service.engine.limits import check_sizes
from layertap.service.engine.prepare.planner import find_model, needs_functions
from layertap.service.engine.request import ExtractRequest, ReplyOptions, SentInputs
from layertap.service.errors import NotAcceptableError
from layertap.service.explain.explanation_methods import list_inputs
from layertap.service.explain.sweeping import split_batch
from layertap.service.features import Features

INPUT, OBJECTIVE, GRADIENT = "input", "objective", "gradient"  # the first two are the keys of the reply
COPIES = 6  # of all rows in memory at once: start, value, two moments, what is sent, gradient
SMALLER = "fewer 'steps' or inputs"


@dataclass(frozen=True)
class ChangedInput:
    """The input that changes: its name, its tensor, and how pixels become it, None if that is unknown."""

    name: str
    tap: Tap
    spec: PreprocessSpec | None

    @property
    def axes(self) -> tuple[int, ...]:
        """Its axes of height and width; none if it has not both."""
        layout = self.tap.info.layout or ""
        return (layout.index("H"), layout.index("W")) if {"H", "W"} <= set(layout) else ()


@dataclass(eq=False)
class PreparedOptimisation:
    """A planned optimisation and its progress. ``jobs``: for each input the gradient, and the objective's value.

    ``found``: the features of the first gradients; ``values``: the objective at each step, input by input.
    """

    request: ExtractRequest
    changed: ChangedInput
    jobs: list[Job]
    ascent: Ascent
    work: PlannedWork
    found: list[Features] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)

    def make_jobs(self) -> list[Job]:
        """The jobs of the next step; they are not planned again, which would run the inputs as they were sent."""
        return [
            replace(job, inputs={**job.inputs, self.changed.name: row}, joined=JoinedRows(1), plan_again=None)
            for job, row in zip(self.jobs, self.ascent.make_rows(), strict=True)
        ]

    def advance(self, answers: Sequence[Answer]) -> list[Job]:
        """Keep a step's results and change the inputs; returns the jobs of the next step, none after the last."""
        if not self.found:
            self.found = [collect_features(job.with_plan(results=job.plan.results[:1]), got) for job, got in answers]
            self.jobs = [_keep_class(*each) for each in zip(self.jobs, self.found, strict=True)]
        results = [[got[result.capture].values for result in job.plan.results] for job, got in answers]
        self.values.append([float(value[0]) for _, value in results])
        if len(self.values) == self.work.rows // len(self.jobs):
            return []
        self.ascent.move([torch.tensor(gradient) for gradient, _ in results])
        return self.make_jobs()

    def collect(self) -> Features:
        """The features of all inputs."""
        rows, parts = self.ascent.list_rows(), []
        for job, found, row, curve in zip(self.jobs, self.found, rows, zip(*self.values, strict=True), strict=True):
            receipt, objective = found.receipts[GRADIENT], _get_objective(job)
            digest = fingerprint.digest_explanation(f"optimise {self.request.optimisation}", [receipt.fingerprint])
            receipt = replace(receipt, site="input", fingerprint=digest, space="")
            measured = replace(receipt, layout=None, metric=objective.objective.kind, axes=("step",))
            arrays = {INPUT: row.numpy(), OBJECTIVE: np.array([curve], np.float32)}
            receipts = {INPUT: receipt, OBJECTIVE: measured}
            parts.append(replace(found, fingerprint=digest, arrays=arrays, receipts=receipts))
        is_drawn, spec = self.request.reply.format.is_picture, self.changed.spec
        pixels = restore_pixels(rows[0][0], spec).numpy() if is_drawn and spec is not None else None
        return replace(join_inputs(parts), pixels=pixels)


async def prepare(engine: Engine, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> PreparedOptimisation:
    """Check and plan a request's optimisation; no forward runs, except to survey a new shape.

    RequestError, TooLargeError, QueueTooLongError if it can't be done in time, and what ``Engine.dry_run`` raises.
    """
    asked = request.optimisation
    if asked is None:
        raise ValueError("the request asks for no optimisation")
    handle = await engine.get_handle(request.model, ticket)
    sent = split_batch(sent, handle.model.model_inputs, engine.settings)
    check_changed_inputs(len(sent.items) * (asked.steps + 1), len(sent.items), engine.settings, SMALLER)
    if needs_functions(request):
        await engine.planner.survey(handle, find_model(handle, sent).shapes, ticket.deadline, functions=True)
    changed = _find_input(asked, find_model(handle, sent))
    if request.reply.format.is_picture and (changed.spec is None or len(sent.items) > 1):
        detail = "a PNG is of one input, of a model with a mean and std that can be undone"
        raise NotAcceptableError(detail, hint="send one picture, or ask for JSON, npz or safetensors")
    wanted = replace(
        request,
        selectors=(make_selector(replace(changed.tap.point, site="grad_input"), GRADIENT),),
        objective=request.objective or Objective(),
        input_options={index: request.input_options.get(index, InputOptions()) for index, _ in sent.items},
        reply=ReplyOptions(),
    )
    jobs = await engine.dry_run(wanted, sent, ticket, tuple)
    ticket.timings.facts.rows = 0  # rows are counted when they are answered
    return await engine.run_in_thread(partial(_begin, engine, request, asked, changed, jobs, ticket), ticket.deadline)


async def run(engine: Engine, prepared: PreparedOptimisation, ticket: Ticket, on_progress: OnProgress) -> Features:
    """The changed inputs, in the model's scale, and the objective at each step, float32 (inputs, steps + 1).

    Raises as ``Engine.extract``.
    """
    request, work = prepared.request, prepared.work
    before = engine.begin(request, SentInputs(), ticket)
    ticket.reserve_bytes(COPIES * sum(each.nbytes for job in prepared.jobs for each in job.inputs.values()))
    with work.count():
        jobs = await engine.run_in_thread(prepared.make_jobs, ticket.deadline)
        while jobs:
            await work.wait_for_turn(ticket.deadline)
            answers = await engine.run_jobs(jobs, work.handle, ticket)
            work.done += len(jobs)
            on_progress(work.done, work.rows)
            jobs = await engine.run_in_thread(partial(prepared.advance, answers), ticket.deadline)
    return await engine.finish(await engine.run_in_thread(prepared.collect, ticket.deadline), request, ticket, before)


def _find_input(asked: Optimisation, model: ModelInfo) -> ChangedInput:
    """The input to change; SelectorError if there is not just one, or it has not what is asked for."""
    names = [spec.name for spec in model.inputs if "float" in spec.dtype]
    taps = [tap for tap in list_inputs(model) if tap.info.is_floating]
    if model.text is not None or not len(names) == len(taps) == 1:
        hint = "ask POST /extract for gradients of a layer that reads them"
        raise SelectorError("texts, and several inputs of floats, can't be optimised", hint=hint)
    spec = model.model_inputs.preprocess
    is_known = isinstance(spec, PreprocessSpec) and not model.model_inputs.takes_plain
    changed = ChangedInput(names[0], taps[0], spec if isinstance(spec, PreprocessSpec) and is_known else None)
    if (asked.jitter or asked.total_variation) and not changed.axes:
        raise SelectorError("'jitter' and 'total_variation' are for pictures", hint="leave them out")
    if asked.pixels and changed.spec is None:
        raise SelectorError("nothing says how pixels become this model's input", hint="leave 'pixels' out")
    return changed


def _begin(
    engine: Engine,
    request: ExtractRequest,
    asked: Optimisation,
    changed: ChangedInput,
    jobs: Sequence[Job],
    ticket: Ticket,
) -> PreparedOptimisation:
    handle = ticket.handles[request.model]
    starts = [normalize_rows(job.inputs, handle.model.model_inputs)[changed.name].cpu() for job in jobs]
    numbers, count = sum(row.numel() for row in starts), len(jobs) * (asked.steps + 1)
    sizes = [ResultSize(key, "float32", each, 4 * each) for key, each in ((INPUT, numbers), (OBJECTIVE, count))]
    check_sizes(sizes, len(jobs), request.reply)
    rows = 1 if jobs[0].prepared.catalog.crosses_rows else len(jobs)  # of a forward
    seconds = [job.plan.cost * job.prepared.catalog.graph_costs.estimate_seconds(rows) / rows for job in jobs]
    work = PlannedWork(engine.admission, handle, count, sum(seconds) * (asked.steps + 1), SMALLER)
    work.check(ticket.deadline)
    pixel_range = find_pixel_range(changed.spec) if asked.pixels and changed.spec is not None else None
    ascent = Ascent(starts, asked, changed.axes, pixel_range)
    measured = [replace(_measure(job, _get_objective(job)), work_rows=count) for job in jobs]
    return PreparedOptimisation(request, changed, measured, ascent, work)


def _measure(job: Job, objective: ResolvedObjective) -> Job:
    """The job with an objective, and with the objective's value beside the gradient; SelectorError."""
    info = objective.info
    if info.row_axis != 0 or info.crosses_rows or info.entries_per_row != 1:
        raise SelectorError("the objective is of a tensor without an entry for each input", hint="name another layer")
    capture = Capture(objective.point, info, Reduction(metric=objective.objective))
    result = Result(OBJECTIVE, capture, job.prepared.catalog.layers[objective.point.layer].type)
    return job.with_plan(results=(job.plan.results[0], result), objective=objective)


def _keep_class(job: Job, found: Features) -> Job:
    """The job with the class that its first gradient was of, even if a later one scores higher."""
    objective, classes = _get_objective(job), found.receipts[GRADIENT].classes
    if classes is None:
        return job
    return _measure(job, replace(objective, objective=replace(objective.objective, klass=classes[0])))


def _get_objective(job: Job) -> ResolvedObjective:
    if job.plan.objective is None:
        raise ValueError("a gradient is of an objective")
    return job.plan.objective
