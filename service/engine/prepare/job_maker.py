"""Makes jobs of decoded rows, planned again where they are not as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from layertap.models.catalog.catalog import CallCounts
from layertap.models.errors import InputError, LayertapError, RequestError, TooLargeError
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.batch import Job, UndecodedError
from layertap.service.engine.collect.joined_inputs import check_entries, list_entries
from layertap.service.engine.deadline import RunInThread
from layertap.service.engine.prepare.input_decoder import (
    DecodedRows,
    Faults,
    InputDecoder,
    join_decoded,
    sort_faults,
)
from layertap.service.engine.prepare.planner import PlannedRequest, Planner
from layertap.service.engine.prepare.predicted_rows import find_preprocessed_by
from layertap.service.engine.prepare.preparation import make_job, runs_apart
from layertap.service.engine.prepare.sources import prepare_sources
from layertap.service.engine.rows import Items
from layertap.service.engine.schedule.scheduler import Scheduler

HINT = "send one shape a request"


class JobMaker:
    """Makes jobs of items; for the event loop."""

    def __init__(self, scheduler: Scheduler, planner: Planner, run_in_thread: RunInThread, max_results: int) -> None:
        self._decoder = InputDecoder(scheduler, run_in_thread)
        self._planner = planner
        self._run_in_thread = run_in_thread
        self._max_results = max_results

    async def make_jobs(self, planned: PlannedRequest, items: Items, faults: Faults, ticket: Ticket) -> list[Job]:
        """The jobs of items, replanned if their rows are not as predicted.

        Rows of one shape are one job. If shapes differ, or inputs have their own options, each input is a job, and
        those of one shape may share a batch: each is planned, numbered and answered as if alone. ``faults`` are of
        inputs left out before. RequestError, TooLargeError: no input is good, or one is bad and the request leaves
        none out.
        """
        parts, faults = await self._decoder.decode(planned, items, faults, ticket)
        return await self._make_jobs(planned, parts, faults, ticket)

    async def _make_jobs(
        self, planned: PlannedRequest, parts: Sequence[DecodedRows], faults: Faults, ticket: Ticket
    ) -> list[Job]:
        if len(parts) > 1 or runs_apart(planned.request):
            plans = await self._plan_inputs(planned, parts, ticket.deadline)
            good = [plan for plan in plans if isinstance(plan, PlannedRequest)]
            if len(good) == len(parts):
                make = partial(self._make_input_jobs, good, parts, faults, ticket)
                return await self._run_in_thread(make, ticket.deadline)
            leave_out = partial(_leave_out, planned, parts, plans, faults)
            left, faults = await self._run_in_thread(leave_out, ticket.deadline)
            return await self._make_jobs(planned, left, faults, ticket)
        (part,) = parts
        final = await self._planner.replan(planned, part.rows, part.items, ticket.deadline)
        return [make_job(final, part.rows, faults, ticket, cut=part.cut)]

    async def _make_again(
        self, plan: PlannedRequest, part: DecodedRows, number: int, faults: Faults, ticket: Ticket, counts: CallCounts
    ) -> Job:
        """The job of an input, the ``number``-th of its request, whose forward makes these numbers of calls."""
        plan = await self._planner.replan_calls(plan, part.rows, counts, ticket.deadline)
        return self._make_input_job(plan, part, number, faults, ticket)

    def _make_input_job(
        self, plan: PlannedRequest, part: DecodedRows, number: int, faults: Faults, ticket: Ticket
    ) -> Job:
        index = part.input_index
        job = make_job(plan, part.rows, faults, ticket, first_row=number, input_index=index, cut=part.cut)
        job.plan_again = partial(self._make_again, plan, part, number, faults, ticket)
        return job

    async def _plan_inputs(
        self, planned: PlannedRequest, parts: Sequence[DecodedRows], deadline: float
    ) -> list[PlannedRequest | LayertapError]:
        """A plan for each input, or the error of its shape if the request leaves such inputs out.

        One after another, because surveying a new shape blocks the model.
        """
        plans: dict[object, PlannedRequest | LayertapError] = {}
        keys = []
        for part in parts:
            kind = find_preprocessed_by(part.items, planned.inputs.for_shapes(part.shapes), part.shapes)
            options = planned.request.input_options.get(part.input_index)
            keys.append((part.shapes, kind, options, part.input_index if planned.inputs.text is not None else None))
            if keys[-1] in plans:
                continue
            try:
                of_input = replace(planned, input_index=part.input_index, kept=None)
                plans[keys[-1]] = await self._planner.replan(of_input, part.rows, part.items, deadline)
            except (RequestError, TooLargeError) as error:
                skips = planned.request.on_error == "skip" and isinstance(error, (InputError, TooLargeError))
                if not skips:
                    raise error.of_input(part.input_index) from None
                plans[keys[-1]] = error
        return [plans[key] for key in keys]

    def _make_input_jobs(
        self, plans: Sequence[PlannedRequest], parts: Sequence[DecodedRows], faults: Faults, ticket: Ticket
    ) -> list[Job]:
        request, jobs = plans[0].request, []
        for number, (plan, part) in enumerate(zip(plans, parts, strict=True)):
            try:
                _check(plan)
                job = self._make_input_job(plan, part, number, faults, ticket)
            except (RequestError, TooLargeError) as error:
                raise error.of_input(part.input_index) from None
            jobs.append(job)
        check_entries(list_entries(jobs), len(jobs), request.reply, self._max_results)
        return prepare_sources(jobs)


def refuse_picture(items: Items, error: UndecodedError) -> Items:
    """The items with the refused picture replaced by its error, if it is known which one: the others may be good."""
    refused = 0 if len(items) == 1 else error.row
    return [(index, error.refusal if row == refused else item) for row, (index, item) in enumerate(items)]


def _leave_out(
    planned: PlannedRequest,
    parts: Sequence[DecodedRows],
    plans: Sequence[PlannedRequest | LayertapError],
    before: Faults,
) -> tuple[Sequence[DecodedRows], Faults]:
    """The inputs without those that the model does not take; RequestError if none is left."""
    left, faults = [], []
    for part, plan in zip(parts, plans, strict=True):
        if isinstance(plan, LayertapError):
            faults.append(plan.to_fault(f"/inputs/{part.input_index}", part.input_index))
        else:
            left.append(part)
    every = sort_faults(before, faults)
    if not left:
        raise RequestError.from_faults(every)
    return left if runs_apart(planned.request) else join_decoded(left, planned.inputs), every


def _check(planned: PlannedRequest) -> None:
    """RequestError if an input can't be answered beside inputs of other shapes."""
    request, catalog = planned.request, planned.catalog
    if request.isolated and catalog.batches and catalog.crosses_rows:
        detail = (
            "rows of this model affect each other, 'isolated' makes one batch of them, and these have several shapes, "
            "or want different things"
        )
        raise RequestError(detail, hint=f"{HINT}, or leave 'isolated' out: each then runs alone")
    if request.verify and request.for_input(planned.input_index).interventions:
        detail = "an input with interventions of its own can't be verified"
        raise RequestError(detail, hint="leave 'verify' out, or its interventions")
    if request.probe:
        raise RequestError("these inputs have no probe in common", hint=f"{HINT}, or leave 'probe' out")
