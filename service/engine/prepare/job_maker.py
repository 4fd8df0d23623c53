"""Makes a request's items into jobs: decodes them in the scheduler's slots, then plans them by their rows.

Dry runs, and pictures that their batch decodes, become jobs by the request's first plan.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise

from torch import Tensor

from layertap.models import fingerprint
from layertap.models.capture import verification
from layertap.models.capture.batch_slices import JoinedRows
from layertap.models.catalog.catalog import CallCounts
from layertap.models.compiled.compiled_plan import CompiledPlan, find_compiled_plan
from layertap.models.errors import Fault, InputError, LayertapError, RequestError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs, TextSpec
from layertap.models.inputs.preprocess import compute_output_size
from layertap.models.loaded_model import check_rows_fit
from layertap.models.selection.plan import Plan
from layertap.models.selection.poolings import POOLINGS
from layertap.models.spec import Shapes
from layertap.service.engine.batch import ForwardSpec, Job, UndecodedError
from layertap.service.engine.collect.joined_inputs import check_entries, list_entries
from layertap.service.engine.deadline import RunInThread
from layertap.service.engine.execute.decode import normalize_rows, pad_texts
from layertap.service.engine.limits import check_batch, check_graph, show_shapes
from layertap.service.engine.prepare.planner import PlannedRequest, Planner
from layertap.service.engine.prepare.predicted_rows import find_preprocessed_by
from layertap.service.engine.prepare.sources import prepare_sources
from layertap.service.engine.rows import Attempt, CutRows, Fetched, ItemAttempts, Items, Rows, get_row_shapes, join_rows
from layertap.service.engine.schedule.batch_formation import are_few_rows
from layertap.service.engine.schedule.scheduler import Scheduler
from layertap.service.errors import UnsupportedMediaError
from layertap.service.inputs.items import ImageItem, LocalItem

HINT = "send one shape a request"
PAIRS = "some ids look like pairs, by their separators: all token types are 0 here, those of second texts too"


@dataclass(frozen=True)
class DecodedRows:
    """Rows of one shape, their items, and the first item's index in the request.

    ``cut``: for texts, how many tokens each was truncated by; for pictures, whether pages were left out.
    """

    rows: dict[str, Tensor]
    items: Sequence[Fetched]
    input_index: int
    cut: tuple[int, ...] = ()

    @property
    def shapes(self) -> Shapes:
        """The shape of one row for each input of the model."""
        return get_row_shapes(self.rows)


class JobMaker:
    """Makes jobs of items; for the event loop."""

    def __init__(self, scheduler: Scheduler, planner: Planner, run_in_thread: RunInThread, max_results: int) -> None:
        self._scheduler = scheduler
        self._planner = planner
        self._run_in_thread = run_in_thread
        self._max_results = max_results

    async def make_jobs(self, planned: PlannedRequest, items: Items, deadline: float) -> list[Job]:
        """The jobs of items, replanned if their rows are not as predicted.

        Rows of one shape are one job. If shapes differ, or inputs have their own options, each input is a job, and
        those of one shape may share a batch: each is planned, numbered and answered as if alone. RequestError,
        TooLargeError: no input is good, or one is bad and the request leaves none out.
        """
        planned, parts = await self._decode(planned, items, deadline)
        return await self._make_jobs(planned, parts, deadline)

    async def _decode(
        self, planned: PlannedRequest, items: Items, deadline: float
    ) -> tuple[PlannedRequest, Sequence[DecodedRows]]:
        """The rows of all good inputs, and the request with the faults of the others.

        In one part if they have one shape and no options of their own, else in one per input.
        """
        with planned.request.timings.step("decode"):
            # Inputs that name another share its item, which is decoded once.
            local = {id(item): item for _, item in items if not isinstance(item, LayertapError)}
            groups = split_evenly([*local.values()], self._scheduler.slots, planned.handle.executor.max_decode_items)
            decoded = dict(zip(local, await self._decode_groups(planned, groups, deadline), strict=True))
            attempts = [[item] if isinstance(item, LayertapError) else decoded[id(item)] for _, item in items]
        return await self._join(planned, items, attempts, deadline)

    async def _decode_groups(
        self, planned: PlannedRequest, groups: Sequence[Sequence[LocalItem]], deadline: float
    ) -> Iterator[Sequence[Attempt]]:
        decoding = [self._decode_group(planned, group, deadline) for group in groups]
        decoded = [await decoding[0]] if len(decoding) == 1 else await asyncio.gather(*decoding)
        return chain.from_iterable(decoded)

    async def _decode_group(self, planned: PlannedRequest, items: Sequence[LocalItem], deadline: float) -> ItemAttempts:
        handle, priority = planned.handle, planned.request.priority
        decode = partial(self._scheduler.decode, handle.key, items, planned.inputs, priority, deadline)
        attempts = await handle.ask_again(decode, deadline)
        left = [[item] for item, of_item in zip(items, attempts, strict=True) if not of_item]
        if not left:
            return attempts
        again = await self._decode_groups(planned, left, deadline)
        return [of_item or next(again) for of_item in attempts]

    async def _join(
        self, planned: PlannedRequest, items: Items, attempts: Sequence[Sequence[Attempt]], deadline: float
    ) -> tuple[PlannedRequest, Sequence[DecodedRows]]:
        request, inputs = planned.request, planned.inputs
        if inputs.text is not None:
            with request.timings.step("decode"):
                pad = partial(pad_texts, items, attempts, inputs.text)
                attempts = pad() if len(attempts) == 1 else await self._run_in_thread(pad, deadline)
        parts: list[DecodedRows] = []
        faults: list[Fault] = []
        for input_index, item, attempt in _number(items, attempts):
            if isinstance(attempt, LayertapError):
                faults.append(attempt.to_fault(f"/inputs/{input_index}", input_index))
                if request.on_error == "fail" and isinstance(attempt, (TooLargeError, UnsupportedMediaError)):
                    raise type(attempt).from_faults(faults[-1:])
            elif (misfit := _find_misfit(planned, attempt, input_index)) is not None:
                faults.append(misfit)
            else:
                cut = (attempt.cut,) if isinstance(attempt, CutRows) else ()
                parts.append(DecodedRows(dict(attempt), (item,), input_index, cut))
        planned = add_faults(planned, faults)
        if planned.request.faults and (request.on_error == "fail" or not parts):
            raise RequestError.from_faults(planned.request.faults)
        if len(parts) > 1 and not _run_apart(planned):
            parts = await self._run_in_thread(partial(join_decoded, parts, inputs), deadline)
        return planned, parts

    async def _make_jobs(self, planned: PlannedRequest, parts: Sequence[DecodedRows], deadline: float) -> list[Job]:
        if len(parts) > 1 or _run_apart(planned):
            plans = await self._plan_inputs(planned, parts, deadline)
            good = [plan for plan in plans if isinstance(plan, PlannedRequest)]
            if len(good) == len(parts):
                return await self._run_in_thread(partial(self._make_input_jobs, good, parts, deadline), deadline)
            planned, left = await self._run_in_thread(partial(_leave_out, planned, parts, plans), deadline)
            return await self._make_jobs(planned, left, deadline)
        (part,) = parts
        final = await self._planner.replan(planned, part.rows, part.items, deadline)
        return [make_job(final, part.rows, deadline=deadline, cut=part.cut)]

    async def _make_again(
        self, plan: PlannedRequest, part: DecodedRows, number: int, deadline: float, counts: CallCounts
    ) -> Job:
        """The job of an input, the ``number``-th of its request, whose forward makes these numbers of calls."""
        plan = await self._planner.replan_calls(plan, part.rows, counts, deadline)
        return self._make_input_job(plan, part, number, deadline)

    def _make_input_job(self, plan: PlannedRequest, part: DecodedRows, number: int, deadline: float) -> Job:
        index = part.input_index
        job = make_job(plan, part.rows, deadline=deadline, first_row=number, input_index=index, cut=part.cut)
        job.plan_again = partial(self._make_again, plan, part, number, deadline)
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
                of_input = replace(planned, input_index=part.input_index)
                plans[keys[-1]] = await self._planner.replan(of_input, part.rows, part.items, deadline)
            except (RequestError, TooLargeError) as error:
                skips = planned.request.on_error == "skip" and isinstance(error, (InputError, TooLargeError))
                if not skips:
                    raise error.of_input(part.input_index) from None
                plans[keys[-1]] = error
        return [plans[key] for key in keys]

    def _make_input_jobs(
        self, plans: Sequence[PlannedRequest], parts: Sequence[DecodedRows], deadline: float
    ) -> list[Job]:
        request, jobs = plans[0].request, []
        for number, (plan, part) in enumerate(zip(plans, parts, strict=True)):
            try:
                _check(plan)
                job = self._make_input_job(plan, part, number, deadline)
            except (RequestError, TooLargeError) as error:
                raise error.of_input(part.input_index) from None
            jobs.append(job)
        check_entries(list_entries(jobs), len(jobs), request.reply, self._max_results)
        return prepare_sources(jobs)


def refuse_picture(items: Items, error: UndecodedError) -> Items:
    """The items with the refused picture replaced by its error, if it is known which one: the others may be good."""
    refused = 0 if len(items) == 1 else error.row
    return [(index, error.refusal if row == refused else item) for row, (index, item) in enumerate(items)]


def make_encoded_job(planned: PlannedRequest, items: Items, deadline: float) -> Job | None:
    """The job of pictures that their batches decode; their rows must be known in advance.

    None if they must be decoded first: inputs with options of their own; pictures whose size decides that of their
    rows; TIFFs, which may be cut; a few pictures, which run one after another on all cores; several that share no
    forwards, whose batches are as large as memory allows (``decode_with_batch`` excepted).
    """
    pictures = tuple(item for _, item in items if isinstance(item, ImageItem) and not item.is_tiff)
    preprocess = planned.inputs.preprocess
    sized = preprocess is not None and compute_output_size(preprocess) is not None
    once = len(set(map(id, pictures))) == len(pictures)  # a repeated picture is decoded first, and once
    known = planned.shapes == planned.catalog_shapes and sized and once
    known = known and not _run_apart(planned)
    if not known or not planned.handle.executor.decodes_batches or not len(pictures) == len(items) == planned.rows:
        return None
    job = make_job(planned, {}, deadline=deadline, encoded=pictures)
    side_by_side = not planned.request.decode_with_batch if job.isolated else are_few_rows(job.key, job.rows)
    return None if job.rows > 1 and side_by_side else job


def make_job(
    planned: PlannedRequest,
    inputs: Mapping[str, Tensor],
    *,
    deadline: float,
    encoded: tuple[ImageItem, ...] = (),
    first_row: int = 0,
    input_index: int | None = None,
    cut: tuple[int, ...] = (),
) -> Job:
    """The job of a request whose rows exist, are still encoded, or, in a dry run, do not exist; any thread may call it.

    TooLargeError, InputError if the rows that must share a forward exceed its limit.
    """
    request, plan, catalog, handle = planned.request, planned.plan, planned.catalog, planned.handle
    text = handle.model.text
    unsplittable = request.isolated and catalog.batches and catalog.crosses_rows and planned.rows > 1
    runs = bool(inputs) or bool(encoded)
    numbers = text is not None and planned.resumption is None and text.numbers(inputs)
    compiled = _find_compiled(planned) if runs and not numbers else None
    alone = plan.runs_alone and not unsplittable
    anchors = plan.anchors if plan.has_graph else None
    batch_key = handle.batch_keys.get(catalog, planned.shapes, anchors, compiled, unsplittable, alone)
    if runs:
        check_graph(plan, batch_key)
        if planned.tower.text is None and (mask := inputs.get(planned.tower.mask or "")) is not None:
            _check_padding(plan, mask)
        if unsplittable:
            check_batch(planned.rows, batch_key)
        else:
            check_rows_fit(plan, catalog, planned.rows, batch_key.max_rows)
    # Explicit position ids apply to all rows of a forward, and change the shapes in position layers.
    isolated = request.isolated or request.verify or handle.isolated or numbers
    fingerprints = planned.fingerprints
    if unsplittable:
        fingerprints = {key: fingerprint.digest_batch(digest) for key, digest in fingerprints.items()}
    if not catalog.traits.deterministic:
        fingerprints = dict.fromkeys(fingerprints, fingerprint.make_unrepeatable())
    text = planned.tower.text
    return Job(
        catalog=catalog,
        spec=ForwardSpec(plan, catalog if request.verify else None, planned.resumption, compiled),
        inputs=inputs,
        rows=planned.rows,
        key=batch_key,
        depth=1.0 if request.verify or compiled else plan.cost,
        row_bytes=_count_row_bytes(planned, compiled),
        priority=request.priority,
        deadline=deadline,
        isolated=isolated or not plan.may_share,
        unsplittable=unsplittable or not plan.may_split,
        rows_per_forward=(planned.rows if unsplittable else 1) if catalog.crosses_rows or alone else None,
        faults=request.faults,
        timings=request.timings,
        fingerprints=fingerprints,
        mask=planned.tower.mask,
        preprocessed=planned.preprocessed,
        labels=handle.model.labels,
        encoded=encoded,
        first_row=first_row,
        input_index=input_index,
        changed=plan.changed_selectors[: len(request.interventions)],
        tokens=_count_tokens(inputs, text),
        cut=cut,
        warnings=(PAIRS,) if text and text.count_pairs(inputs) else (),
        joined=JoinedRows(planned.rows),
    )


def _check_padding(plan: Plan, mask: Tensor) -> None:
    """InputError if rows have padding that a result would count, since its entries are of several tokens."""
    if bool(mask.all()):
        return
    for capture in plan.captures:
        pool = capture.reduction.pool if capture.reduction.stats is None else "stats"
        if capture.info.merges_tokens and (pool == "stats" or POOLINGS[pool].combines):
            detail = f"entries of {capture.point.escaped_text} are of several tokens, so {pool} would count padding"
            raise InputError(detail, hint='use "pool": "none", or send each input without padding, alone')


def _count_row_bytes(planned: PlannedRequest, compiled: CompiledPlan | None) -> int:
    """Bytes of each row's captures, or of the inputs of its projections."""
    plan = planned.plan
    if compiled:  # a graph returns all its captures, whatever the request needs
        return sum(capture.nbytes(1) for capture in compiled.captures)
    extra = verification.list_extra_captures(plan, planned.catalog) if planned.request.verify else ()
    return plan.nbytes(1) + plan.projected_bytes + 2 * sum(capture.nbytes(1) for capture in extra)


