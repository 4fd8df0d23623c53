"""Runs a batch in a replica's thread: one forward for all rows; if it fails, smaller ones."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from layertap.models.devices import memory, transfer
from layertap.models.devices.devices import TOLERANCE, is_accelerator, use_threads
from layertap.models.errors import (
    LayertapError,
    OutOfMemoryError,
    clear_tracebacks,
    describe_error,
    out_of_memory_error,
)
from layertap.models.inputs.generation import GENERATE
from layertap.models.plan.plan import Capture
from layertap.models.run.batch_slices import BatchActivations, RequestSlice
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.reduction import Reduced, ReducedTensor, own_memory
from layertap.models.run.replica import Replica
from layertap.models.run.row_check import has_same_row, select_row
from layertap.models.run.verification import run_verified
from layertap.service.engine.batch import (
    LOST_DEVICE,
    Batch,
    BatchFailures,
    BatchResult,
    LastingFailure,
    Results,
    RowSlice,
    SliceResult,
)
from layertap.service.engine.execute.threads import wrap_error
from layertap.service.engine.prepared_request import ForwardSpec
from layertap.service.engine.rows import Rows
from layertap.service.errors import ForwardError

log = logging.getLogger("layertap")
Part = tuple[int, RowSlice]  # rows of a slice, and the slice's index in the batch


class BatchRunner:
    """Runs one batch; created and used in the thread of its replica."""

    def __init__(self, model: LoadedModel, replica: Replica, batch: Batch, check_every: int) -> None:
        """``check_every``: one in so many shared forwards is compared with a row that runs alone."""
        self._crossing = ""
        self._check_every = check_every
        self._failures = BatchFailures()
        self._failure: LastingFailure | None = None
        self._model = model
        self._replica = replica
        self._batch = batch
        self._padded_rows = batch.padded_rows

    def run(self, parts: Sequence[Part] = ()) -> BatchResult:
        """One result or several for each slice of the batch, or of ``parts``; nothing is raised."""
        parts = parts or list(enumerate(self._batch.slices))
        try:
            results = self._attempt(parts)
        except BaseException as error:  # not from a forward: a lost device, or out of memory outside a forward
            wrapped = wrap_error(error)
            self._failure = self._failure or find_lasting_failure(wrapped, self._model, self._replica)
            results = _refuse(parts, wrapped)
        if self._replica.lost:
            self._failure = self._failure or LastingFailure("a forward has overwritten its weights")
        return BatchResult(results, self._failures, self._failure, crossing=self._crossing)

    def _attempt(self, parts: Sequence[Part]) -> list[SliceResult]:
        """Run these parts in one forward; if it fails, in two halves, until the failing request is alone.

        Each row runs alone if rows are known to affect each other, also since the batch was formed.
        """
        outcome: list[SliceResult] | LayertapError | RuntimeError = []
        if not self._must_split(parts):
            outcome = RuntimeError(self._failure.reason) if self._failure else self._try(parts)
        if isinstance(outcome, list):
            return outcome if outcome and not self._must_split(parts) else self._attempt_each(_cut(parts, 1))
        # Outside the except block, so that the failed forward's tensors are freed.
        if isinstance(outcome, OutOfMemoryError):
            return self._retry_smaller(parts, outcome)
        half = len(parts) // 2
        if not half or isinstance(outcome.__cause__, torch.AcceleratorError):  # else the halves show which one fails
            self._failure = self._failure or find_lasting_failure(outcome, self._model, self._replica)
        if not half or self._failure:
            return _refuse(parts, outcome)
        del outcome  # its traceback holds the forward's tensors
        self._failures.error_splits += 1
        return self._attempt_each((parts[:half], parts[half:]))

    def _attempt_each(self, pieces: Sequence[Sequence[Part]]) -> list[SliceResult]:
        return [result for piece in pieces for result in self._attempt(piece)]

    def _must_split(self, parts: Sequence[Part]) -> bool:
        return self._model.row_check.found and _count_rows(parts) > 1 and not self._batch.unsplittable

    def _retry_smaller(self, parts: Sequence[Part], error: OutOfMemoryError) -> list[SliceResult]:
        """Retry without padding, or in two halves of the rows; a row that does not fit alone is refused."""
        count = _count_rows(parts)
        rows = max(self._padded_rows or 0, count)
        self._failures.out_of_memory += 1
        if is_accelerator(self._model.device):
            transfer.release_memory()
        if rows == count and (count < 2 or self._batch.unsplittable):
            return _refuse(parts, error)
        self._failures.memory_splits += 1
        self._padded_rows = None
        outcomes = self._attempt_each(_cut(parts, (count + 1) // 2) if rows == count else [parts])
        if not any(isinstance(outcome.results, OutOfMemoryError) for outcome in outcomes):
            self._failures.too_many_rows = min(self._failures.too_many_rows or rows, rows)
        return outcomes

    def _try(self, parts: Sequence[Part]) -> list[SliceResult] | LayertapError | RuntimeError:
        try:
            return self._run(parts)
        except LayertapError as error:
            if len(parts) == 1 and error.__cause__ is not None:
                fields = {"model": self._model.spec.name}
                log.info("a model's forward raised", exc_info=error, extra={"fields": fields})
            clear_tracebacks(error)  # its frames hold the batch
            error.__cause__ = error.__context__ = None
            return error
        except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio uses these
            if not memory.is_out_of_memory(error):
                # What a batch's error says may be of another's rows.
                return wrap_error(error, ForwardError, describe_error(error) if len(parts) == 1 else "")
        return out_of_memory_error(_count_rows(parts))

    def _run(self, parts: Sequence[Part]) -> list[SliceResult]:
        """The results of one forward; none if a check found that its rows must run alone."""
        stops = list(accumulate(each.rows for _, each in parts))
        requests = [_make_request_slice(each, stop) for (_, each), stop in zip(parts, stops, strict=True)]
        started = time.perf_counter()
        pieces: Sequence[Rows] = [each.inputs for _, each in parts]
        spec = parts[0][1].spec
        if self._padded_rows is None and spec.resumption is None and spec.compiled is None:
            pieces = self._model.cut_padding(pieces, requests)
        with use_threads(self._batch.slots if stops[-1] > 1 else self._batch.single_row_slots):
            activations = self._forward(pieces, requests, spec, self._padded_rows)
            # Behind a token that rounding chose otherwise all of a generation differs: that is no crossing of rows.
            may_check = self._check_every and stops[-1] > 1 and GENERATE not in pieces[0]
            if may_check and not self._batch.unsplittable and not self._check(pieces, requests, parts, activations):
                return []
        transfer.synchronize_stream(self._model.device)
        computed = time.perf_counter()
        activations = activations.to_host()
        copied = time.perf_counter()
        return [
            SliceResult(
                index,
                each.start,
                each.stop,
                _keep(each, activations.select(request), len(parts) > 1),
                stops[-1],
                (started, computed),
                (computed, copied),
            )
            for (index, each), request in zip(parts, requests, strict=True)
        ]

    def _check(
        self, pieces: Sequence[Rows], requests: list[RequestSlice], parts: Sequence[Part], activations: BatchActivations
    ) -> bool:
        """Whether rows of the kinds that are due are what they are alone; else all rows of the forward run alone."""
        check, tolerance = self._model.row_check, TOLERANCE[self._model.spec.precision]
        rows_of_kinds: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for part, (_, each) in enumerate(parts):
            # Larger forwards are other kinds: a model may treat many rows differently.
            kind = _describe_kind(each), requests[-1].stop.bit_length()
            rows_of_kinds[kind] += [(part, row) for row in range(each.rows)]
        chosen = [row for kind, rows in rows_of_kinds.items() for row in check.choose(kind, rows, self._check_every)]
        for part, number in chosen:
            request, spec = requests[part], parts[part][1].spec
            row = {name: value[number : number + 1] for name, value in pieces[part].items()}
            shared = select_row(activations.select(request), number)
            one = replace(request, row_offset=request.row_offset + number)
            differs = not has_same_row(self._repeat_row(row, one, spec, 1, 0), shared, tolerance)
            # The kernels of a batch may round otherwise, and a ReLU near 0 flips: among copies the same ones run.
            count = max(self._padded_rows or 0, requests[-1].stop)
            is_rounding = differs and has_same_row(
                self._repeat_row(row, one, spec, count, request.start + number), shared, tolerance
            )
            check.note(differs=differs, is_rounding=is_rounding)
            if check.found:
                self._crossing = spec.plan.stops_at.text
            if differs:
                return False
        return True

    def _repeat_row(
        self, row: Rows, request: RequestSlice, spec: ForwardSpec, rows: int, index: int
    ) -> dict[Capture, Tensor]:
        """A row's results at an index among so many copies of it."""
        copies = {name: value.expand(rows, *value.shape[1:]) for name, value in row.items()}
        one = replace(request, start=index, stop=index + 1)
        return select_row(self._forward([copies], [one], spec).select(one), 0)

    def _forward(
        self, pieces: Sequence[Rows], requests: list[RequestSlice], first: ForwardSpec, padded_rows: int | None = None
    ) -> BatchActivations:
        resumption = first.resumption
        if first.verified_by is None:  # a request that is verified runs alone
            graphs = self._model.graphs[first.compiled.index] if first.compiled else None
            return self._model.run(self._replica, pieces, requests, padded_rows, resumption, graphs)
        verify = first.plan, first.verified_by, padded_rows, resumption
        return run_verified(self._model, self._replica, pieces[0], requests[0], *verify)


