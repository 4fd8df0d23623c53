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
from layertap.service.engine.request import Job
from layertap.service.errors import ForwardError

Jobs = Mapping[QueuedRequest, Job]
Results = Mapping[Capture, ReducedTensor]
Interval = tuple[float, float]
log = logging.getLogger("layertap")


@dataclass(frozen=True)
class SliceResult:
    """What became of a part: its results in the host's memory, or why there are none.

    ``rows`` and ``requests`` shared the forward. ``forward`` and ``copy`` (to the host) began and ended then, on the
    clock of ``time.perf_counter``, in seconds.
    """

    part: RowSlice
    results: Results | LayertapError | RuntimeError
    rows: int
    requests: int
    forward: Interval = (0.0, 0.0)
    copy: Interval = (0.0, 0.0)


@dataclass(frozen=True)
class BatchFailures:
    """What went wrong: forwards without enough memory, how often the batch was split for that, and for other errors.

    ``too_many``: rows that memory does not hold, though it holds each of them.
    """

    out_of_memory: int = 0
    memory: int = 0
    error: int = 0
    too_many: int | None = None


class BatchRunner:
    """Runs one batch; made and used in the thread of its replica.

    ``lost`` says why nothing can be answered any more, where that is so.
    """

    def __init__(self, model: LoadedModel, own: Replica, batch: Batch, jobs: Jobs, threads: int) -> None:
        self.failures = BatchFailures()
        self.failure = ""
        self._model = model
        self._own = own
        self._batch = batch
        self._jobs = jobs
        self._threads = threads
        self._padded = None if batch.slices[0].request.unsplittable else batch.queue.padded_rows

    def run(self) -> list[SliceResult]:
        """One or several for each part of the batch; nothing is raised."""
        try:
            with threads.use_threads(self._threads):
                return self._attempt(self._batch.slices)
        except BaseException as error:  # not of a forward: a device that is lost, for one
            found = wrap_error(error)
            self.failure = self.failure or find_lasting_failure(found, self._model, self._own)
            return [SliceResult(part, found, self._batch.rows, 1) for part in self._batch.slices]

    def _attempt(self, parts: Sequence[RowSlice]) -> list[SliceResult]:
        """Whatever can't run together is tried in two halves, until a request stands alone with what it caused."""
        found = RuntimeError(self.failure) if self.failure else self._try(parts)
        if isinstance(found, list):
            return found
        # Here, outside the except block, all that the failed forward held is let go.
        if isinstance(found, OutOfMemoryError):
            return self._smaller(parts, found)
        halves = _by_request(parts)
        if halves is None or _of_device(found):  # else the halves tell sooner who is to blame
            self.failure = self.failure or find_lasting_failure(found, self._model, self._own)
        if self.failure:
            halves = None
        if halves is None:
            return [SliceResult(part, found, _rows(parts), len(parts)) for part in parts]
        del found  # its traceback holds what the forward held
        self._failed(error=1)
        return [outcome for half in halves for outcome in self._attempt(half)]

    def _smaller(self, parts: Sequence[RowSlice], error: OutOfMemoryError) -> list[SliceResult]:
        """The same without padding, or in two halves by rows; a row that has no room alone is to blame itself."""
        rows = max(self._padded or 0, _rows(parts))
        pieces = (parts,) if rows > _rows(parts) else _by_rows(parts, rows)
        self._failed(out_of_memory=1, memory=pieces is not None)
        _release(self._model.device)
        if pieces is None:
            return [SliceResult(part, error, rows, len(parts)) for part in parts]
        self._padded = None
        outcomes = [outcome for piece in pieces for outcome in self._attempt(piece)]
        if not any(isinstance(outcome.results, OutOfMemoryError) for outcome in outcomes):
            self.failures = replace(self.failures, too_many=min(self.failures.too_many or rows, rows))
        return outcomes

    def _failed(self, **more: int) -> None:
        self.failures = replace(
            self.failures, **{name: getattr(self.failures, name) + count for name, count in more.items()}
        )

    def _try(self, parts: Sequence[RowSlice]) -> list[SliceResult] | LayertapError | RuntimeError:
        try:
            return self._run(parts)
        except LayertapError as error:
            if len(parts) == 1 and error.__cause__ is not None:
                fields = {"model": self._model.spec.name}
                log.info("a model's forward raised", exc_info=error, extra={"fields": fields})
            clear_tracebacks(error)  # its frames hold the batch
            error.__cause__ = error.__context__ = None
            return error
        except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio has its own
            if not memory.is_out_of_memory(error):
                return wrap_error(error, ForwardError)
        return out_of_memory_error(_rows(parts))

    def _run(self, parts: Sequence[RowSlice]) -> list[SliceResult]:
        pieces, shares, at = [], [], 0
        for part in parts:
            job, count = self._jobs[part.request], part.stop - part.start
            pieces.append({name: value[part.start : part.stop] for name, value in job.inputs.items()})
            shares.append(
                RequestSlice(
                    at, at + count, job.plan.captures, job.plan.resolved_interventions, job.plan.objective, part.start
                )
            )
            at += count
        begun = time.perf_counter()
        taken = self._taken(pieces, shares, self._jobs[parts[0].request])
        if self._model.device.type == "cuda":
            transfer.synchronize_stream(self._model.device)
        ran = time.perf_counter()
        taken = taken.to_host()
        copied = time.perf_counter()
        return [
            SliceResult(part, _kept(taken.select(share), part), at, len(parts), (begun, ran), (ran, copied))
            for part, share in zip(parts, shares, strict=True)
        ]

    def _taken(self, pieces: list[dict[str, Tensor]], shares: list[RequestSlice], first: Job) -> BatchActivations:
        resumption = first.resumption  # the same for all that wait in a lane, and so is what is compiled
        if not first.verify:  # who asks for it is alone
            return self._model.run(self._own, pieces, shares, self._padded, resumption, first.compiled)
        return self._model.run_verified(
            self._own, pieces[0], shares[0], first.plan, first.catalog, self._padded, resumption
        )