def _count_tokens(inputs: Mapping[str, Tensor], text: TextSpec | None) -> int:
    """The number of tokens without padding in texts' rows; 0 for other rows."""
    if text is None or not text.takes_text or not inputs:
        return 0
    return inputs[text.ids].numel() if text.mask is None else int(inputs[text.mask].count_nonzero())


def _find_compiled(planned: PlannedRequest) -> CompiledPlan | None:
    """The graph for a request, if any."""
    model = planned.handle.model
    request = planned.request
    if request.verify or request.resume is not None or planned.shapes != model.shapes:
        return None
    if request.input_options:  # the results of changed and unchanged inputs are compared, so that all run with hooks
        return None
    return find_compiled_plan(model.compiled, planned.plan)


def _leave_out(
    planned: PlannedRequest, parts: Sequence[DecodedRows], plans: Sequence[PlannedRequest | LayertapError]
) -> tuple[PlannedRequest, Sequence[DecodedRows]]:
    """The inputs without those that the model does not take; RequestError if none is left."""
    left, faults = [], []
    for part, plan in zip(parts, plans, strict=True):
        if isinstance(plan, LayertapError):
            faults.append(plan.to_fault(f"/inputs/{part.input_index}", part.input_index))
        else:
            left.append(part)
    planned = add_faults(planned, faults)
    if not left:
        raise RequestError.from_faults(planned.request.faults)
    return planned, left if _run_apart(planned) else join_decoded(left, planned.inputs)


