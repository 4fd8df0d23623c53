"""A request's items made into rows, on the slots that the scheduler gives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise

from torch import Tensor

from layertap.models.errors import Fault, LayertapError, RequestError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import Shapes
from layertap.service.engine.admit.limits import show_shapes
from layertap.service.engine.batch import UndecodedError
from layertap.service.engine.deadline import RunInThread
from layertap.service.engine.plan.planner import PlannedRequest
from layertap.service.engine.rows.rows import (
    Attempt,
    Fetched,
    ItemAttempts,
    Items,
    Rows,
    get_row_shapes,
    join_rows,
    normalize_rows,
    pad_texts,
)
from layertap.service.engine.schedule.scheduler import Scheduler
from layertap.service.inputs.items import LocalItem


@dataclass(frozen=True)
class DecodedRows:
    """Rows of one shape, the items that they were made of, and the first item's index in the request."""

    rows: dict[str, Tensor]
    items: Sequence[Fetched]
    input_index: int

    @property
    def shapes(self) -> Shapes:
        """The shape of one row, input by input."""
        return get_row_shapes(self.rows)


class InputDecoder:
    """Decodes items on the slots that the scheduler gives. For the event loop only."""

    def __init__(self, scheduler: Scheduler, run_in_thread: RunInThread) -> None:
        self._scheduler = scheduler
        self._run_in_thread = run_in_thread

    async def decode(
        self, planned: PlannedRequest, items: Items, deadline: float
    ) -> tuple[PlannedRequest, Sequence[DecodedRows]]:
        """The rows of all good inputs, and the request with the faults of all others.

        In one part where they have one shape and want the same, else in one for each input. RequestError or
        TooLargeError where the request wants all or nothing, or none is good.
        """
        with planned.request.timings.step("decode"):
            local = [item for _, item in items if not isinstance(item, LayertapError)]
            groups = split_evenly(local, self._scheduler.slots, planned.handle.executor.max_decode_items)
            decoded = await self._decode_groups(planned, groups, deadline)
            attempts = [[item] if isinstance(item, LayertapError) else next(decoded) for _, item in items]
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
                if request.on_error == "fail" and isinstance(attempt, TooLargeError):
                    raise TooLargeError.from_faults(faults[-1:])
            elif (misfit := _find_misfit(planned, attempt, input_index)) is not None:
                faults.append(misfit)
            else:
                parts.append(DecodedRows(dict(attempt), (item,), input_index))
        planned = add_faults(planned, faults)
        if planned.request.faults and (request.on_error == "fail" or not parts):
            raise RequestError.from_faults(planned.request.faults)
        if len(parts) > 1 and not request.input_options:
            parts = await self._run_in_thread(partial(join_decoded, parts, inputs), deadline)
        return planned, parts


def join_decoded(parts: Sequence[DecodedRows], inputs: ModelInputs) -> list[DecodedRows]:
    """All rows of a request in one part where they have one shape, else as they are.

    Where some are arrays its pictures are normalised, or both could not be in one tensor.
    """
    if len({part.shapes for part in parts}) > 1:
        return list(parts)
    rows: Sequence[Rows] = [part.rows for part in parts]
    if len({tuple(value.dtype for value in each.values()) for each in rows}) > 1:
        rows = [normalize_rows(each, inputs) for each in rows]
    return [DecodedRows(join_rows(rows), [item for part in parts for item in part.items], parts[0].input_index)]


def add_faults(planned: PlannedRequest, faults: Sequence[Fault]) -> PlannedRequest:
    """A planned request of which more inputs are left out; all faults in the order of the inputs."""
    request = planned.request
    every = tuple(sorted((*request.faults, *faults), key=lambda fault: fault.input or 0))
    return planned if every == request.faults else replace(planned, request=replace(request, faults=every))


def refuse_picture(items: Items, error: UndecodedError) -> Items:
    """Items with why one of them can't be decoded in its place, where it is known which: the others may be good."""
    refused = 0 if len(items) == 1 else error.row
    return [(index, error.refusal if row == refused else item) for row, (index, item) in enumerate(items)]


def split_evenly(items: Sequence[LocalItem], slots: int, limit: int) -> list[Sequence[LocalItem]]:
    """Groups of at most so many items, as many for each slot, so that all slots end at about the same time."""
    rounds = math.ceil(len(items) / (slots * limit))
    count = min(slots * rounds, len(items))
    bounds = [len(items) * group // max(count, 1) for group in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]


def _number(items: Items, attempts: Sequence[Sequence[Attempt]]) -> Iterator[tuple[int, Fetched, Attempt]]:
    """Each input's index, its item and its attempt; a batch is one item of several inputs."""
    for (input_index, item), item_attempts in zip(items, attempts, strict=True):
        for row, attempt in enumerate(item_attempts):
            yield input_index + row, item, attempt


def _find_misfit(planned: PlannedRequest, rows: Rows, input_index: int) -> Fault | None:
    """What is wrong with the shape of rows: that of a layer's output is fixed."""
    inputs, shapes = planned.inputs, get_row_shapes(rows)
    if planned.request.resume is not None and inputs.text is None and shapes != inputs.shapes:
        detail = f"an output of {inputs.specs[0].name!r} has another shape than {show_shapes(shapes)}"
        return Fault(detail, f"send shape {show_shapes(inputs.shapes)}", input=input_index)
    return None
