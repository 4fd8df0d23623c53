"""A batch in a replica's thread: one forward for all, and what to do where it fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layertap.models.capture.batch_slices import BatchActivations, RequestSlice
from layertap.models.capture.reduction import ReducedTensor
from layertap.models.devices import memory, threads, transfer
from layertap.models.errors import LayertapError, OutOfMemoryError, clear_tracebacks, out_of_memory_error
from layertap.models.loaded_model import LoadedModel
from layertap.models.replica import Replica
from layertap.models.selection.plan import Capture
from layertap.service.engine.batch import Batch, QueuedRequest, RowSlice
from layertap.service.engine.futures import wrap_error
from layertap.service.engine.request import Job
from layertap.service.errors import ForwardError
from layertap.service.metrics import Metrics

Jobs = Mapping[QueuedRequest, Job]
Results = Mapping[Capture, ReducedTensor]
Interval = tuple[float, float]
log = logging.getLogger("layertap")


@dataclass(frozen=True)
class SliceResult:
    """What became of some rows: their results in the host's memory, or why there are none.

    ``rows`` shared the forward. ``forward`` and ``copy`` (to the host) began and ended then, on the
    clock of ``time.perf_counter``, in seconds.
    """

    row_slice: RowSlice
    results: Results | LayertapError | RuntimeError
    rows: int
    forward: Interval = (0.0, 0.0)
    copy: Interval = (0.0, 0.0)


@dataclass(frozen=True)
class BatchFailures:
    """What went wrong: forwards without enough memory, how often the batch was split for that, and for other errors.

    ``too_many_rows``: rows that memory does not hold, though it holds each of them.
    """

    out_of_memory: int = 0
    memory_splits: int = 0
    error_splits: int = 0
    too_many_rows: int | None = None


class BatchRunner:
    """Runs one batch; made and used in the thread of its replica.

    ``failure`` says why nothing can be answered any more, where that is so.
    """

    def __init__(self, model: LoadedModel, replica: Replica, batch: Batch, jobs: Jobs, thread_count: int) -> None:
        self.failures = BatchFailures()
        self.failure = ""
        self._model = model
        self._replica = replica
        self._batch = batch
        self._jobs = jobs
        self._threads = thread_count
        self._padded_rows = None if batch.slices[0].request.unsplittable else batch.queue.padded_rows

    def run(self) -> list[SliceResult]:
        """One or several for each row_slice of the batch; nothing is raised."""
        try:
            with threads.use_threads(self._threads):
                return self._attempt(self._batch.slices)
        except BaseException as error:  # not of a forward: a device that is lost, for one
            wrapped = wrap_error(error)
            self.failure = self.failure or find_lasting_failure(wrapped, self._model, self._replica)
            return [SliceResult(row_slice, wrapped, self._batch.rows) for row_slice in self._batch.slices]

    def record(self, metrics: Metrics, seconds: float) -> None:
        """Count the batch, which took so long, and what went wrong in it."""
        batch, model = self._batch, self._batch.queue.model
        requests = len({row_slice.request for row_slice in batch.slices})
        max_rows, depth = max(batch.queue.max_rows, batch.rows), min(batch.depth, 1.0)
        metrics.observe_batch(model, batch.rows, max_rows, requests, depth, seconds, batch.reason)
        for _ in range(self.failures.out_of_memory):
            metrics.count_out_of_memory(model)
        for _ in range(self.failures.memory_splits):
            metrics.count_split(model, "memory")
        for _ in range(self.failures.error_splits):
            metrics.count_split(model, "error")

    def _attempt(self, slices: Sequence[RowSlice]) -> list[SliceResult]:
        """Whatever can't run together is tried in two halves, until a request stands alone with what it caused."""
        outcome = RuntimeError(self.failure) if self.failure else self._try(slices)
        if isinstance(outcome, list):
            return outcome
        # Here, outside the except block, all that the failed forward held is let go.
        if isinstance(outcome, OutOfMemoryError):
            return self._retry_smaller(slices, outcome)
        halves = _halve_by_request(slices)
        if halves is None or _is_device_error(outcome):  # else the halves tell sooner who is to blame
            self.failure = self.failure or find_lasting_failure(outcome, self._model, self._replica)
        if self.failure:
            halves = None
        if halves is None:
            return [SliceResult(row_slice, outcome, _count_rows(slices)) for row_slice in slices]
        del outcome  # its traceback holds what the forward held
        self._count_failure(error_splits=1)
        return [outcome for half in halves for outcome in self._attempt(half)]

    def _retry_smaller(self, slices: Sequence[RowSlice], error: OutOfMemoryError) -> list[SliceResult]:
        """The same without padding, or in two halves by rows; a row that has no room alone is to blame itself."""
        rows = max(self._padded_rows or 0, _count_rows(slices))
        pieces = (slices,) if rows > _count_rows(slices) else _halve_by_rows(slices, rows)
        self._count_failure(out_of_memory=1, memory_splits=pieces is not None)
        _release_memory(self._model.device)
        if pieces is None:
            return [SliceResult(row_slice, error, rows) for row_slice in slices]
        self._padded_rows = None
        outcomes = [outcome for piece in pieces for outcome in self._attempt(piece)]
        if not any(isinstance(outcome.results, OutOfMemoryError) for outcome in outcomes):
            self.failures = replace(self.failures, too_many_rows=min(self.failures.too_many_rows or rows, rows))
        return outcomes

    def _count_failure(self, **more: int) -> None:
        self.failures = replace(
            self.failures, **{name: getattr(self.failures, name) + count for name, count in more.items()}
        )

    def _try(self, slices: Sequence[RowSlice]) -> list[SliceResult] | LayertapError | RuntimeError:
        try:
            return self._run(slices)
        except LayertapError as error:
            if len(slices) == 1 and error.__cause__ is not None:
                fields = {"model": self._model.spec.name}
                log.info("a model's forward raised", exc_info=error, extra={"fields": fields})
            clear_tracebacks(error)  # its frames hold the batch
            error.__cause__ = error.__context__ = None
            return error
        except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio has its own
            if not memory.is_out_of_memory(error):
                return wrap_error(error, ForwardError)
        return out_of_memory_error(_count_rows(slices))

    def _run(self, slices: Sequence[RowSlice]) -> list[SliceResult]:
        pieces, requests, start = [], [], 0
        for row_slice in slices:
            job, count = self._jobs[row_slice.request], row_slice.rows
            pieces.append({name: value[row_slice.start : row_slice.stop] for name, value in job.inputs.items()})
            requests.append(
                RequestSlice(
                    start,
                    start + count,
                    job.plan.captures,
                    job.plan.resolved_interventions,
                    job.plan.objective,
                    row_slice.start,
                )
            )
            start += count
        started = time.perf_counter()
        activations = self._forward(pieces, requests, self._jobs[slices[0].request])
        if self._model.device.type == "cuda":
            transfer.synchronize_stream(self._model.device)
        computed = time.perf_counter()
        activations = activations.to_host()
        copied = time.perf_counter()
        return [
            SliceResult(
                row_slice,
                _ensure_owned(activations.select(request), row_slice),
                start,
                (started, computed),
                (computed, copied),
            )
            for row_slice, request in zip(slices, requests, strict=True)
        ]

    def _forward(self, pieces: list[dict[str, Tensor]], requests: list[RequestSlice], first: Job) -> BatchActivations:
        resumption = first.resumption  # the same for all that wait in a queue, and so is what is compiled
        if not first.verify:  # who asks for it is alone
            return self._model.run(self._replica, pieces, requests, self._padded_rows, resumption, first.compiled)
        return self._model.run_verified(
            self._replica, pieces[0], requests[0], first.plan, first.catalog, self._padded_rows, resumption
        )


