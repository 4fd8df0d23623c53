"""Makes jobs of items: decodes them, plans their rows again where they are not as predicted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise

from torch import Tensor

from layertap.models.errors import Fault, InputError, LayertapError, OtherForwardError, RequestError, TooLargeError
from layertap.models.inputs.generation import FEW_STEPS, GENERATE, make_rows
from layertap.models.inputs.model_inputs import ModelInputs, TextSpec, read_mask
from layertap.models.plan.plan import Plan
from layertap.models.plan.poolings import POOLINGS
from layertap.models.run.batch_slices import JoinedRows
from layertap.models.spec import Generation
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.batch import Job, UndecodedError
from layertap.service.engine.collect.joined_inputs import check_entries, list_entries
from layertap.service.engine.deadline import RunInThread
from layertap.service.engine.execute.decode import normalize_rows, pad_texts
from layertap.service.engine.execute.item_rows import find_preprocessed_by
from layertap.service.engine.prepare.planned_request import PlannedRequest
from layertap.service.engine.prepare.planner import Planner
from layertap.service.engine.prepare.sources import prepare_sources
from layertap.service.engine.rows import (
    Attempt,
    CutRows,
    Fetched,
    Items,
    Origin,
    Rows,
    get_row_shapes,
    join_rows,
)
from layertap.service.engine.schedule.scheduler import Scheduler
from layertap.service.engine.short_work import run_if_long
from layertap.service.errors import UnsupportedMediaError
from layertap.service.inputs.image_size import count_pixels
from layertap.service.inputs.items import TIFF_STARTS, EncodedItem, LocalItem

HINT = "send one shape a request"
PAIRS = "some ids look like pairs, by their separators, and come without token types: all are 0, also of second texts"
LARGE_PIXELS = 8_000_000  # of a picture: a fifth of a second to decode, or more
LARGE_BYTES = LARGE_PIXELS // 1032  # of its file, at least: Deflate makes no more of a byte
Faults = tuple[Fault, ...]  # in the order of the inputs


@dataclass(frozen=True)
class DecodedRows:
    """Rows of one shape, their items, and the first item's index in the request.

    ``cut``: how many tokens of each text, or samples of each sound, were left out; for pictures, whether pages were.
    ``origins``: where rows of sounds and videos are from.
    """

    rows: dict[str, Tensor]
    items: Sequence[Fetched] = ()
    input_index: int = 0
    cut: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()


class JobMaker:
    """Makes jobs of items; for the event loop."""

    def __init__(self, scheduler: Scheduler, planner: Planner, run_in_thread: RunInThread, max_results: int) -> None:
        self._scheduler = scheduler
        self._planner = planner
        self._run_in_thread = run_in_thread
        self._max_results = max_results

    async def make_jobs(self, planned: PlannedRequest, items: Items, faults: Faults, ticket: Ticket) -> list[Job]:
        """The jobs of items, replanned if their rows are not as predicted; without items a dry run's, which has none.

        Rows of one shape are one job. If shapes differ, or inputs have their own options, each input is a job, and
        those of one shape may share a batch: each is planned, numbered and answered as if alone. ``faults`` are of
        inputs left out before. RequestError, TooLargeError: no input is good, or one is bad and the request leaves
        none out.
        """
        if not items:
            return [make_job(planned, DecodedRows({}), faults, ticket)]
        deadline = ticket.deadline
        text = planned.inputs.text if planned.request.generate is None else None  # each is continued from its own end
        with ticket.timings.step("decode"):
            attempts = await self._decode(planned, items, deadline)
            if text is not None:
                pad = partial(pad_texts, items, attempts, text)
                attempts = pad() if len(attempts) == 1 else await self._run_in_thread(pad, deadline)
        parts, faults = _sort_attempts(planned, items, attempts, faults)
        parts = await self._join(planned, parts, deadline)
        while len(parts) > 1 or planned.apart:
            plans, bad = await self._plan_inputs(planned, parts, deadline)
            if not bad:
                make = partial(self._make_input_jobs, plans, faults, ticket)
                return await self._run_in_thread(make, deadline)
            faults = _sort_faults(faults, bad)
            if not plans:
                raise RequestError.from_faults(faults)
            parts = await self._join(planned, [part for _, part in plans], deadline)
        (part,) = parts
        final = await self._planner.replan(planned, part.rows, part.items, deadline)
        return [make_job(final, part, faults, ticket)]

    async def _decode(self, planned: PlannedRequest, items: Items, deadline: float) -> Sequence[Sequence[Attempt]]:
        """The rows of each item in the scheduler's slots, or its errors."""
        # Inputs that name another share its item, which is decoded once.
        local = {id(item): item for _, item in items if not isinstance(item, LayertapError)}
        executor, texts = planned.handle.executor, [*local.values()]
        characters = executor.count_characters(texts, planned.inputs)
        if characters is not None:
            decode = partial(executor.decode_here, texts, planned.inputs)
            attempts = await run_if_long(self._run_in_thread, decode, deadline, tokenized_characters=characters)
            decoded = dict(zip(local, attempts, strict=True))
            return [[item] if isinstance(item, LayertapError) else decoded[id(item)] for _, item in items]
        local = dict(sorted(local.items(), key=lambda each: _is_large(each[1])))
        small = sum(not _is_large(item) for item in local.values())
        rest = [*local.values()]
        groups = split_evenly(rest[:small], self._scheduler.slots, executor.max_decode_items)
        groups += [[item] for item in rest[small:]]  # each takes its turn
        decoded = dict(zip(local, await self._decode_groups(planned, groups, deadline), strict=True))
        return [[item] if isinstance(item, LayertapError) else decoded[id(item)] for _, item in items]

    async def _decode_groups(
        self, planned: PlannedRequest, groups: Sequence[Sequence[LocalItem]], deadline: float
    ) -> Iterator[Sequence[Attempt]]:
        handle, inputs, priority = planned.handle, planned.inputs, planned.request.priority
        turns = asyncio.Semaphore(self._scheduler.slots)  # others that come meanwhile go before the further groups

        async def decode_group(items: Sequence[LocalItem]) -> Iterable[Sequence[Attempt]]:
            decode = partial(self._scheduler.decode, handle.key, items, inputs, priority, deadline)
            async with turns:
                attempts = await handle.ask_again(decode, deadline)
            left = [[item] for item, of_item in zip(items, attempts, strict=True) if not of_item]
            if not left:
                return attempts
            again = await self._decode_groups(planned, left, deadline)
            return [of_item or next(again) for of_item in attempts]

        decoding = list(map(decode_group, groups))
        return chain.from_iterable([await decoding[0]] if len(decoding) == 1 else await asyncio.gather(*decoding))

    async def _join(
        self, planned: PlannedRequest, parts: Sequence[DecodedRows], deadline: float
    ) -> Sequence[DecodedRows]:
        if len(parts) == 1 or planned.apart:
            return parts
        return await self._run_in_thread(partial(_join_parts, parts, planned.inputs), deadline)

    async def _plan_inputs(
        self, planned: PlannedRequest, parts: Sequence[DecodedRows], deadline: float
    ) -> tuple[list[tuple[PlannedRequest, DecodedRows]], list[Fault]]:
        """A plan for each input, and the faults of those whose shape is refused, if the request leaves these out.

        One after another, because surveying a new shape blocks the model.
        """
        known: dict[object, PlannedRequest | LayertapError] = {}
        plans, faults = [], []
        for part in parts:
            index, shapes = part.input_index, get_row_shapes(part.rows)
            kind = find_preprocessed_by(part.items, planned.inputs.for_shapes(shapes), shapes)
            options = planned.request.input_options.get(index)
            key = shapes, kind, options, index if planned.inputs.text is not None else None
            if key not in known:
                try:
                    of_input = replace(planned, input_index=index, kept=None)
                    known[key] = await self._planner.replan(of_input, part.rows, part.items, deadline)
                except (RequestError, TooLargeError) as error:
                    if planned.request.on_error == "fail" or not isinstance(error, (InputError, TooLargeError)):
                        raise error.of_input(index) from None
                    known[key] = error
            plan = known[key]
            if isinstance(plan, PlannedRequest):
                plans.append((plan, part))
            else:
                faults.append(plan.to_fault(f"/inputs/{index}", index))
        return plans, faults

    def _make_input_jobs(
        self, plans: Sequence[tuple[PlannedRequest, DecodedRows]], faults: Faults, ticket: Ticket
    ) -> list[Job]:
        jobs = []
        for number, (planned, part) in enumerate(plans):
            try:
                _check_apart(planned)
                jobs.append(self._make_input_job(planned, part, number, faults, ticket))
            except (RequestError, TooLargeError) as error:
                raise error.of_input(part.input_index) from None
        check_entries(list_entries(jobs), len(jobs), plans[0][0].request.reply, self._max_results)
        return prepare_sources(jobs)

    def _make_input_job(
        self, planned: PlannedRequest, part: DecodedRows, number: int, faults: Faults, ticket: Ticket
    ) -> Job:
        """The job of an input, the ``number``-th of its request."""

        async def plan_again(other: OtherForwardError) -> Job:
            again = await self._planner.replan(planned, part.rows, part.items, ticket.deadline, other)
            if (more := again.nbytes - planned.nbytes) > 0:
                ticket.reserve_bytes(more)
            return self._make_input_job(again, part, number, faults, ticket)

        job = make_job(planned, part, faults, ticket)
        job.first_row, job.input_index, job.plan_again = number, part.input_index, plan_again
        return job


