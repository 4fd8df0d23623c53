"""Parts become one file: the rows that were written, and the same bytes wherever a part ended."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from layertap.service.bulk import parts, pipeline
from layertap.service.bulk.job import BatchLimits, Column, Outline, Question, Rows, cut_batches
from layertap.service.bulk.parts import PartWriter, count_rows, find_parts, list_parts, merge_parts
from layertap.service.bulk.sources import Entry
from tests.service.bulk.conftest import read
from tests.service.bulk.test_odd_jobs import OUTLINE as RULE_OUTLINE
from tests.service.bulk.test_odd_jobs import Rule

OUTLINE = Outline("net", "f", {"x": Column((3,), "float32", "x")}, {})
COUNT, GROUP_ROWS = 40, 7
VECTORS = np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)
BAD = (0, 6, 7, 13, 20, 21, COUNT - 1)


def make_rows(start: int, end: int) -> Rows:
    """Some rows of all."""
    numbers = range(start, end)
    errors = ["broken" if number in BAD else None for number in numbers]
    good = [number for number in numbers if number not in BAD]
    return Rows([str(number) for number in numbers], ["0"] * len(numbers), errors, "f", {"x": VECTORS[good]})


@pytest.mark.parametrize("ends", [[1, 40], [7, 14, 40], [3, 20, 22, 39, 40]], ids=str)
def test_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[int]) -> None:
    """A file has all rows in their order, in groups of the same size, and the bytes of one out of a single part."""
    monkeypatch.setattr(parts, "GROUP_ROWS", GROUP_ROWS)
    for name, places in (("one", [0, COUNT]), ("several", [0, *ends])):
        folder = tmp_path / name
        folder.mkdir()
        writer = PartWriter(folder, OUTLINE, "parquet", 0)
        for start, end in pairwise(places):
            writer.add(make_rows(start, end))
            writer.flush()
        assert len(list_parts(folder)) == len(places) - 1
        merge_parts(list_parts(folder), tmp_path / f"{name}.parquet", {"model": "net"}, 12)
    rows = read(tmp_path / "several.parquet")
    assert rows["key"] == [str(number) for number in range(COUNT)]
    assert rows["x"] == [None if number in BAD else VECTORS[number].tolist() for number in range(COUNT)]
    assert (tmp_path / "several.parquet").read_bytes() == (tmp_path / "one.parquet").read_bytes()


# What a job holds at once does not grow with its source


PICTURES, ROWS = 1000, 4
PART_BYTES = 10 * ROWS * 2 * 4  # ten batches of two numbers each


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


def test_what_is_held_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are held by the batches in flight, the next one and the one being read; results up to a part's bytes."""
    monkeypatch.setattr(pipeline, "PART_BYTES", PART_BYTES)
    source, waiting = Source(), list[int]()
    writer = PartWriter(tmp_path, RULE_OUTLINE, "parquet", 0)

    def note(rows: Rows) -> None:
        waiting.append(writer.nbytes)

    batches = cut_batches(source.iterate(), BatchLimits(ROWS, 2**20))
    answers = pipeline.answer_batches(batches, Rule(), Question(None), RULE_OUTLINE)
    asyncio.run(pipeline.write_rows(answers, writer, note))
    assert count_rows(find_parts(tmp_path)) == (PICTURES, 0)
    # A thread that has answered a batch may still hold it.
    assert Rule.in_flight * ROWS <= source.most <= (Rule.in_flight + 4) * ROWS
    assert len(waiting) == PICTURES // ROWS
    assert max(waiting) < PART_BYTES