def _run_apart(planned: PlannedRequest) -> bool:
    """Whether each input is a job of its own, though all have one shape: they want, or may do, different things."""
    return planned.request.apart or bool(planned.request.input_options)


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


def join_decoded(parts: Sequence[DecodedRows], inputs: ModelInputs) -> list[DecodedRows]:
    """All rows of a request in one part if they have one shape, else unchanged.

    If only some are arrays, pictures are normalised first: one tensor has one dtype.
    """
    if len({part.shapes for part in parts}) > 1:
        return list(parts)
    rows: Sequence[Rows] = [part.rows for part in parts]
    if len({tuple(value.dtype for value in each.values()) for each in rows}) > 1:
        rows = [normalize_rows(each, inputs) for each in rows]
    items = [item for part in parts for item in part.items]
    cut = chain.from_iterable(part.cut or (0,) * len(next(iter(part.rows.values()))) for part in parts)
    return [DecodedRows(join_rows(rows), items, parts[0].input_index, tuple(cut))]


def add_faults(planned: PlannedRequest, faults: Sequence[Fault]) -> PlannedRequest:
    """A planned request with more inputs left out; all faults in the order of the inputs."""
    request = planned.request
    every = tuple(sorted((*request.faults, *faults), key=lambda fault: fault.input or 0))
    return planned if every == request.faults else replace(planned, request=replace(request, faults=every))