def make_encoded_job(planned: PlannedRequest, items: Items, faults: Faults, ticket: Ticket) -> Job | None:
    """The job of pictures that their batch decodes; None if they must be decoded first.

    These are also TIFFs, which may be cut, repeated pictures, which are decoded once, and large ones, for which others
    would wait.
    """
    pictures: list[EncodedItem] = []
    for _, item in items:
        if type(item) is not EncodedItem or item.data.startswith(TIFF_STARTS) or _is_large(item):
            return None
        pictures.append(item)
    rows = len(pictures)
    if rows != planned.rows or not planned.decodes_in_batch or (rows > 1 and len(set(map(id, pictures))) < rows):
        return None
    return Job(
        planned.prepared,
        rows,
        planned.request.priority,
        ticket.deadline,
        encoded=tuple(pictures),
        work_rows=ticket.work_rows,
        joined=JoinedRows(rows) if rows > 1 else None,
        timings=ticket.timings,
        faults=faults,
    )


def make_job(planned: PlannedRequest, part: DecodedRows, faults: Faults, ticket: Ticket) -> Job:
    """The job of decoded rows, or, in a dry run, of none; any thread may call it.

    TooLargeError, InputError: as of ``PlannedRequest.prepare``, or if a result would count padding.
    """
    rows, model_text, text = part.rows, planned.handle.model.text, planned.tower.text
    own_positions = model_text is not None and planned.resumption is None and model_text.numbers(rows)
    prepared = planned.prepare(own_positions=True) if own_positions else planned.prepared
    if text is None and (name := planned.tower.mask) is not None and name in rows:
        _check_padding(planned.plan, read_mask(name, rows[name]))
    tokens = 0  # without padding
    if rows and text is not None and text.takes_text:
        tokens = rows[text.ids].numel() if text.mask is None else int(rows[text.mask].count_nonzero())
    return Job(
        prepared,
        planned.rows,
        planned.request.priority,
        ticket.deadline,
        rows,
        work_rows=ticket.work_rows,
        joined=JoinedRows(planned.rows),
        timings=ticket.timings,
        faults=faults,
        tokens=tokens,
        cut=part.cut,
        origins=part.origins,
        warnings=(PAIRS,) if text and text.count_pairs(rows) else (),
    )


