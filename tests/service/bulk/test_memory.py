"""What a job holds at once does not grow with its source: counted, in pictures and in bytes of results."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from layertap.service.bulk import pipeline
from layertap.service.bulk.job import Answer, BatchLimits, Column, Outline, Question, Rows, cut_batches
from layertap.service.bulk.parts import PartWriter, find_parts
from layertap.service.bulk.sources import Entry

PICTURES, ROWS, IN_FLIGHT, WIDTH = 1000, 4, 3, 16
OUTLINE = Outline("net", "f", {"x": Column((WIDTH,), "float32")}, {})
PART_BYTES = 10 * ROWS * WIDTH * 4  # ten batches


class Source:
    """Pictures that are made one by one, and counted as long as anybody holds them."""

    def __init__(self) -> None:
        self.alive = weakref.WeakSet[Entry]()
        self.most = 0

    def iterate(self) -> Iterator[Entry]:
        """All of them."""
        for number in range(PICTURES):
            entry = Entry(str(number), bytes(number))
            self.alive.add(entry)
            self.most = max(self.most, len(self.alive))
            yield entry


class Ones:
    """Answers a row of ones for each picture, some turns of the event loop later."""

    in_flight = IN_FLIGHT
    max_input_bytes = max_batch_bytes = max_rows = PICTURES

    async def outline(self, question: Question) -> Outline:
        """Always the same."""
        return OUTLINE

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """Rows."""
        for _ in range(10):
            await asyncio.sleep(0)
        return Answer("f", {"x": np.ones((len(entries), WIDTH), np.float32)}, {})

    async def close(self) -> None:
        """Nothing."""


def test_what_is_held_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are held by the batches in flight, the next one and the one being read; results up to a part's bytes."""
    monkeypatch.setattr(pipeline, "PART_BYTES", PART_BYTES)
    source, waiting = Source(), list[int]()
    writer = PartWriter(tmp_path, OUTLINE, "parquet", 0)

    def note(rows: Rows) -> None:
        waiting.append(writer.nbytes)

    batches = cut_batches(source.iterate(), BatchLimits(ROWS, 2**20))
    answers = pipeline.answer_batches(batches, Ones(), Question(None), OUTLINE)
    asyncio.run(pipeline.write_rows(answers, writer, note))
    assert find_parts(tmp_path)[1] == PICTURES
    assert IN_FLIGHT * ROWS <= source.most <= (IN_FLIGHT + 3) * ROWS
    assert len(waiting) == PICTURES // ROWS
    assert max(waiting) < PART_BYTES
