"""A worker: a process that decodes a model's inputs and runs its forwards, one message at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from layertap.models.errors import LayertapError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.loaded_model import LoadedModel
from layertap.models.resume.resumption import Resumption
from layertap.service.allocator import release_memory
from layertap.service.engine.batch import NEVER, Batch, BatchResult, Interval, RowSlice, SliceResult, UndecodedError
from layertap.service.engine.execute.batch_runner import BatchRunner, Part
from layertap.service.engine.execute.decode import try_to_decode
from layertap.service.engine.execute.executor import CallOutcome, call_model
from layertap.service.engine.execute.processes.channel import MAX_INLINE_BYTES, Channel
from layertap.service.engine.execute.processes.forking import limit_seconds, mute_stderr
from layertap.service.engine.execute.processes.messages import BatchDecoded, CallModel, DecodeItems
from layertap.service.engine.execute.processes.progress import Progress
from layertap.service.engine.execute.threads import start_single_threaded
from layertap.service.engine.rows import Attempt, Rows, join_rows
from layertap.service.inputs.items import ImageItem, LocalItem
from layertap.service.settings import Settings


class DecodingWorker:
    """A worker that only decodes."""

    def __init__(self, inputs: ModelInputs, settings: Settings, progress: Progress) -> None:
        self._inputs = inputs
        self._progress = progress
        self._settings = settings

    def serve(self, channel: Channel) -> None:
        """Answer until the server closes the connection."""
        start_single_threaded()
        channel.send(None)
        with suppress(EOFError):
            while True:
                message = channel.receive()
                self._progress.taken += 1
                for answer in self._answer(message, channel):
                    channel.send(answer)

    def _answer(self, message: Any, channel: Channel) -> Iterator[object]:
        del channel
        if isinstance(message, DecodeItems):
            yield [self._decode_item(number, item) for number, item in enumerate(message.items)]

    def _decode_item(self, number: int, item: LocalItem) -> Sequence[Attempt]:
        quiet = mute_stderr() if isinstance(item, ImageItem) and item.is_tiff else nullcontext()
        with self._progress.decoding(number), limit_seconds(self._settings.decode_timeout_s), quiet:
            attempts = try_to_decode(item, self._inputs, self._settings, in_worker=True)
        if any(isinstance(attempt, TooLargeError) for attempt in attempts):
            release_memory()
        return attempts


class Worker(DecodingWorker):
    """A worker that also runs forwards and functions of a model in this process."""

    def __init__(self, model: LoadedModel, settings: Settings, progress: Progress) -> None:
        super().__init__(model.model_inputs, settings, progress)
        self._model = model

    def _answer(self, message: Any, channel: Channel) -> Iterator[object]:
        if isinstance(message, Batch):
            yield from split_results(self._run(message, channel))
        elif isinstance(message, CallModel):
            yield self._call(message)
        else:
            yield from super()._answer(message, channel)

    def _call(self, message: CallModel) -> CallOutcome:
        outcome = call_model(self._model, self._model.replicas[0], message.function)
        if isinstance(outcome.result, Resumption):  # the results of calls may be of any type, and stay here
            return replace(outcome, result=replace(outcome.result, skipped={}))
        return outcome

    def _run(self, batch: Batch, channel: Channel) -> BatchResult:
        """Decode the batch's pictures, refuse the slices that fail, and run the others.

        Waiting rows may join after the decoding: a batch grows until its forward begins.
        """
        refused: list[SliceResult] = []
        ready: list[Part] = []
        decodes: list[Interval] = []
        joining, may_grow = batch.slices, not batch.unsplittable and any(each.encoded for each in batch.slices)
        while joining:
            for each in joining:
                started = time.perf_counter()
                try:
                    ready.append((len(decodes), self._prepare(len(decodes), each)))
                except (LayertapError, UndecodedError) as error:
                    refused.append(SliceResult(len(decodes), 0, each.rows, error, 1))
                decodes.append((started, time.perf_counter()) if each.encoded else NEVER)
            joining = ()
            if may_grow and self._progress.rows_wait:  # else nothing would join: start the forward without asking
                channel.send(BatchDecoded())
                more: Batch = channel.receive()
                joining, batch = more.slices, replace(batch, slots=more.slots)
        result = BatchResult()
        if ready:
            model, every = self._model, self._settings.check_shared
            result = BatchRunner(model, model.replicas[0], batch, every).run(ready)
        if result.failures.out_of_memory:
            release_memory()
        self._progress.hooks = self._model.hooks
        results = [replace(each, decode=decodes[each.index]) for each in (*refused, *result.results)]
        return replace(result, results=results)

    def _prepare(self, index: int, each: RowSlice) -> RowSlice:
        """A slice with everything that its forward needs; LayertapError, UndecodedError.

        The resumption may be from another worker, so it is verified here. Errors are not cached: a lack of memory
        passes.
        """
        job, known = each.job, each.spec.resumption
        if known is not None:
            shapes = tuple(spec.shape for spec in known.inputs)
            resumption = self._model.catalogs.verify_resumption(known.start, shapes)
            spec = replace(each.spec, resumption=resumption)
            job = replace(job, prepared=replace(job.prepared, spec=spec))
        if each.encoded:
            job = replace(job, inputs=self._decode_pictures(index, each), encoded=())
        return replace(each, job=job)

    def _decode_pictures(self, index: int, each: RowSlice) -> Rows:
        """The rows of a slice's pictures; UndecodedError for the first bad one."""
        parts: list[Rows] = []
        for row, picture in enumerate(each.encoded, each.first_row):
            (attempt,) = self._decode_item(index, picture)
            if isinstance(attempt, LayertapError):
                raise UndecodedError(attempt, row)
            parts.append(attempt)
        return join_rows(parts)


def split_results(result: BatchResult) -> Iterator[BatchResult]:
    """Split a result into messages: large slices get their own, so that keeping one frees the others."""
    part: list[SliceResult] = []
    nbytes = 0
    for each in result.results:
        if part and nbytes + each.nbytes > MAX_INLINE_BYTES // 2:
            yield BatchResult(part, more=True)
            part, nbytes = [], 0
        part.append(each)
        nbytes += each.nbytes
    yield replace(result, results=part)
