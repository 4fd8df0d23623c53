"""A worker: a process that decodes what is sent to a model and runs its forwards, one message at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from layertap.models.errors import LayertapError, TooLargeError
from layertap.models.resume.resumption import Resumption
from layertap.models.selection.plan import Capture
from layertap.service.allocator import release_memory
from layertap.service.engine.execute.executor import CallOutcome, InProcessExecutor
from layertap.service.engine.execute.forward_batch import (
    BatchOutcome,
    ForwardBatch,
    ForwardSlice,
    Interval,
    SliceResult,
    UndecodedError,
)
from layertap.service.engine.execute.processes.channel import Channel, LargeBytes
from layertap.service.engine.execute.processes.limits import limit_seconds
from layertap.service.engine.execute.processes.messages import (
    NO_TIME,
    BatchDecoded,
    BatchRun,
    CallModel,
    DecodedItems,
    DecodeItems,
    ExtendBatch,
    FromWorker,
    Hello,
    RunBatch,
    SentResult,
    SentSlice,
    SentSpec,
    ToWorker,
)
from layertap.service.engine.execute.processes.progress import Progress
from layertap.service.engine.execute.threads import start_single_threaded
from layertap.service.engine.rows.rows import Attempt, Rows, join_rows
from layertap.service.inputs.items import ImageItem, LocalItem

Decode = Callable[[LocalItem], Sequence[Attempt]]


class DecodingWorker:
    """Decodes what the server sends; ``decode_seconds`` end a process that decodes longer."""

    def __init__(self, decode: Decode, progress: Progress, decode_seconds: float) -> None:
        self._decode_rows = decode
        self._progress = progress
        self._decode_seconds = decode_seconds

    def serve(self, channel: Channel) -> None:
        """Answer until the server closes the connection."""
        self._channel = channel
        start_single_threaded()
        channel.send(Hello())
        with suppress(EOFError):
            while True:
                channel.send(self._answer(channel.receive()))

    def _answer(self, message: Any) -> FromWorker:
        return self._decode(message)

    def _decode(self, message: DecodeItems) -> DecodedItems:
        items = (ImageItem(bytes(each.data)) if isinstance(each, LargeBytes) else each for each in message.items)
        return DecodedItems([self._decode_item(number, item) for number, item in enumerate(items)])

    def _decode_item(self, number: int, item: LocalItem) -> Sequence[Attempt]:
        with self._progress.decoding(number), limit_seconds(self._decode_seconds):
            attempts = self._decode_rows(item)
        if any(isinstance(attempt, TooLargeError) for attempt in attempts):
            release_memory()
        return attempts


class Worker(DecodingWorker):
    """Answers also what the server asks of a model in this process."""

    def __init__(self, executor: InProcessExecutor, progress: Progress, decode_seconds: float) -> None:
        inputs = executor.model.model_inputs
        super().__init__(lambda item: executor.decode([item], inputs)[0], progress, decode_seconds)
        self._executor = executor
        self._specs: dict[int, SentSpec | LayertapError] = {}  # as many as the server has places for

    def _answer(self, message: ToWorker) -> FromWorker:
        return ANSWERS[type(message)](self, message)

    def _call(self, message: CallModel) -> CallOutcome:
        outcome = self._executor.call(message.function)
        if isinstance(outcome.result, Resumption):  # what calls returned may be of any type, and stays here
            return replace(outcome, result=replace(outcome.result, skipped={}))
        return outcome

    def _run(self, message: RunBatch) -> BatchRun:
        batch = _DecodedBatch()
        self._add(batch, message)
        threads, is_open = message.threads, message.open
        while is_open and self._progress.rows_wait:  # else nothing would join: the forward begins without a question
            self._channel.send(BatchDecoded())
            more: ExtendBatch = self._channel.receive()
            self._add(batch, more)
            threads, is_open = more.threads, bool(more.slices)
        outcome = BatchOutcome()
        if batch.slices:
            whole = ForwardBatch(
                tuple(batch.slices), threads, message.threads_alone, message.padded_rows, message.unsplittable
            )
            outcome = self._executor.run_batch(0, whole, lambda: None)
        if outcome.failures.out_of_memory:
            release_memory()
        results = [batch.make_sent(result) for result in outcome.results]
        return BatchRun([*batch.refused, *results], outcome.failures, outcome.failure, self._executor.model.hooks)

    def _add(self, batch: _DecodedBatch, message: RunBatch | ExtendBatch) -> None:
        """Decode what comes for a batch."""
        for place, new in message.new_specs.items():
            self._specs[place] = self._restore(new)
        for sent in message.slices:
            spec = self._specs[sent.spec]
            if isinstance(spec, LayertapError):
                batch.refuse(sent, spec)
                continue
            inputs: Rows | UndecodedError = sent.inputs
            if sent.encoded:
                started = time.perf_counter()
                inputs = self._decode_pictures(batch.count, sent)
                batch.decodes[sent.place, sent.start] = started, time.perf_counter()
            if isinstance(inputs, UndecodedError):
                batch.refuse(sent, inputs)
            else:
                batch.add(sent, inputs, spec)

    def _decode_pictures(self, number: int, sent: SentSlice) -> Rows | UndecodedError:
        """The rows of a slice's pictures, or why there is none of the first one that has none."""
        parts: list[Rows] = []
        for row, each in enumerate(sent.encoded, sent.start):
            (attempt,) = self._decode_item(number, ImageItem(bytes(each.data)))
            if isinstance(attempt, LayertapError):
                return UndecodedError(attempt, row)
            parts.append(attempt)
        return join_rows(parts)

    def _restore(self, sent: SentSpec) -> SentSpec | LayertapError:
        """A spec with all that its forwards need; another worker may have found out how they go on from a layer."""
        known = sent.spec.resumption
        if known is None:
            return sent
        shapes = tuple(each.shape for each in known.inputs)
        try:
            resumption = self._executor.model.catalogs.verify_resumption(known.point, known.leaf, shapes)
        except LayertapError as error:
            return error
        return replace(sent, spec=replace(sent.spec, resumption=resumption))


