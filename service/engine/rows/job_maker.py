"""The jobs of rows that are decoded: one of all of them, or one for each input where these are not alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from layertap.models.errors import Fault, InputError, LayertapError, RequestError, TooLargeError
from layertap.service.engine.batch import Job
from layertap.service.engine.collect.joined_inputs import ANOTHER_SHAPE, check_entries, find_others, list_entries
from layertap.service.engine.deadline import RunInThread
from layertap.service.engine.plan.planner import PlannedRequest, Planner
from layertap.service.engine.rows.decoder import DecodedInputs, DecodedRows, join_decoded
from layertap.service.engine.rows.job import make_job
from layertap.service.engine.rows.predicted_rows import find_preprocessed_by
from layertap.service.engine.rows.sources import prepare_sources

HINT = "send one shape a request"


class JobMaker:
    """Makes jobs; used on the event loop."""

    def __init__(self, planner: Planner, run_in_thread: RunInThread, max_results: int) -> None:
        self._planner = planner
        self._run_in_thread = run_in_thread
        self._max_results = max_results

    async def make_jobs(self, planned: PlannedRequest, decoded: DecodedInputs, deadline: float) -> list[Job]:
        """The jobs of decoded rows, planned anew where these are not what was expected; RequestError, TooLargeError.

        Rows of one shape are one job. Of several, or with options of their own, each input is one, and those of one
        shape meet in a batch: each is planned, numbered and answered as it would be alone.
        """
        parts, faults = decoded.parts, decoded.faults
        if len(parts) > 1 or planned.request.input_options:
            plans = await self._plan_inputs(planned, parts, deadline)
            good = [plan for plan in plans if isinstance(plan, PlannedRequest)]
            if len(good) == len(parts):
                make = partial(self._make_input_jobs, good, parts, faults, deadline)
                jobs = await self._run_in_thread(make, deadline)
                others = set() if planned.request.reply.by_input else find_others(jobs)
                if not others:
                    return jobs
                plans = [
                    InputError(ANOTHER_SHAPE) if part.input_index in others else plan
                    for part, plan in zip(parts, plans, strict=True)
                ]
            left = await self._run_in_thread(partial(_leave_out, planned, decoded, plans), deadline)
            return await self.make_jobs(planned, left, deadline)
        (part,) = parts
        final = await self._planner.replan(planned, part.rows, part.items, deadline)
        return [make_job(final, part.rows, faults, deadline=deadline)]

    async def _plan_inputs(
        self, planned: PlannedRequest, parts: Sequence[DecodedRows], deadline: float
    ) -> list[PlannedRequest | LayertapError]:
        """A plan for each input, or why the model takes none of its shape where such inputs are to be left out.

        One after another: a shape that is not known takes the model's time.
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
                of_input = replace(planned, input_index=part.input_index)
                plans[keys[-1]] = await self._planner.replan(of_input, part.rows, part.items, deadline)
            except (RequestError, TooLargeError) as error:
                skips = planned.request.on_error == "skip" and isinstance(error, (InputError, TooLargeError))
                if not skips:
                    raise error.of_input(part.input_index) from None
                plans[keys[-1]] = error
        return [plans[key] for key in keys]

    def _make_input_jobs(
        self,
        plans: Sequence[PlannedRequest],
        parts: Sequence[DecodedRows],
        faults: tuple[Fault, ...],
        deadline: float,
    ) -> list[Job]:
        request, jobs = plans[0].request, []
        for number, (plan, part) in enumerate(zip(plans, parts, strict=True)):
            try:
                _check(plan)
                job = make_job(
                    plan, part.rows, faults, deadline=deadline, first_row=number, input_index=part.input_index
                )
            except (RequestError, TooLargeError) as error:
                raise error.of_input(part.input_index) from None
            jobs.append(job)
        check_entries(list_entries(jobs), len(jobs), request.reply, self._max_results)
        return prepare_sources(jobs)


def _leave_out(
    planned: PlannedRequest, decoded: DecodedInputs, plans: Sequence[PlannedRequest | LayertapError]
) -> DecodedInputs:
    """What is left without the inputs that the model does not take; RequestError where that is none."""
    left, faults = [], list(decoded.faults)
    for part, plan in zip(decoded.parts, plans, strict=True):
        if isinstance(plan, LayertapError):
            faults.append(plan.to_fault(f"/inputs/{part.input_index}", part.input_index))
        else:
            left.append(part)
    faults.sort(key=lambda fault: fault.input or 0)
    if not left:
        raise RequestError.from_faults(faults)
    parts = left if planned.request.input_options else join_decoded(left, planned.inputs)
    return DecodedInputs(parts, tuple(faults))


def _check(planned: PlannedRequest) -> None:
    """RequestError where an input can't be answered beside those of other shapes."""
    request, catalog = planned.request, planned.catalog
    if request.isolated and catalog.batches and not catalog.rowwise:
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
