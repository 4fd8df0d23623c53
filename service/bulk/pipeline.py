"""Reads, answers and writes batches at the same time, with only a few in memory."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from layertap.models.errors import RequestError, TooLargeError
from layertap.service.bulk.job import Answer, Extractor, Outline, Question, Rows, join_answers, make_rows
from layertap.service.bulk.parts import PartWriter
from layertap.service.bulk.reductions import MIN_BLOCK
from layertap.service.bulk.sources import Entry

PART_BYTES = 64 * 2**20
PART_S = 30.0  # between two parts, lost if killed; longer if a state of more than PART_BYTES is written with each
TOO_FEW = f"is in a block of fewer than {MIN_BLOCK} inputs that can be compared"

OnRows = Callable[[Rows], None]


async def write_rows(answers: AsyncGenerator[Rows, None], writer: PartWriter, on_rows: OnRows) -> None:
    """Write all rows in order; on a LayertapError, the rows answered before it are written."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "writer") as files:
        written = time.monotonic()
        try:
            async with aclosing(answers):
                async for rows in answers:
                    await loop.run_in_executor(files, writer.add, rows)
                    now = time.monotonic()
                    interval = PART_S * max(1, writer.state_nbytes / PART_BYTES)
                    if writer.nbytes >= PART_BYTES or now - written >= interval:
                        await loop.run_in_executor(files, writer.flush)
                        written = now
                    on_rows(rows)
        finally:
            files.submit(writer.flush).result()  # after a running flush, which has cleared its rows


async def answer_batches(
    batches: Iterator[list[Entry]], extractor: Extractor, question: Question, outline: Outline
) -> AsyncGenerator[Rows, None]:
    """The rows of all batches in order, read in a thread while others are answered; LayertapError."""
    loop = asyncio.get_running_loop()
    pending: deque[asyncio.Task[Rows]] = deque()
    with ThreadPoolExecutor(1, "reader") as reader:
        try:
            batch = await loop.run_in_executor(reader, next, batches, None)
            while batch is not None or pending:
                while batch is not None and len(pending) < extractor.in_flight:
                    pending.append(asyncio.create_task(_answer(batch, extractor, question, outline)))
                    batch = await loop.run_in_executor(reader, next, batches, None)
                yield await pending.popleft()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)


async def _answer(batch: Sequence[Entry], extractor: Extractor, question: Question, outline: Outline) -> Rows:
    indices = [index for index, entry in enumerate(batch) if entry.data is not None]
    answer = Answer(outline.fingerprint, {}, {})
    if indices:
        extract = _extract_sorted if question.texts else _extract
        answer = await extract(extractor, question, [batch[index] for index in indices], outline)
    return await asyncio.to_thread(make_rows, batch, answer, outline, indices)


async def _extract_sorted(
    extractor: Extractor, question: Question, entries: Sequence[Entry], outline: Outline
) -> Answer:
    """The answer to texts, in requests of texts of like length: a forward is as long as its longest text."""
    order = sorted(range(len(entries)), key=lambda index: len(entries[index].data or b""))
    parts = [order[start : start + extractor.max_rows] for start in range(0, len(order), extractor.max_rows)]
    answers = [await _extract(extractor, question, [entries[index] for index in part], outline) for part in parts]
    return join_answers(answers, parts)


async def _extract(extractor: Extractor, question: Question, entries: Sequence[Entry], outline: Outline) -> Answer:
    """The answer to entries. If it fails, each half is tried, until a failing entry is alone, or few are compared."""
    is_smallest = len(entries) < (2 * MIN_BLOCK if question.compares else 2)
    if question.compares and len(entries) < MIN_BLOCK:
        return Answer("", {}, dict.fromkeys(range(len(entries)), TOO_FEW))
    try:
        answer = await extractor.extract(question, entries)
        if question.compares and answer.errors:
            good = [index for index in range(len(entries)) if index not in answer.errors]
            rest = await _extract(extractor, question, [entries[index] for index in good], outline)
            bad = Answer("", {}, dict(enumerate(answer.errors.values())))
            return join_answers([rest, bad], [good, list(answer.errors)])
        reason = outline.find_misfit(answer.arrays) if answer.arrays else ""
        if not reason:
            return answer
    except TooLargeError as error:
        reason = error.detail
    except RequestError as error:
        if is_smallest:
            raise
        reason = error.detail
    if is_smallest:
        return Answer(outline.fingerprint, {}, dict.fromkeys(range(len(entries)), reason))
    middle = len(entries) // 2
    halves = range(middle), range(middle, len(entries))
    answers = [await _extract(extractor, question, [entries[index] for index in half], outline) for half in halves]
    return join_answers(answers, halves)