def _describe_kind(each: RowSlice) -> Hashable:
    """What of a request decides which code runs in a forward, and what is looked at there."""
    spec, plan = each.spec, each.spec.plan
    points = tuple(result.capture.point for result in plan.results)
    changes = frozenset(change.operation.op for change in plan.resolved_interventions)  # a sweep tries many places
    objective = plan.objective.point if plan.objective is not None else None
    start = spec.resumption.start.point if spec.resumption is not None else None
    compiled = spec.compiled.index if spec.compiled is not None else None
    shapes = tuple(value.shape[1:] for value in each.inputs.values())
    return shapes, points, changes, objective, start, compiled


def refuse(batch: Batch, error: LayertapError | RuntimeError) -> BatchResult:
    """The same error for every slice of a batch."""
    return BatchResult(_refuse(list(enumerate(batch.slices)), error))


def _refuse(parts: Sequence[Part], error: LayertapError | RuntimeError) -> list[SliceResult]:
    rows = _count_rows(parts)
    return [SliceResult(index, each.start, each.stop, error, rows) for index, each in parts]


def _make_request_slice(each: RowSlice, stop: int) -> RequestSlice:
    """The rows that end at ``stop`` in a forward, with their request's captures, interventions and objective."""
    plan = each.spec.plan
    changes = plan.resolved_interventions
    return RequestSlice(stop - each.rows, stop, plan.captures, changes, plan.objective, each.first_row, plan.calls)