def refuse_picture(items: Items, error: UndecodedError) -> Items:
    """The items with the refused picture replaced by its error, if it is known which one: the others may be good."""
    refused = 0 if len(items) == 1 else error.row
    return [(index, error.refusal if row == refused else item) for row, (index, item) in enumerate(items)]


def split_evenly(items: Sequence[LocalItem], slots: int, limit: int) -> list[Sequence[LocalItem]]:
    """Split items into groups of at most ``limit``, equally many for each slot, so that all slots end together."""
    rounds = math.ceil(len(items) / (slots * limit))
    count = min(slots * rounds, len(items))
    bounds = [len(items) * group // max(count, 1) for group in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]


def _is_large(item: LocalItem) -> bool:
    """Whether a picture takes so long to decode that it takes a turn of its own."""
    return isinstance(item, EncodedItem) and len(item.data) >= LARGE_BYTES and count_pixels(item.data) >= LARGE_PIXELS


def _sort_attempts(
    planned: PlannedRequest, items: Items, attempts: Sequence[Sequence[Attempt]], before: Faults
) -> tuple[Sequence[DecodedRows], Faults]:
    """The rows of all good inputs, and the faults of the others, added to those there are.

    RequestError, TooLargeError: no input is good, or one is bad and the request leaves none out.
    """
    request, inputs = planned.request, planned.inputs
    parts: list[DecodedRows] = []
    faults: list[Fault] = []
    for (first, item), of_item in zip(items, attempts, strict=True):
        for index, attempt in enumerate(of_item, first):  # an item that is a batch may have several inputs
            if isinstance(attempt, LayertapError):
                faults.append(attempt.to_fault(f"/inputs/{index}", index))
                if request.on_error == "fail" and isinstance(attempt, (TooLargeError, UnsupportedMediaError)):
                    raise type(attempt).from_faults(faults[-1:])
                continue
            rows = dict(attempt)
            if request.generate is not None:
                try:
                    rows[GENERATE] = _continue_rows(rows, request.generate, inputs.text, index)
                except InputError as error:
                    faults.append(error.to_fault(f"/inputs/{index}", index))
                    continue
            cut = (attempt.cut,) if isinstance(attempt, CutRows) else ()
            origins = (attempt.origin,) if isinstance(attempt, CutRows) and attempt.origin is not None else ()
            parts.append(DecodedRows(rows, (item,), index, cut, origins))
    every = _sort_faults(before, faults)
    if every and (request.on_error == "fail" or not parts):
        raise RequestError.from_faults(every)
    return parts, every


def _continue_rows(rows: Rows, generation: Generation, text: TextSpec | None, number: int) -> Tensor:
    """The input that says how texts go on, the first of which is the request's ``number``-th; InputError."""
    if text is None:
        raise InputError("this is no text, and none can go on from it", hint="send a 'text' or 'tokens'")
    count, tokens = rows[text.ids].shape
    if text.mask is not None and not bool(rows[text.mask].all()):
        raise InputError("a text that is padded can't be continued", hint="send its own tokens alone")
    if tokens + max(generation.steps, FEW_STEPS) > text.max_tokens:
        detail = f"the text has {tokens} tokens, and with {generation.steps} steps more than {text.max_tokens}"
        raise InputError(detail, hint="ask for fewer steps, or send a shorter text")
    return make_rows(generation, range(number, number + count))


def _join_parts(parts: Sequence[DecodedRows], inputs: ModelInputs) -> Sequence[DecodedRows]:
    """All rows of a request in one part if they have one shape, else unchanged.

    If only some are arrays, pictures are normalised first: one tensor has one dtype.
    """
    if len(parts) == 1 or len({get_row_shapes(part.rows) for part in parts}) > 1:
        return parts
    rows: Sequence[Rows] = [part.rows for part in parts]
    if len({tuple(value.dtype for value in each.values()) for each in rows}) > 1:
        rows = [normalize_rows(each, inputs) for each in rows]
    items = [item for part in parts for item in part.items]
    none = [(0,) * len(next(iter(part.rows.values()))) for part in parts]
    cut = chain.from_iterable(part.cut or zeros for part, zeros in zip(parts, none, strict=True))
    origins: Iterable[Origin] = ()
    if any(part.origins for part in parts):
        origins = chain.from_iterable(
            part.origins or (Origin(),) * len(zeros) for part, zeros in zip(parts, none, strict=True)
        )
    return [DecodedRows(join_rows(rows), items, parts[0].input_index, tuple(cut), tuple(origins))]


def _sort_faults(before: Faults, more: Sequence[Fault]) -> Faults:
    """All faults in the order of the inputs."""
    return tuple(sorted((*before, *more), key=lambda fault: fault.input or 0)) if more else before


def _check_apart(planned: PlannedRequest) -> None:
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


def _check_padding(plan: Plan, mask: Tensor) -> None:
    """InputError if rows have padding that a result would count, since its entries are of several tokens."""
    if bool(mask.all()):
        return
    for capture in plan.captures:
        pool = capture.reduction.pool if capture.reduction.stats is None else "stats"
        if capture.info.merges_tokens and (pool == "stats" or POOLINGS[pool].combines):
            detail = f"entries of {capture.point.escaped_text} are of several tokens, so {pool} would count padding"
            raise InputError(detail, hint='use "pool": "none", or send each input without padding, alone')
