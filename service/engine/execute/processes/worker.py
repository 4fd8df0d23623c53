"""A worker: a process that decodes a model's inputs and runs its forwards, one message at a time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from layertap.models.errors import LayertapError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import verify_resumption
from layertap.models.run.resumption import Resumption
from layertap.service.allocator import release_memory
from layertap.service.engine.batch import (
    CPU,
    NEVER,
    Batch,
    BatchResult,
    Interval,
    Job,
    RowSlice,
    SliceResult,
    UndecodedError,
)
from layertap.service.engine.execute.batch_runner import BatchRunner, Part
from layertap.service.engine.execute.decode import try_to_decode
from layertap.service.engine.execute.model_calls import ModelFunction, call_model
from layertap.service.engine.execute.processes.channel import Channel, Data
from layertap.service.engine.execute.processes.progress import NO_ITEM, Progress
from layertap.service.engine.execute.processes.wire import NO_KEY, FromWorker, KnownSpecs, SentBatch, pack_result
from layertap.service.engine.execute.threads import start_single_threaded
from layertap.service.engine.prepared_request import PreparedRequest
from layertap.service.engine.rows import Attempt, Rows, join_rows
from layertap.service.inputs.items import EncodedItem, LocalItem
from layertap.service.settings import Settings

MAX_TOGETHER_BYTES = 32 * 1024  # of the results in one message
COUNT_SECONDS = 1.0  # between counts of hooks, which take longer than all else beside a forward


class DecodingWorker:
    """A worker that only decodes."""

    def __init__(self, inputs: ModelInputs, settings: Settings, progress: Progress) -> None:
        self._inputs = inputs
        self._progress = progress
        self._settings = settings

    def serve(self, channel: Channel) -> None:
        """Answer until the server closes the connection."""
        start_single_threaded()
        self._channel = channel
        channel.send(None)
        with suppress(EOFError):
            while True:
                channel.wait()
                self._progress.taken += 1  # also if this process can't receive it
                method, given = channel.receive()
                channel.send(getattr(self, method)(given))
                self._note_hooks()

    def decode(self, items: Sequence[LocalItem]) -> FromWorker:
        """Decode items: an ``ItemAttempts``."""
        return "answer", [self._decode_item(number, item) for number, item in enumerate(items)]

    def _decode_item(self, number: int, item: LocalItem) -> Sequence[Attempt]:
        progress = self._progress
        prints = isinstance(item, EncodedItem) and (item.is_tiff or not self._inputs.takes_pictures)
        progress.since, progress.item = time.monotonic(), number
        signal.setitimer(signal.ITIMER_REAL, self._settings.decode_timeout_s)  # kills this process
        try:
            with mute_stderr() if prints else nullcontext():
                attempts = try_to_decode(item, self._inputs, self._settings, in_worker=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            progress.item = NO_ITEM
        for attempt in attempts:
            if isinstance(attempt, TooLargeError):
                release_memory()
        return attempts

    def _note_hooks(self) -> None:
        """Note how many hooks messages have left on the model."""


class Worker(DecodingWorker):
    """A worker that also runs forwards and functions of a model in this process."""

    def __init__(self, model: LoadedModel, settings: Settings, progress: Progress) -> None:
        super().__init__(model.model_inputs, settings, progress)
        self._model = model
        self._specs = KnownSpecs()
        self._hooks_at = 0.0  # when hooks are counted again

    def call(self, function: ModelFunction) -> FromWorker:
        """Call a function of the model: a ``CallOutcome``."""
        outcome = call_model(self._model, self._model.replicas[0], function)
        if isinstance(outcome.result, Resumption):  # the results of calls may be of any type, and stay here
            outcome = replace(outcome, result=replace(outcome.result, skipped={}))
        return "end" if outcome.failure else "answer", outcome

    def run(self, batch: SentBatch) -> FromWorker:
        """Decode the batch's pictures, refuse the slices that fail, and run the others.

        Waiting rows may join after the decoding: a batch grows until its forward begins. Results that do not fit into
        one message are sent before.
        """
        slots, single_row_slots, padded_rows, joining = batch
        ready, results, decodes, numbers, may_grow = list[Part](), list[SliceResult](), list[Interval](), [], False
        while joining:
            for rows, first_row, reference, inputs, pictures in joining:
                index, started = len(decodes), time.perf_counter()
                prepared, of_spec = self._specs.get(reference)
                numbers.append(of_spec)
                may_grow = may_grow or (bool(pictures) and not prepared.unsplittable)
                try:
                    inputs = self._decode_pictures(index, first_row, pictures) if pictures else inputs
                    job = Job(self._verify(prepared), rows, inputs=inputs, first_row=first_row)
                    ready.append((index, RowSlice(job, 0, rows)))
                except (LayertapError, UndecodedError) as error:
                    results.append(SliceResult(index, 0, rows, error, 1))
                decodes.append((started, time.perf_counter()) if pictures else NEVER)
            joining = ()
            if may_grow and self._progress.rows_wait:  # else nothing would join: start the forward without asking
                self._channel.send(("decoded", None))
                slots, joining = self._channel.receive()
        result = BatchResult()
        if ready:
            slices = tuple(each for _, each in ready)
            made = Batch(NO_KEY, CPU, slices, slots, single_row_slots, 1.0, 0.0, "isolated", padded_rows)
            result = BatchRunner(self._model, self._model.replicas[0], made, self._settings.check_shared).run(ready)
        results += result.results
        if result.failures.out_of_memory:
            release_memory()
        parts = [*split_results(results)]
        packed = [[pack_result(each, numbers[each.index], decodes[each.index]) for each in part] for part in parts]
        for part in packed[:-1]:
            self._channel.send(("part", part))
        return "end" if result.failure else "answer", (packed[-1], vars(result.failures), result.crossing)

    def _verify(self, prepared: PreparedRequest) -> PreparedRequest:
        """With its resumption verified here, because it may be from another worker; LayertapError.

        Errors are not cached: a lack of memory passes.
        """
        if (known := prepared.spec.resumption) is None:
            return prepared
        resumption = verify_resumption(self._model, known.start, known.shapes)
        return replace(prepared, spec=replace(prepared.spec, resumption=resumption))

    def _decode_pictures(self, index: int, first_row: int, pictures: Sequence[Data]) -> Rows:
        """The rows of a slice's pictures; UndecodedError for the first bad one."""
        parts: list[Rows] = []
        for row, picture in enumerate(pictures, first_row):
            (attempt,) = self._decode_item(index, EncodedItem(bytes(picture)))
            if isinstance(attempt, LayertapError):
                raise UndecodedError(attempt, row)
            parts.append(attempt)
        return join_rows(parts)

    def _note_hooks(self) -> None:
        if (now := time.monotonic()) >= self._hooks_at:
            self._progress.hooks, self._hooks_at = self._model.hooks, now + COUNT_SECONDS


def split_results(results: Sequence[SliceResult]) -> Iterator[list[SliceResult]]:
    """Split results into messages: large slices get their own, so that keeping one frees the others."""
    part: list[SliceResult] = []
    nbytes = 0
    for each in results:
        if part and nbytes + each.nbytes > MAX_TOGETHER_BYTES:
            yield part
            part, nbytes = [], 0
        part.append(each)
        nbytes += each.nbytes
    yield part


@contextmanager
def mute_stderr() -> Iterator[None]:
    """Keep what the block writes to stderr out of the log: libtiff has a line for each bad row of a fax.

    libmpg123 has one for each odd frame.
    """
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
