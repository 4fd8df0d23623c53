"""Runs a model in worker processes: what crashes, hangs or eats memory there costs the inputs that did it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

from layertap.models.errors import LayertapError, LoadError
from layertap.models.inputs.library_processor import LibraryProcessor
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.model_info import ModelInfo
from layertap.models.sources.python import list_search_folders
from layertap.models.spec import ModelSpec
from layertap.service.engine.execute.executor import CallOutcome, Extend, ModelFunction
from layertap.service.engine.execute.forward_batch import (
    BatchOutcome,
    ForwardBatch,
    ForwardSlice,
    SliceResult,
    UndecodedError,
)
from layertap.service.engine.execute.processes.messages import BatchDecoded, BatchRun, CallModel, HostOptions
from layertap.service.engine.execute.processes.sent_batch import make_extension, make_run_batch, restore_result
from layertap.service.engine.execute.processes.worker_pool import (
    GRACE_SECONDS,
    MAX_DECODE_ITEMS,
    TRIES,
    WorkerPool,
    ask,
    choose_worker_bytes,
    make_unavailable,
)
from layertap.service.engine.execute.processes.worker_process import ModelHost, OnRestart, WorkerDiedError
from layertap.service.engine.execute.threads import publish_name
from layertap.service.engine.rows.rows import ItemAttempts, try_to_decode
from layertap.service.engine.schedule.batch import CPU
from layertap.service.errors import ForwardError, UnavailableError
from layertap.service.inputs.items import ArraysItem, ImageItem, LocalItem, TextItem
from layertap.service.settings import Settings

CALL_SECONDS = 600.0  # a survey that takes so long hangs
DIED = "the model's process ended"


@dataclass(frozen=True, kw_only=True)
class HostedModel(ModelInfo):
    """A model that has been loaded by a process of its own."""

    host: ModelHost

    @property
    def hooks(self) -> int:
        """Hooks of ours that are on the model in its workers, as they said last: 0."""
        return sum(worker.hooks for worker in self.host.workers)


def load_in_host(spec: ModelSpec, settings: Settings, plans: Path | None, on_restart: OnRestart) -> HostedModel:
    """Load a model in a process of its own; LoadError where it can't be.

    ``plans`` as for ``HostOptions``, ``on_restart`` as for ``ModelHost``.
    """
    options = HostOptions(spec, settings, list_search_folders(), choose_worker_bytes(settings), plans)
    host = ModelHost(options, on_restart)
    info = cast("ModelInfo", host.load())
    return HostedModel(host=host, **{each.name: getattr(info, each.name) for each in fields(ModelInfo)})


def no_more() -> None:
    """Of a batch that nothing joins."""


class OpenBatch:
    """A batch that grows until its forward begins; ``batch`` is what it has by now."""

    def __init__(self, batch: ForwardBatch, extend: Extend) -> None:
        self.batch = batch
        self._extend = extend

    def extend(self) -> Sequence[ForwardSlice]:
        """What joins it now."""
        more = self._extend()
        if more is None:
            return ()
        self.batch = replace(more, slices=(*self.batch.slices, *more.slices))
        return more.slices

    def get_timeout(self) -> float | None:
        """Seconds until nobody waits for it; None where somebody always does."""
        deadline = self.batch.deadline
        return None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0) + GRACE_SECONDS


class ProcessExecutor:
    """Workers of one model: any of them that is idle does what comes next."""

    def __init__(self, model: HostedModel, settings: Settings) -> None:
        """Start the workers; LoadError where they can't be started."""
        self.model = model
        self.replicas = settings.workers
        self.devices = (CPU,) * self.replicas
        self.decodes_batches = True
        self.max_decode_items = MAX_DECODE_ITEMS
        self._settings = settings
        self._pool = WorkerPool(model.host, settings)

    @property
    def memory_bytes(self) -> int:
        """What the host had for itself when it had loaded the model, and what its workers have now."""
        return (self.model.process_bytes or self.model.memory_bytes) + self.model.host.measure_worker_bytes()

    def start_thread(self, replica: int) -> None:
        """Prepare a thread, which waits for workers."""
        publish_name()

    def run_batch(self, replica: int, batch: ForwardBatch, extend: Extend) -> BatchOutcome:
        """The batch, in a worker; where that dies, what it decoded then is decoded alone, and the rest run again."""
        del replica  # any worker does
        open_batch = OpenBatch(batch, extend)
        try:
            return self._run(open_batch)
        except LoadError as error:
            return _refuse(open_batch.batch, make_unavailable(error))
        except WorkerDiedError as error:
            batch = open_batch.batch
            if error.timed_out:  # nobody waits any more
                return _refuse(batch, ForwardError(DIED))
            if error.decoding >= 0:
                return self._run_without(batch, error)
            return _join([self._run_alone(replace(batch, slices=(each,))) for each in batch.slices])

    def _run_without(self, batch: ForwardBatch, error: WorkerDiedError) -> BatchOutcome:
        """The batch after the worker died of a slice's picture: the others again, and then that one, decoded alone."""
        slices = list(batch.slices)
        blamed = slices.pop(error.decoding)
        outcomes = [self.run_batch(0, replace(batch, slices=tuple(slices)), no_more)] if slices else []
        alone = replace(batch, slices=(blamed,))
        if self._pool.is_out_of_time(error) or len(blamed.encoded) != 1:
            return _join([*outcomes, _refuse(alone, UndecodedError(self._pool.make_refusal(error)))])
        try:
            ((attempt,),) = self._pool.decode(blamed.encoded, tries=TRIES - 1)
        except UnavailableError as failure:
            return _join([*outcomes, _refuse(alone, failure)])
        if isinstance(attempt, LayertapError):
            return _join([*outcomes, _refuse(alone, UndecodedError(attempt, blamed.start))])
        decoded = replace(blamed, inputs=attempt, encoded=())
        return _join([*outcomes, self._run_alone(replace(batch, slices=(decoded,)))])

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Workers look at it when they have decoded a batch."""
        self.model.host.note_waiting_rows(rows_wait)

    def call(self, function: ModelFunction) -> CallOutcome:
        """The function, in a worker."""
        try:
            with self._pool.borrow() as worker:
                outcome = cast("CallOutcome", ask(worker, CallModel(function), CALL_SECONDS))
                if outcome.failure:
                    worker.replace("failure")
                return CallOutcome(outcome.result)
        except WorkerDiedError:
            return CallOutcome(ForwardError(DIED))
        except LoadError as error:
            return CallOutcome(make_unavailable(error))

    def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Pictures and texts in a worker; one that dies of an item dies of it twice before that is refused."""
        kinds: tuple[type, ...] = (ImageItem, TextItem) if inputs is self.model.model_inputs else ()
        if kinds and isinstance(inputs.preprocess, LibraryProcessor):  # decoded pictures go through it there
            kinds = (*kinds, ArraysItem)
        decoded = [None if isinstance(item, kinds) else try_to_decode(item, inputs, self._settings) for item in items]
        return self._pool.complete(items, decoded)

    def close(self) -> None:
        """End all processes."""
        self._pool.close()

    def _run(self, open_batch: OpenBatch) -> BatchOutcome:
        with self._pool.borrow() as worker:
            answer = ask(worker, lambda: make_run_batch(open_batch.batch, worker.specs), open_batch.get_timeout())
            while isinstance(answer, BatchDecoded):
                joining = open_batch.extend()
                message = make_extension(joining, open_batch.batch.threads, worker.specs)
                answer = worker.ask(message, open_batch.get_timeout())
            run = cast("BatchRun", answer)
            worker.hooks = run.hooks
            if run.failure:
                worker.replace("failure")
        slices_by_place = {each.place: each for each in open_batch.batch.slices}
        results = [restore_result(result, slices_by_place[result.place]) for result in run.results]
        return BatchOutcome(results, run.failures)

    def _run_alone(self, batch: ForwardBatch) -> BatchOutcome:
        try:
            return self._run(OpenBatch(batch, no_more))
        except WorkerDiedError:
            return _refuse(batch, ForwardError(DIED))
        except LoadError as error:
            return _refuse(batch, make_unavailable(error))


def _refuse(batch: ForwardBatch, error: LayertapError | RuntimeError) -> BatchOutcome:
    """An error for all that a batch has."""
    return BatchOutcome([SliceResult(each.place, each.start, each.stop, error, each.rows) for each in batch.slices])


def _join(outcomes: Sequence[BatchOutcome]) -> BatchOutcome:
    """What became of the parts of a batch."""
    return BatchOutcome([result for outcome in outcomes for result in outcome.results])
