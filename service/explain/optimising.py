"""Runs an optimisation: a forward and backward of all inputs, a step of each on the host, and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from layertap.models.errors import Fault, OtherForwardError, RequestError, SelectorError
from layertap.models.explanations.ascent import Ascent
from layertap.models.inputs.preprocess import restore_pixels
from layertap.models.plan.plan import Capture, ResolvedObjective, Result, ResultSize
from layertap.models.plan.requested import InputOptions, Objective, Optimisation, Reduction
from layertap.models.plan.selectors import make_selector
from layertap.models.points import Point
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
NUMBER_BYTES = 6 * 4  # bytes for each number of the rows: start, value, two moments, what is sent, gradient
SMALLER = "fewer 'steps' or inputs"


@dataclass(eq=False)
class PreparedOptimisation:
    """A planned optimisation and its progress. ``jobs``: for each input the gradient, and the objective's value.

    ``name``: of the model's input; ``spec``: how pixels become it, if that is known. ``found``: the features of the
    first gradients; ``values``: the objective at each step, input by input.
    """

    request: ExtractRequest
    name: str
    spec: PreprocessSpec | None
    jobs: list[Job]
    ascent: Ascent
    work: PlannedWork
    found: list[Features] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)

    def make_jobs(self) -> list[Job]:
        """The jobs of the next step."""
        return [self._make_job(*each) for each in zip(self.jobs, self.ascent.roll_rows(), strict=True)]

    def _make_job(self, job: Job, row: Tensor) -> Job:
        """A planned job at another row, in which a detector may find another number of boxes."""
        make_again, objective = job.plan_again, _get_objective(job)

        async def plan_again(other: OtherForwardError) -> Job:
            if make_again is None:
                raise other
            again = await make_again(other)
            resolved = replace(_get_objective(again), objective=objective.objective)  # with the first row's class
            return self._make_job(replace(_measure(again, resolved), work_rows=job.work_rows), row)

        follows = make_again is not None and not job.prepared.catalog.sizes_known
        inputs, again = {**job.inputs, self.name: row}, plan_again if follows else None
        return replace(job, inputs=inputs, joined=JoinedRows(1), plan_again=again)

    def advance(self, answers: Sequence[Answer]) -> list[Job]:
        """Keep a step's results and change the inputs; returns the jobs of the next step, none after the last."""
        if not self.found:
            self.found = [collect_features(job.with_plan(results=job.plan.results[:1]), got) for job, got in answers]
            self.jobs = [_keep_class(*each) for each in zip(self.jobs, self.found, strict=True)]
        results = [[got[result.capture].values for result in job.plan.results] for job, got in answers]
        self.values.append([float(value[0]) for _, value in results])
        if self.work.done == self.work.rows:
            return []
        self.ascent.move([torch.tensor(gradient) for gradient, _ in results])
        return self.make_jobs()

    def collect(self) -> Features:
        """The features of all inputs."""
        rows, parts = self.ascent.list_rows(), []
        for found, row, curve in zip(self.found, rows, zip(*self.values, strict=True), strict=True):
            digest = fingerprint.digest_explanation(f"optimise {self.request.optimisation}", [found.fingerprint])
            receipt = replace(found.receipts[GRADIENT], site="input", fingerprint=digest, space="")
            receipts = {INPUT: receipt, OBJECTIVE: replace(receipt, layout=None, axes=("step",))}
            arrays = {INPUT: row.numpy(), OBJECTIVE: np.array([curve], np.float32)}
            parts.append(replace(found, fingerprint=digest, arrays=arrays, receipts=receipts))
        spec = self.spec if self.request.reply.format.is_picture else None
        return replace(join_inputs(parts), pixels=restore_pixels(rows[0][0], spec).numpy() if spec else None)


