"""An executor whose workers decode and run forwards: what crashes or hangs a worker is refused, nothing else fails."""

from __future__ import annotations

import asyncio
from typing import Any

from layertap.models.errors import LayertapError, out_of_memory_error
from layertap.models.inputs.preprocess import LibraryProcessor
from layertap.models.inputs.video import VideoProcessor
from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.batch import CPU, Batch, BatchFailures, BatchResult, SliceResult, UndecodedError
from layertap.service.engine.execute.batch_runner import refuse
from layertap.service.engine.execute.executor import Executor, Extend, fail_batch
from layertap.service.engine.execute.model_calls import CallOutcome, ModelFunction, OverdueError
from layertap.service.engine.execute.processes.wire import Captures, SentResult, SentSpecs, ToWorker, unpack_results
from layertap.service.engine.execute.processes.worker_decoder import WorkerDecoder
from layertap.service.engine.execute.processes.worker_pool import WorkerPool
from layertap.service.engine.execute.processes.worker_process import (
    KILLED_RETRIES,
    ModelLostError,
    PendingMessage,
    WorkerDiedError,
    killed_error,
)
from layertap.service.errors import ForwardError, UnavailableError, ending_error
from layertap.service.inputs.items import ArraysItem, EncodedItem, FramesItem, SamplesItem, TextItem
from layertap.service.settings import Settings

DIED = "the model's process ended"
LARGE_BYTES = 2**20  # of results: copied in a thread, so that the event loop goes on
PARTS_AT_ONCE = 2  # threads that turn arrays into rows, and join large results


class ProcessExecutor(Executor):
    """Runs a model in workers, of which any idle one takes the next message."""

    decodes_batches = True

    def __init__(self, model: ModelInfo, workers: WorkerPool, settings: Settings) -> None:
        kinds: tuple[type, ...] = (EncodedItem, FramesItem, SamplesItem, TextItem)
        if isinstance(
            model.model_inputs.preprocess, LibraryProcessor | VideoProcessor
        ):  # decoded pictures go through it, too
            kinds += (ArraysItem,)
        self.decoder = WorkerDecoder(workers, settings, PARTS_AT_ONCE, model.model_inputs, kinds)
        super().__init__(model, (CPU,) * settings.workers, self.decoder)
        self.workers = workers
        self.idle = workers.idle

    def run(self, batch: Batch, extend: Extend) -> asyncio.Future[BatchResult]:
        """Run a batch in a worker. If that dies, blame the slice that it was decoding, or else try each slice alone."""
        running = RunningBatch(batch, extend, self.decoder)
        self.workers.take().ask(running)
        return running.result

    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """Call the function in a worker of its own; batches go to the others meanwhile."""
        deaths = 0
        while True:
            try:
                outcome: CallOutcome = await self.workers.ask_apart(("call", function), seconds)
            except ModelLostError:
                if self.workers.lost.is_set() or deaths == KILLED_RETRIES:
                    raise
                deaths += 1
            except WorkerDiedError as error:
                if error.cause == "timeout":
                    raise OverdueError from None
                if not error.may_retry(deaths):
                    raise explain_death(error, 1) from None
                deaths += 1
            else:
                return CallOutcome(outcome.result)  # a failure ended with its worker


class RunningBatch(PendingMessage):
    """A batch in a worker; ``result`` is its BatchResult, never an error."""

    def __init__(self, batch: Batch, extend: Extend, decoder: WorkerDecoder) -> None:
        self.deadline = batch.deadline
        self.result: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
        self._batch = batch
        self._extend = extend
        self._decoder = decoder
        self._captures: list[Captures] = []  # of each slice
        self._sent: list[SentResult] = []  # by the worker

    def pack(self, specs: SentSpecs) -> ToWorker:
        """The message to a worker that knows these specs, which are then used for the slices that join, too."""
        self._specs, batch = specs, self._batch
        specs.make_room()
        slices = specs.pack_slices(batch.slices, self._captures)
        return "run", (batch.slots, batch.single_row_slots, batch.padded_rows, slices)

    def follow(self, kind: str, answer: Any) -> Any:
        """Keep a part of the results; or else the pictures are decoded: return the slices that join."""
        if kind == "part":
            self._sent += answer
            return None
        more = self._extend()
        if more is None:
            return self._batch.slots, ()
        self.deadline = max(self.deadline, more.deadline)
        return more.slots, self._specs.pack_slices(more.slices, self._captures)

    def settle(self, outcome: Any) -> None:
        """Set the result: of the worker's answer, or of the error why there is none."""
        if isinstance(outcome, Exception):
            self._set(self._explain(outcome))
            return
        sent, failures, crossing = outcome
        self._sent += sent

        def join() -> BatchResult:
            try:
                results = unpack_results(self._sent, self._batch.slices, self._captures)
                return BatchResult(results, BatchFailures(**failures), crossing=crossing)
            except Exception as error:  # also out of memory
                return fail_batch(self._batch, error)

        # Results of a part of a job are copied into those of the job.
        copied = sum([each.job.plan.nbytes(each.rows) for each in self._batch.slices if each.rows < each.job.rows])
        if copied <= LARGE_BYTES:
            self._set(join())
            return
        try:
            joining = asyncio.get_running_loop().run_in_executor(self._decoder.pool, join)
            joining.add_done_callback(self._take_joined)
        except Exception as error:  # no thread can be started
            self._set(fail_batch(self._batch, error))

    def _take_joined(self, joined: asyncio.Future[BatchResult]) -> None:
        self._set(refuse(self._batch, ending_error()) if joined.cancelled() else joined.result())

    def _set(self, result: BatchResult) -> None:
        if not self.result.done():  # cancelled with the event loop
            self.result.set_result(result)

    def _explain(self, error: Exception) -> BatchResult:
        """The result of a batch without an answer: who is to blame is refused, the others run again."""
        if isinstance(error, ModelLostError):
            return BatchResult(again=(self._batch,))
        if isinstance(error, UnavailableError):
            return refuse(self._batch, error)
        if not isinstance(error, WorkerDiedError):
            return fail_batch(self._batch, error)
        return self._blame(error)

    def _blame(self, error: WorkerDiedError) -> BatchResult:
        """The result of a batch whose worker died: the blamed slice, or else each, runs again alone, or is refused."""
        batch, decoder = self._batch, self._decoder
        may_retry = error.may_retry(batch.tries)
        if error.cause == "timeout" or (error.decoding < 0 and not may_retry):  # nobody waits any more, or it was alone
            return refuse(batch, explain_death(error, batch.rows))
        if error.decoding < 0:
            return BatchResult(again=[batch.take([each], batch.tries + 1) for each in batch.slices])
        slices = list(batch.slices)
        blamed = slices.pop(error.decoding)
        again = [batch.take(slices)] if slices else []
        is_killed, is_one = error.cause == "killed", len(blamed.encoded) == 1
        if may_retry and (is_killed or (is_one and not decoder.is_out_of_time(error))):
            return BatchResult(again=[*again, batch.take([blamed], batch.tries + 1)])
        refusal = (
            killed_error() if is_killed else UndecodedError(decoder.refuse(error), blamed.start if is_one else None)
        )
        return BatchResult([SliceResult(error.decoding, blamed.start, blamed.stop, refusal, blamed.rows)], again=again)


def explain_death(error: WorkerDiedError, rows: int) -> LayertapError | RuntimeError:
    """The error for so many rows whose workers died."""
    match error.cause:
        case "killed":
            return killed_error()
        case "memory":
            return out_of_memory_error(rows)
        case _:
            return ForwardError(DIED)
