"""Decodes a request's items in the scheduler's slots, and joins their rows where they have one shape."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

from torch import Tensor

from layertap.models.errors import Fault, LayertapError, RequestError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import Shapes
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.deadline import RunInThread
from layertap.service.engine.execute.decode import normalize_rows, pad_texts
from layertap.service.engine.limits import show_shapes
from layertap.service.engine.prepare.planner import PlannedRequest
from layertap.service.engine.prepare.preparation import runs_apart
from layertap.service.engine.rows import (
    Attempt,
    CutRows,
    Fetched,
    ItemAttempts,
    Items,
    Rows,
    get_row_shapes,
    join_rows,
)
from layertap.service.engine.schedule.scheduler import Scheduler
from layertap.service.errors import UnsupportedMediaError
from layertap.service.inputs.items import LocalItem

Faults = tuple[Fault, ...]  # in the order of the inputs


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


class InputDecoder:
    """Decodes items; for the event loop."""

    def __init__(self, scheduler: Scheduler, run_in_thread: RunInThread) -> None:
        self._scheduler = scheduler
        self._run_in_thread = run_in_thread

    async def decode(
        self, planned: PlannedRequest, items: Items, faults: Faults, ticket: Ticket
    ) -> tuple[Sequence[DecodedRows], Faults]:
        """The rows of all good inputs, and the faults of the others, added to those there are.

        In one part if they have one shape and share their options, else in one per input. RequestError,
        TooLargeError: no input is good, or one is bad and the request leaves none out.
        """
        with ticket.timings.step("decode"):
            # Inputs that name another share its item, which is decoded once.
            local = {id(item): item for _, item in items if not isinstance(item, LayertapError)}
            groups = split_evenly([*local.values()], self._scheduler.slots, planned.handle.executor.max_decode_items)
            decoded = dict(zip(local, await self._decode_groups(planned, groups, ticket.deadline), strict=True))
            attempts = [[item] if isinstance(item, LayertapError) else decoded[id(item)] for _, item in items]
        return await self._join(planned, items, attempts, faults, ticket)

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
        self,
        planned: PlannedRequest,
        items: Items,
        attempts: Sequence[Sequence[Attempt]],
        before: Faults,
        ticket: Ticket,
    ) -> tuple[Sequence[DecodedRows], Faults]:
        request, inputs = planned.request, planned.inputs
        if inputs.text is not None:
            with ticket.timings.step("decode"):
                pad = partial(pad_texts, items, attempts, inputs.text)
                attempts = pad() if len(attempts) == 1 else await self._run_in_thread(pad, ticket.deadline)
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
        every = sort_faults(before, faults)
        if every and (request.on_error == "fail" or not parts):
            raise RequestError.from_faults(every)
        if len(parts) > 1 and not runs_apart(request):
            parts = await self._run_in_thread(partial(join_decoded, parts, inputs), ticket.deadline)
        return parts, every


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


def sort_faults(before: Faults, more: Sequence[Fault]) -> Faults:
    """All faults in the order of the inputs."""
    return tuple(sorted((*before, *more), key=lambda fault: fault.input or 0)) if more else before


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
