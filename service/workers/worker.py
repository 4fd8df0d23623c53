"""A worker: a process that decodes what is sent to a model and runs its forwards, one message at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layertap.models.errors import LayertapError
from layertap.models.resume.resumption import Resumption
from layertap.service.engine.executor import CallOutcome, InProcessExecutor
from layertap.service.engine.forward_batch import (
    BatchFailures,
    BatchOutcome,
    ForwardBatch,
    ForwardSlice,
    ForwardSpec,
    Interval,
    SliceResult,
    UndecodedError,
)
from layertap.service.engine.rows import Attempt
from layertap.service.inputs.items import ImageItem, LocalItem
from layertap.service.workers.channel import Channel
from layertap.service.workers.limits import limit_seconds
from layertap.service.workers.messages import (
    NO_TIME,
    BatchRun,
    CallModel,
    DecodedItem,
    DecodeItem,
    FromWorker,
    Hello,
    RunBatch,
    SentResult,
    SentSlice,
    SentSpec,
    ToWorker,
)
from layertap.service.workers.progress import Progress


class Worker:
    """Answers what the server asks of a model in this process; ``decode_seconds`` end a process that decodes longer."""

    def __init__(self, executor: InProcessExecutor, progress: Progress, decode_seconds: float) -> None:
        self._executor = executor
        self._progress = progress
        self._decode_seconds = decode_seconds
        self._specs: dict[int, SentSpec] = {}  # as many as the server has places for

    def serve(self, channel: Channel) -> None:
        """Answer until the server closes the connection."""
        self._executor.start_thread()
        channel.send(Hello())
        while True:
            try:
                message = channel.receive()
            except EOFError:
                return
            answer = self._answer(message)
            del message  # it holds rows
            channel.send(answer)

    def _answer(self, message: ToWorker) -> FromWorker:
        answer = ANSWERS[type(message)]
        return answer(self, message)

    def _decode(self, message: DecodeItem) -> DecodedItem:
        return DecodedItem(self._decode_item(0, message.item))

    def _decode_item(self, number: int, item: LocalItem) -> Sequence[Attempt]:
        with self._progress.decoding(number), limit_seconds(self._decode_seconds):
            return self._executor.decode(item, self._executor.model.model_inputs)

    def _call(self, message: CallModel) -> CallOutcome:
        outcome = self._executor.call(message.function)
        if isinstance(outcome.result, Resumption):  # what calls returned may be of any type, and stays here
            return replace(outcome, result=replace(outcome.result, skipped={}))
        return outcome

    def _run(self, message: RunBatch) -> BatchRun:
        try:
            return self._run_batch(message)
        except LayertapError as error:
            refused = [SentResult(each.place, each.start, each.stop, error, 0) for each in message.slices]
            return BatchRun(refused, BatchFailures(), "", self._executor.model.hooks)

    def _run_batch(self, message: RunBatch) -> BatchRun:
        for place, new in message.new_specs.items():
            self._specs[place] = replace(new, spec=self._restore(new.spec))
        slices: list[ForwardSlice] = []
        refused: list[SliceResult] = []
        decodes: dict[int, Interval] = {}
        for number, sent in enumerate(message.slices):
            started = time.perf_counter()
            taken = self._take_slice(number, sent)
            if sent.encoded is not None:
                decodes[sent.place] = started, time.perf_counter()
            if isinstance(taken, ForwardSlice):
                slices.append(taken)
            else:
                refused.append(taken)
        outcome = BatchOutcome()
        if slices:
            batch = ForwardBatch(tuple(slices), message.threads, message.padded_rows, message.unsplittable)
            outcome = self._executor.run_batch(0, batch)
        specs = {each.place: self._specs[each.spec] for each in message.slices}
        results = [
            _make_sent(result, specs[result.place], decodes.get(result.place, NO_TIME))
            for result in (*refused, *outcome.results)
        ]
        return BatchRun(results, outcome.failures, outcome.failure, self._executor.model.hooks)

    def _restore(self, spec: ForwardSpec) -> ForwardSpec:
        """A spec with all that its forwards need; another worker may have found out how they go on from a layer."""
        if spec.resumption is None:
            return spec
        known = spec.resumption
        shapes = tuple(each.shape for each in known.inputs)
        return replace(
            spec, resumption=self._executor.model.catalogs.verify_resumption(known.point, known.leaf, shapes)
        )

    def _take_slice(self, number: int, sent: SentSlice) -> ForwardSlice | SliceResult:
        """Rows as a forward takes them; a picture is decoded, or why it can't be is its result."""
        inputs = sent.inputs
        if sent.encoded is not None:
            (attempt,) = self._decode_item(number, ImageItem(bytes(sent.encoded)))
            if isinstance(attempt, LayertapError):
                return SliceResult(sent.place, sent.start, sent.stop, UndecodedError(attempt), 1)
            inputs = attempt
        return ForwardSlice(sent.place, sent.start, sent.stop, inputs, self._specs[sent.spec].spec, sent.whole)


def _make_sent(result: SliceResult, spec: SentSpec, decode: Interval) -> SentResult:
    results = result.results
    ordered = results if isinstance(results, Exception) else [results[capture] for capture in spec.captures]
    return SentResult(
        result.place, result.start, result.stop, ordered, result.rows, result.forward, result.copy, decode
    )


ANSWERS: Mapping[type[Any], Callable[[Worker, Any], FromWorker]] = {
    DecodeItem: Worker._decode,
    RunBatch: Worker._run,
    CallModel: Worker._call,
}
