"""A worker: a process that decodes what is sent to a model and runs its forwards, one message at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from layertap.models.errors import LayertapError
from layertap.models.resume.resumption import Resumption
from layertap.service.engine.executor import CallOutcome, InProcessExecutor
from layertap.service.engine.forward_batch import BatchFailures, ForwardBatch, ForwardSlice, ForwardSpec, SliceResult
from layertap.service.workers.channel import Channel
from layertap.service.workers.limits import limit_seconds
from layertap.service.workers.messages import (
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


class Worker:
    """Answers what the server asks of a model in this process; ``decode_seconds`` end a process that decodes longer."""

    def __init__(self, executor: InProcessExecutor, decode_seconds: float) -> None:
        self._executor = executor
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
        with limit_seconds(self._decode_seconds):
            return DecodedItem(self._executor.decode(message.item, self._executor.model.model_inputs))

    def _call(self, message: CallModel) -> CallOutcome:
        outcome = self._executor.call(message.function)
        if isinstance(outcome.result, Resumption):  # what calls returned may be of any type, and stays here
            return replace(outcome, result=replace(outcome.result, skipped={}))
        return outcome

    def _run(self, message: RunBatch) -> BatchRun:
        try:
            return self._run_batch(message)
        except LayertapError as error:
            no_time = (0.0, 0.0)
            refused = [
                SentResult(each.place, each.start, each.stop, error, 0, no_time, no_time) for each in message.slices
            ]
            return BatchRun(refused, BatchFailures(), "", self._executor.model.hooks)

    def _run_batch(self, message: RunBatch) -> BatchRun:
        for place, sent in message.new_specs.items():
            self._specs[place] = replace(sent, spec=self._restore(sent.spec))
        slices = tuple(self._take_slice(each) for each in message.slices)
        batch = ForwardBatch(slices, message.threads, message.padded_rows, message.unsplittable)
        outcome = self._executor.run_batch(0, batch)
        specs = {each.place: self._specs[each.spec] for each in message.slices}
        results = [_make_sent(result, specs[result.place]) for result in outcome.results]
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

    def _take_slice(self, sent: SentSlice) -> ForwardSlice:
        return ForwardSlice(sent.place, sent.start, sent.stop, sent.inputs, self._specs[sent.spec].spec, sent.whole)


def _make_sent(result: SliceResult, spec: SentSpec) -> SentResult:
    results = result.results
    if isinstance(results, Mapping):
        ordered = [results[capture] for capture in spec.captures]
        return SentResult(result.place, result.start, result.stop, ordered, result.rows, result.forward, result.copy)
    return SentResult(result.place, result.start, result.stop, results, result.rows, result.forward, result.copy)


ANSWERS: Mapping[type[Any], Callable[[Worker, Any], FromWorker]] = {
    DecodeItem: Worker._decode,
    RunBatch: Worker._run,
    CallModel: Worker._call,
}