def _rows(parts: Sequence[RowSlice]) -> int:
    return sum(part.stop - part.start for part in parts)


def _kept(results: Results, part: RowSlice) -> Results:
    """What waits for a request's other parts must not keep its neighbours' results in memory."""
    if part.stop - part.start == part.request.rows:
        return results
    return {capture: replace(reduced, values=reduced.values.clone()) for capture, reduced in results.items()}


def find_lasting_failure(error: BaseException, model: LoadedModel, own: Replica) -> str:
    """Why nothing can be answered until the process is started anew, after an error that ``raised`` made; or nothing.

    A failed assertion in a kernel lasts, and what a model has done to itself; an odd input that no kernel can be
    started for does not.
    """
    if isinstance(error, LayertapError) or error.__cause__ is None:
        return ""
    trouble = model.probe(own)
    if trouble is None:
        return ""
    if isinstance(trouble, torch.AcceleratorError):
        return "a device gives nothing but errors"
    return f"model {model.spec.name} fails whatever it is given ({type(trouble).__name__})"


def _of_device(error: BaseException) -> bool:
    return isinstance(error.__cause__, torch.AcceleratorError)


def wrap_error(error: BaseException, kind: type[RuntimeError] = RuntimeError) -> RuntimeError:
    """What to hand on instead of an error that would mean something else to whoever gets it."""
    wrapped = kind(f"the model raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _by_rows(parts: Sequence[RowSlice], rows: int) -> tuple[list[RowSlice], list[RowSlice]] | None:
    if rows < 2 or parts[0].request.unsplittable:
        return None
    first: list[RowSlice] = []
    second: list[RowSlice] = []
    left = rows // 2
    for part in parts:
        cut = part.start + min(left, part.stop - part.start)
        if cut > part.start:
            first.append(RowSlice(part.request, part.start, cut))
        if cut < part.stop:
            second.append(RowSlice(part.request, cut, part.stop))
        left -= cut - part.start
    return first, second


def _by_request(parts: Sequence[RowSlice]) -> tuple[Sequence[RowSlice], Sequence[RowSlice]] | None:
    half = len(parts) // 2
    return (parts[:half], parts[half:]) if half else None