def _count_rows(slices: Sequence[RowSlice]) -> int:
    return sum(row_slice.rows for row_slice in slices)


def _ensure_owned(results: Results, row_slice: RowSlice) -> Results:
    """What waits for a request's other parts must not keep its neighbours' results in memory."""
    if row_slice.rows == row_slice.request.rows:
        return results
    return {
        capture: ReducedTensor(reduced.values.clone(), None if reduced.scale is None else reduced.scale.clone())
        for capture, reduced in results.items()
    }


def find_lasting_failure(error: BaseException, model: LoadedModel, replica: Replica) -> str:
    """Why nothing can be answered until the process is started anew, after an error of a forward; or nothing.

    A failed assertion in a kernel lasts, and what a model has done to itself; an odd input that no kernel can be
    started for does not.
    """
    if isinstance(error, LayertapError) or error.__cause__ is None:
        return ""
    probe_error = model.probe(replica)
    if probe_error is None:
        return ""
    if isinstance(probe_error, torch.AcceleratorError):
        return "a device gives nothing but errors"
    return f"model {model.spec.name} fails whatever it is given ({type(probe_error).__name__})"


def _is_device_error(error: BaseException) -> bool:
    return isinstance(error.__cause__, torch.AcceleratorError)


def _release_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _halve_by_rows(slices: Sequence[RowSlice], rows: int) -> tuple[list[RowSlice], list[RowSlice]] | None:
    if rows < 2 or slices[0].request.unsplittable:
        return None
    first: list[RowSlice] = []
    second: list[RowSlice] = []
    room = rows // 2
    for row_slice in slices:
        cut = row_slice.start + min(room, row_slice.rows)
        if cut > row_slice.start:
            first.append(RowSlice(row_slice.request, row_slice.start, cut))
        if cut < row_slice.stop:
            second.append(RowSlice(row_slice.request, cut, row_slice.stop))
        room -= cut - row_slice.start
    return first, second


def _halve_by_request(slices: Sequence[RowSlice]) -> tuple[Sequence[RowSlice], Sequence[RowSlice]] | None:
    half = len(slices) // 2
    return (slices[:half], slices[half:]) if half else None