@dataclass
class _DecodedBatch:
    """What a batch has by now: rows for its forward, and what is refused. Captures come back in the order asked for."""

    slices: list[ForwardSlice] = field(default_factory=list)
    refused: list[SentResult] = field(default_factory=list)
    captures: dict[int, tuple[Capture, ...]] = field(default_factory=dict)
    decodes: dict[tuple[int, int], Interval] = field(default_factory=dict)  # by a slice's request and first row

    @property
    def count(self) -> int:
        """How many slices there were."""
        return len(self.slices) + len(self.refused)

    def add(self, sent: SentSlice, inputs: Rows, spec: SentSpec) -> None:
        """Rows for the forward."""
        self.captures[sent.place] = spec.captures
        rows = sent.place, sent.start, sent.stop
        self.slices.append(ForwardSlice(*rows, inputs, spec.spec, first_row=sent.first_row))

    def refuse(self, sent: SentSlice, error: LayertapError | RuntimeError) -> None:
        """Rows that there are none of."""
        decode = self._find_decode(sent.place, sent.start)
        self.refused.append(SentResult(sent.place, sent.start, sent.stop, error, 1, decode=decode))

    def make_sent(self, result: SliceResult) -> SentResult:
        """What became of rows, as it goes to the server."""
        found, decode = result.results, self._find_decode(result.place, result.start)
        sent = found if isinstance(found, Exception) else [found[each] for each in self.captures[result.place]]
        return SentResult(
            result.place, result.start, result.stop, sent, result.rows, result.forward, result.copy, decode
        )

    def _find_decode(self, place: int, row: int) -> Interval:
        """When the slice was decoded that a request's row is in; it may have been halved since."""
        starts = [start for of, start in self.decodes if of == place and start <= row]
        return self.decodes[place, max(starts)] if starts else NO_TIME


ANSWERS: Mapping[type[Any], Callable[[Worker, Any], FromWorker]] = {
    DecodeItems: Worker._decode,
    RunBatch: Worker._run,
    CallModel: Worker._call,
}