def _count_rows(parts: Sequence[Part]) -> int:
    return sum(each.rows for _, each in parts)


def _keep(row_slice: RowSlice, tensors: Mapping[Capture, ReducedTensor], shared: bool) -> Results:
    """The results of a slice, or of its whole job if other slices have results too.

    Results of a forward that was ``shared`` are copied, so that a kept result holds no other request's memory.
    """
    joined = row_slice.job.joined
    is_part = row_slice.rows < row_slice.job.rows
    if shared and joined is not None and not is_part:
        tensors = {capture: own_memory(reduced) for capture, reduced in tensors.items()}
    results = {capture: Reduced(*(part.numpy() for part in reduced.parts)) for capture, reduced in tensors.items()}
    if joined is None or not is_part:  # without: in a worker, and sending copies them anyway
        return results
    return joined.add(row_slice.start, row_slice.stop, results)


def find_lasting_failure(error: BaseException, model: LoadedModel, replica: Replica) -> LastingFailure | None:
    """Why the model can't answer any more after a forward's error; None if it can.

    A failed assertion in a kernel lasts, for all models of the process, and so does damage that a model did to itself;
    an odd input for which no kernel can be started does not.
    """
    if isinstance(error, LayertapError) or error.__cause__ is None:
        return None
    probe_error = model.probe(replica)
    if probe_error is None:
        return None
    if isinstance(probe_error, torch.AcceleratorError):
        return LastingFailure(LOST_DEVICE, of_device=True)
    return LastingFailure(f"it fails whatever it is given ({type(probe_error).__name__})")


def _cut(parts: Sequence[Part], size: int) -> list[list[Part]]:
    """The rows of some parts in pieces of so many rows; the first one may have fewer."""
    room = _count_rows(parts) % size
    pieces: list[list[Part]] = [[]] if room else []
    for index, each in parts:
        start = each.start
        while start < each.stop:
            if not room:
                pieces.append([])
                room = size
            stop = min(start + room, each.stop)
            pieces[-1].append((index, replace(each, start=start, stop=stop)))
            start, room = stop, room - (stop - start)
    return pieces