def split_evenly(items: Sequence[LocalItem], slots: int, limit: int) -> list[Sequence[LocalItem]]:
    """Split items into groups of at most ``limit``, equally many for each slot, so that all slots end together."""
    rounds = math.ceil(len(items) / (slots * limit))
    count = min(slots * rounds, len(items))
    bounds = [len(items) * group // max(count, 1) for group in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]


def _number(items: Items, attempts: Sequence[Sequence[Attempt]]) -> Iterator[tuple[int, Fetched, Attempt]]:
    """Each input's index, item and attempt; an item that is a batch has several inputs."""
    for (input_index, item), item_attempts in zip(items, attempts, strict=True):
        for row, attempt in enumerate(item_attempts):
            yield input_index + row, item, attempt


def _find_misfit(planned: PlannedRequest, rows: Rows, input_index: int) -> Fault | None:
    """The fault of rows with another shape than the layer's output that they replace."""
    inputs, shapes = planned.inputs, get_row_shapes(rows)
    if planned.request.resume is not None and inputs.text is None and shapes != inputs.shapes:
        detail = f"an output of {inputs.specs[0].name!r} has another shape than {show_shapes(shapes)}"
        return Fault(detail, f"send shape {show_shapes(inputs.shapes)}", input=input_index)
    return None
