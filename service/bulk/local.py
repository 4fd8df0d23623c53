"""Answers batches with an engine in this process. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from layertap.models.errors import RequestError
from layertap.service.bulk.job import Answer, Extractor, Outline, Question, list_reasons
from layertap.service.bulk.reductions import MIN_BLOCK
from layertap.service.bulk.sources import Entry
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.explain import comparing
from layertap.service.explain.prober import TEXT, Prober, make_picture, make_probe_input
from layertap.service.formats.plain_data import describe_receipts
from layertap.service.inputs.items import EncodedItem, TextItem
from layertap.service.schemas.bodies import CompareBody, ExtractBody, LayersBody
from layertap.service.schemas.validation_errors import validate
from layertap_client.results import Comparison

DEADLINE_S = 3600
MAX_ROWS = 32
MAX_BATCH_BYTES = 64 * 2**20


class LocalExtractor(Extractor):
    """An extractor that owns an engine."""

    def __init__(self, engine: Engine) -> None:
        settings = engine.settings
        self._engine = engine
        self.in_flight = max(settings.workers, settings.cpu_threads) + 2  # one for each, and some being decoded
        self.max_input_bytes = settings.max_body_bytes
        self.max_batch_bytes = MAX_BATCH_BYTES
        self.max_rows = min(MAX_ROWS, settings.max_batch_rows, settings.max_inputs, settings.max_queue_rows)

    async def outline(self, question: Question) -> Outline:
        """The outline of answers, by a fixed picture, sound, video or text; LayertapError."""
        handle = await self._engine.manager.get_handle(question.model, float("inf"))
        question = replace(question, truncate="end")  # the text with its prompt may be long
        example = TEXT.encode() if question.texts else make_picture()
        request, sent = _make_request(question), _make_inputs(question, [example])
        if handle.model.model_inputs.preprocess is not None and not handle.model.model_inputs.takes_pictures:
            sent = SentInputs(((0, make_probe_input(handle.model.model_inputs, preprocessed=False)[1]),))
        with self._engine.admission.admit(_make_deadline()) as ticket:
            if question.compares:
                several = SentInputs(tuple((index, sent.items[0][1]) for index in range(MIN_BLOCK)))
                return Outline.of_comparison(await self._compare(request, several, ticket))
            features = await self._engine.extract(request, sent, ticket)
            features = await Prober(self._engine).add_probes(features, request, sent, ticket)
        return Outline.of(features.model, features.fingerprint, features.arrays, describe_receipts(features))

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """The answer to a batch; RequestError, TooLargeError if a smaller one may succeed; any LayertapError."""
        request, sent = _make_request(question), _make_inputs(question, [entry.data or b"" for entry in entries])
        try:
            with self._engine.admission.admit(_make_deadline()) as ticket:
                if question.compares:
                    return Answer.of_comparison(await self._compare(request, sent, ticket))
                features = await self._engine.extract(request, sent, ticket)
        except RequestError as error:
            if not error.faults or any(fault.input is None for fault in error.faults):
                raise
            return Answer("", {}, list_reasons(error.faults))
        receipts = describe_receipts(features)
        return Answer.of(features.fingerprint, features.arrays, receipts, features.errors)

    async def _compare(self, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> Comparison:
        return Comparison.read(await comparing.compare(self._engine, request, sent, ticket))

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()


@lru_cache(maxsize=4)
def _make_request(question: Question) -> ExtractRequest:
    fields = {
        "model": question.model,
        "layers": question.entries,
        "pool": question.pool,
        "normalize": question.normalize,
        "prompt": question.prompt,
        "truncate": question.truncate,
        "isolated": True,  # for identical bits every time
        "priority": "bulk",
    }
    kind: type[LayersBody] = ExtractBody
    if question.compares:
        kind = CompareBody
        fields |= {"with" if name == "other" else name: value for name, value in question.comparison.items()}
    else:
        fields["on_error"] = "skip"
    body = validate(kind, {name: value for name, value in fields.items() if value})
    # Decoded with the batch: other batches keep the workers busy, and no row is sent between processes.
    request = ExtractRequest(decode_with_batch=True, **body.request_fields)
    request.remember()
    return request


def _make_inputs(question: Question, inputs: Sequence[bytes]) -> SentInputs:
    items = [TextItem(data.decode()) if question.texts else EncodedItem(data) for data in inputs]
    return SentInputs(tuple(enumerate(items)))


def _make_deadline() -> float:
    return time.monotonic() + DEADLINE_S