async def prepare(engine: Engine, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> PreparedOptimisation:
    """Check and plan a request's optimisation; no forward runs, except to survey a new shape.

    RequestError, TooLargeError, QueueTooLongError if it can't be done in time, and what ``Engine.dry_run`` raises.
    """
    asked = request.optimisation
    if asked is None:
        raise ValueError("the request asks for no optimisation")
    every = [request.for_input(index) for index, _ in sent.items]
    if any(each.objective is not None and each.objective.over is not None for each in every):
        raise RequestError.from_faults(
            [Fault("each input has an objective of its own", "leave 'over' out", "/objective")]
        )
    if any(change.operation.source is not None for each in every for change in each.interventions):
        raise SelectorError("the input that 'from' names would change with each step", hint="send its 'tensor' instead")
    handle = await engine.get_handle(request.model, ticket)
    sent = split_batch(sent, handle.model.model_inputs, engine.settings)
    steps, inputs = asked.steps + 1, len(sent.items)  # the last one measures only
    check_changed_inputs(inputs * steps, inputs, engine.settings, SMALLER)
    model = find_model(handle, sent)
    if needs_functions(request):
        await engine.planner.survey(handle, model.shapes, ticket.deadline, functions=True)
    name, point, axes, spec = _find_input(asked, model)
    if request.reply.format.is_picture and (spec is None or inputs > 1):
        detail = "a PNG is of one input, of a model that is configured with mean and std"
        raise NotAcceptableError(detail, hint="send one picture, or ask for JSON, npz or safetensors")
    wanted = replace(
        request,
        selectors=(make_selector(replace(point, site="grad_input"), GRADIENT),),
        objective=request.objective or Objective(),
        input_options={index: request.input_options.get(index, InputOptions()) for index, _ in sent.items},
        reply=ReplyOptions(),
    )
    jobs = await engine.dry_run(wanted, sent, ticket, tuple)
    ticket.timings.facts.rows = 0  # rows are counted when they are answered

    def begin() -> PreparedOptimisation:
        count = len(jobs) * steps
        starts = [normalize_rows(job.inputs, model.model_inputs)[name] for job in jobs]
        sizes = ((INPUT, sum(row.numel() for row in starts)), (OBJECTIVE, count))
        check_sizes([ResultSize(key, "float32", each, 4 * each) for key, each in sizes], len(jobs), request.reply)
        rows = 1 if jobs[0].prepared.catalog.crosses_rows else len(jobs)  # of a forward
        costs = [job.plan.cost * job.prepared.catalog.graph_costs.estimate_seconds(rows) / rows for job in jobs]
        work = PlannedWork(engine.admission, handle, count, steps * sum(costs), SMALLER)
        work.check(ticket.deadline)
        ascent = Ascent(starts, asked, axes, spec if asked.pixels else None)
        measured = [replace(_measure(job, _get_objective(job)), work_rows=count) for job in jobs]
        return PreparedOptimisation(request, name, spec, measured, ascent, work)

    return await engine.run_in_thread(begin, ticket.deadline)


async def run(engine: Engine, prepared: PreparedOptimisation, ticket: Ticket, on_progress: OnProgress) -> Features:
    """The changed inputs, in the model's scale, and the objective at each step, float32 (inputs, steps + 1).

    Raises as ``Engine.extract``.
    """
    request, work = prepared.request, prepared.work
    before = engine.begin(request, SentInputs(), ticket)
    ticket.reserve_bytes(NUMBER_BYTES * sum(each.numel() for job in prepared.jobs for each in job.inputs.values()))
    with work.count():
        jobs = await engine.run_in_thread(prepared.make_jobs, ticket.deadline)
        while jobs:
            await work.wait_for_turn(ticket.deadline)
            answers = await engine.run_jobs(jobs, work.handle, ticket)
            work.done += len(jobs)
            on_progress(work.done, work.rows)
            jobs = await engine.run_in_thread(partial(prepared.advance, answers), ticket.deadline)
    return await engine.finish(await engine.run_in_thread(prepared.collect, ticket.deadline), request, ticket, before)


def _find_input(asked: Optimisation, model: ModelInfo) -> tuple[str, Point, tuple[int, ...], PreprocessSpec | None]:
    """The input to change: its name, its point, its height and width, and how pixels become it; SelectorError.

    Without axes if it has no such two; without a specification if none is known.
    """
    names = [each.name for each in model.inputs if each.dtype.startswith(("float", "bfloat"))]
    taps = [tap for tap in list_inputs(model) if tap.info.is_floating]
    if model.text is not None or not len(names) == len(taps) == 1:
        hint = "ask POST /extract for gradients of a layer that reads them"
        raise SelectorError("ids of texts, and several inputs of floats, can't be optimised", hint=hint)
    if not taps[0].info.is_by_row:
        hint = "ask POST /extract for '.:grad_input', and take the steps yourself"
        raise SelectorError("the first axis of this model's input is not the batch", hint=hint)
    spec = model.model_inputs.preprocess
    spec = spec if isinstance(spec, PreprocessSpec) and not model.model_inputs.takes_plain else None
    info = taps[0].info
    axes = (info.axis("H"), info.axis("W")) if info.has_axis("H") and info.has_axis("W") else ()
    if (asked.jitter or asked.total_variation) and not axes:
        raise SelectorError("'jitter' and 'total_variation' are for pictures", hint="leave them out")
    if asked.pixels and spec is None:
        raise SelectorError("nothing says how pixels become this model's input", hint="leave 'pixels' out")
    return names[0], taps[0].point, axes, spec


def _get_objective(job: Job) -> ResolvedObjective:
    if job.plan.objective is None:
        raise ValueError("the job differentiates nothing")
    return job.plan.objective


def _measure(job: Job, objective: ResolvedObjective) -> Job:
    """The job with an objective, and with the objective's value beside the gradient."""
    capture = Capture(objective.point, objective.info, Reduction(metric=objective.objective))
    result = Result(OBJECTIVE, capture, job.prepared.catalog.layers[objective.point.layer].type)
    return job.with_plan(results=(job.plan.results[0], result), objective=objective)


def _keep_class(job: Job, found: Features) -> Job:
    """The job with the class that its first gradient was of, even if a later one scores higher."""
    objective, classes = _get_objective(job), found.receipts[GRADIENT].classes
    if classes is None:
        return job
    return _measure(job, replace(objective, objective=replace(objective.objective, klass=classes[0])))
