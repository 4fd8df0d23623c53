"""An executor whose workers decode and run forwards: what crashes or hangs a worker is refused, nothing else fails."""

from __future__ import annotations

import asyncio
from typing import Any

from layertap.models.inputs.preprocess import LibraryProcessor
from layertap.models.model_info import ModelInfo
from layertap.service.engine.batch import CPU, Batch, BatchFailures, BatchResult, SliceResult, UndecodedError
from layertap.service.engine.execute.batch_runner import refuse
from layertap.service.engine.execute.executor import Executor, Extend, fail_batch
from layertap.service.engine.execute.model_calls import CallOutcome, ModelFunction
from layertap.service.engine.execute.processes.wire import Captures, SentResult, SentSpecs, ToWorker, unpack_results
from layertap.service.engine.execute.processes.worker_decoder import WorkerDecoder
from layertap.service.engine.execute.processes.worker_pool import WorkerPool
from layertap.service.engine.execute.processes.worker_process import ModelLostError, PendingMessage, WorkerDiedError
from layertap.service.errors import ForwardError, UnavailableError
from layertap.service.inputs.items import ArraysItem, ImageItem, TextItem
from layertap.service.settings import Settings

DIED = "the model's process ended"
LARGE_BYTES = 2**20  # of results: copied in a thread, so that the event loop goes on
PARTS_AT_ONCE = 2  # threads that turn arrays into rows, and join large results


class ProcessExecutor(Executor):
    """Runs a model in workers, of which any idle one takes the next message."""

    decodes_batches = True

    def __init__(self, model: ModelInfo, workers: WorkerPool, settings: Settings) -> None:
        kinds: tuple[type, ...] = (ImageItem, TextItem)
        if isinstance(model.model_inputs.preprocess, LibraryProcessor):  # decoded pictures go through it, too
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
        """Call the function in a worker, which is killed after so many seconds."""
        try:
            outcome: CallOutcome = await self.workers.ask(("call", function), seconds)
        except WorkerDiedError:
            raise ForwardError(DIED) from None
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
        return "run", (batch.slots, batch.slots_alone, batch.padded_rows, slices)

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
            joining.add_done_callback(lambda joined: self._set(joined.result()))
        except Exception as error:  # no thread can be started
            self._set(fail_batch(self._batch, error))

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
        """The result of a batch whose worker died: a blamed slice runs once more, alone; the others run again."""
        batch, decoder = self._batch, self._decoder
        if error.timed_out or (error.decoding < 0 and batch.tries):  # nobody waits any more, or it was alone
            return refuse(batch, ForwardError(DIED))
        if error.decoding < 0:
            return BatchResult(again=[batch.take([each], tries=1) for each in batch.slices])
        slices = list(batch.slices)
        blamed = slices.pop(error.decoding)
        again = [batch.take(slices)] if slices else []
        if not (batch.tries or decoder.is_out_of_time(error) or len(blamed.encoded) != 1):
            return BatchResult(again=[*again, batch.take([blamed], tries=1)])
        refusal = UndecodedError(decoder.refuse(error), blamed.start if len(blamed.encoded) == 1 else None)
        return BatchResult([SliceResult(error.decoding, blamed.start, blamed.stop, refusal, blamed.rows)], again=again)
