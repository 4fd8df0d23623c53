"""Batches answered by an engine of this process. Imports torch."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from layertap.models.errors import Fault, RequestError
from layertap.models.selection.hook_points import Embedding, Reduction, Selector
from layertap.models.selection.selectors import parse_selector
from layertap.service.bulk.entries import Entry, cut_batches
from layertap.service.bulk.job import Answer, Column, Outline, Question, RemainingJob, Rows, check_rows
from layertap.service.bulk.pipeline import answer_batches
from layertap.service.engine.engine import Engine
from layertap.service.engine.picture_rows import get_preprocessing
from layertap.service.engine.prober import Prober
from layertap.service.engine.request import ExtractRequest
from layertap.service.formats.plain_data import describe_receipts
from layertap.service.inputs.items import ImageItem

DEADLINE_S = 3600
MAX_ROWS = 32
MAX_BATCH_BYTES = 64 * 2**20


class LocalExtractor:
    """An engine, which it owns."""

    def __init__(self, engine: Engine) -> None:
        settings = engine.settings
        self._engine = engine
        self.in_flight = max(settings.workers, settings.cpu_threads) + 2  # one for each, and some that are decoded
        self.max_picture_bytes = settings.max_body_bytes
        self.max_batch_bytes = MAX_BATCH_BYTES
        self.max_rows = min(MAX_ROWS, settings.max_batch_rows, settings.max_inputs, settings.max_queue_rows)

    async def outline(self, question: Question) -> Outline:
        """What answers will be like, by the answer to a fixed picture; LayertapError."""
        worker = await self._engine.manager.get_worker(question.model, float("inf"))
        get_preprocessing(worker.model.model_inputs)
        selectors, embedding = _read_question(question)
        features = await Prober(self._engine).probe(worker.name, selectors, embedding, _make_deadline())
        columns = {
            key: Column(_drop_rows(array.shape, features.receipts[key].row_axis, key), array.dtype.name)
            for key, array in features.arrays.items()
        }
        return Outline(features.model, features.fingerprint, columns, describe_receipts(features))

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """What a batch gives; RequestError, TooLargeError where fewer may be answered; any error of the tree."""
        selectors, embedding = _read_question(question)
        request = ExtractRequest(
            model=question.model,
            items=tuple((place, ImageItem(entry.data or b"")) for place, entry in enumerate(entries)),
            selectors=selectors,
            embedding=embedding,
            on_error="skip",
            isolated=True,  # the same bits every time
            decode_with_batch=True,  # other batches keep the other workers busy, and no row crosses between processes
            priority="bulk",
        )
        try:
            with self._engine.admission.admit(_make_deadline()) as admission:
                features = await self._engine.extract(request, admission)
        except RequestError as error:
            if not error.faults or any(fault.input is None for fault in error.faults):
                raise
            return Answer("", {}, _list_reasons(error.faults))
        return Answer(features.fingerprint, features.arrays, _list_reasons(features.errors))

    def answer(self, remaining: RemainingJob) -> AsyncGenerator[Rows, None]:
        """The rows of all batches of ``remaining``, in their order; LayertapError."""
        return answer_batches(
            cut_batches(remaining.entries, remaining.limits), self, remaining.question, remaining.outline
        )

    async def close(self) -> None:
        """End the engine."""
        await self._engine.close()


def _read_question(question: Question) -> tuple[tuple[Selector, ...], Embedding | None]:
    """Selectors, or the embedding where no layers are named; SelectorError."""
    if not question.layers:
        return (), Embedding(question.pool, question.normalize)
    reduction = Reduction(pool=question.pool or "none", normalize=question.normalize)
    return tuple(replace(parse_selector(layer), reduction=reduction) for layer in question.layers), None


def _drop_rows(shape: tuple[int, ...], row_axis: int | None, key: str) -> tuple[int, ...]:
    check_rows(key, row_axis, shape[0] if shape else 0)
    return shape[1:]


def _list_reasons(faults: Sequence[Fault]) -> dict[int, str]:
    return {fault.input: fault.detail for fault in faults if fault.input is not None}


def _make_deadline() -> float:
    return time.monotonic() + DEADLINE_S
