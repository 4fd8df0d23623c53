"""Jobs that could go wrong unseen: what is whose, what an odd picture does to others, which errors are rows."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from layertap.models.errors import LayertapError, RequestError, TooLargeError
from layertap.service.bulk.job import Answer, Column, Outline, Question, Rows, make_rows
from layertap.service.bulk.manifest import NAME
from layertap.service.bulk.parts import PartWriter
from layertap.service.bulk.pipeline import answer_batches, write_rows
from layertap.service.bulk.sources import Entry
from tests.marks import slow
from tests.service.bulk.conftest import read, write_pictures
from tests.service.cli.commands import Command
from tests.service.support import picture

WINDOWED = {"inputs": [{"name": "x", "shape": [3, 32, 32]}], "preprocess": {"resize": 32, "crop": 32}}
OTHER = {
    "name": "digits",
    "source": "python:layertap.models.digits:digits",
    "weights": "random:0",
    "inputs": [{"name": "image", "shape": [3, 32, 32]}],
    "preprocess": {"resize": 32, "crop": 32},
}
OUTLINE = Outline("net", "f", {"x": Column((2,), "float32", "x")}, {})


def test_restart_keeps_what_is_of_others(command: Command, folder: Path, tmp_path: Path) -> None:
    """``--restart`` removes what a job has written and nothing else, whatever a folder's manifest.json is of."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("manifest.json", "part-1.txt", "photo.png"):
        (theirs / name).write_text(json.dumps({"name": "an app"}))
    file = tmp_path / "file.parquet"
    pq.write_table(pa.table({"a": [1]}), file)
    kept = file.read_bytes()
    for out, *words in ((theirs, "--restart"), (file, "--restart"), (file,)):
        done = command("bulk", folder, "--out", out, *words)
        assert (done.status, "choose another --out" in done.notes) == (2, True)
    assert sorted(path.name for path in theirs.iterdir()) == ["manifest.json", "part-1.txt", "photo.png"]
    assert file.read_bytes() == kept


def test_restart_of_what_cannot_be(command: Command, folder: Path, tmp_path: Path) -> None:
    """``--restart`` with a mistake beside it takes nothing away: what is there took a night, perhaps."""
    out = tmp_path / "out.parquet"
    assert command("bulk", folder, "--out", out).status == 0
    before = out.read_bytes()
    for words in (("nowhere",), (folder, "--layers", "block9"), (folder, "--layers", "block1")):
        assert command("bulk", *words, "--out", out, "--restart").status == 2
        assert out.read_bytes() == before


@pytest.mark.parametrize("out", ["out.parquet", slow("out")])
def test_complete_and_of_other_pictures(command: Command, folder: Path, tmp_path: Path, out: str) -> None:
    """A job that is complete says so; where pictures have come or gone since, that it is not of these."""
    source = tmp_path / "pictures"
    source.mkdir()
    for name in ("a.png", "b.png"):
        (source / name).write_bytes(picture())
    words = ("bulk", source, "--out", tmp_path / out)
    assert "complete before" not in command(*words).notes
    before = (tmp_path / out).stat()
    again = command(*words)
    assert (again.status, "2 rows, 0 of them without a result; it was complete before" in again.notes) == (0, True)
    done = command(*words, "--layers", "pool", "--pool", "max")
    assert (done.status, "was made with" in done.notes, "--restart" in done.notes) == (2, True, True)
    assert (tmp_path / out).stat() == before
    (source / "c.png").write_bytes(picture())
    done = command(*words)
    assert (done.status, "there is c.png now" in done.notes, "--restart" in done.notes) == (2, True, True)
    for name in ("b.png", "c.png"):
        (source / name).unlink()
    done = command(*words)
    assert (done.status, "b.png is gone" in done.notes) == (2, True)
    assert command(*words, "--restart").status == 0
    assert command(*words).status == 0


class Rule:
    """Answers entries by what is in them: "l" too large, "r" refused, "m" another shape, "many" too many at once.

    Some turns of the event loop later.
    """

    in_flight = 2
    max_input_bytes = max_batch_bytes = max_rows = 100

    async def outline(self, question: Question) -> Outline:
        """Always the same."""
        return OUTLINE

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """A row of ones for each."""
        for _ in range(10):
            await asyncio.sleep(0)
        data = [entry.data for entry in entries]
        if b"l" in data:
            raise TooLargeError("it is too large")
        if b"r" in data or (b"many" in data and len(data) > 1):
            raise RequestError("there is no such layer")
        width = 3 if b"m" in data else 2
        return Answer("f", {"x": np.ones((len(data), width), np.float32)}, {})

    async def close(self) -> None:
        """Nothing."""


def run(tmp_path: Path, data: str) -> list[str | None]:
    """The errors of a batch's rows; they are written."""
    rows: list[Rows] = []
    writer = PartWriter(tmp_path, OUTLINE, "parquet", 0)
    batch = [Entry(str(number), word.encode()) for number, word in enumerate(data.split())]
    answers = answer_batches(iter([batch]), Rule(), Question(None), OUTLINE)
    asyncio.run(write_rows(answers, writer, rows.append))
    (path,) = tmp_path.glob("*.parquet")
    written = read(path)
    assert [vector == [1, 1] for vector in written["x"]] == [error is None for error in written["error"]]
    return list(rows[0].errors)


def test_what_is_odd_ends_up_alone(tmp_path: Path) -> None:
    """Of a batch that is refused as a whole only the pictures that are the reason give nothing."""
    errors = run(tmp_path, "a l b many m c d l")
    assert [error is None for error in errors] == [True, False, True, True, False, True, True, False]
    assert errors[1] == errors[7] == "it is too large"


def test_a_refusal_of_every_picture(tmp_path: Path) -> None:
    """What is refused though it is alone, and for no picture's sake, is no row: the job ends, and may go on later."""
    with pytest.raises(RequestError, match="no such layer"):
        run(tmp_path, "r")


@pytest.mark.slow
def test_broken_pictures_with_workers(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes give the bits and the reasons that threads give, also in batches with broken pictures."""
    source = tmp_path / "source"
    write_pictures(source, 80)
    for name in ("00003.jpg", "00006.jpg", "sub/00079.png"):
        (source / name).write_bytes((source / name).read_bytes()[:200])
    for workers in ("0", "2"):
        monkeypatch.setenv("LAYERTAP_WORKERS", workers)
        done = command("bulk", source, "--layers", "block2,pool", "--pool", "mean", "--out", tmp_path / workers)
        assert done.status == 0
    threads, processes = (read(tmp_path / workers / "part-000000000000.parquet") for workers in ("0", "2"))
    assert threads == processes
    assert sum(error is not None for error in threads["error"]) == 3


def test_windows_are_no_rows(command: Command, folder: Path, tmp_path: Path) -> None:
    """A layer that folds windows of a picture into the batch is refused: its rows would be given to other pictures."""
    config = {"models": [{"name": "swin", "source": "python:tests.nets:swin", "weights": "random:0", **WINDOWED}]}
    (tmp_path / "m.yaml").write_text(json.dumps(config))
    words = ("--config", tmp_path / "m.yaml", "--out", tmp_path / "out")
    done = command("bulk", folder / "*.jpg", "--layers", "features.1.0.attn:attention", *words)
    assert done.status == 2
    assert "for each input" in done.notes
    assert command("bulk", folder / "*.jpg", "--layers", "features.1.0", "--pool", "mean", *words).status == 0


def test_rows_of_others() -> None:
    """An answer that has not one row for each picture is refused, whoever gave it."""
    outline = Outline("m", "f", {"x": Column((2,), "float32", "x")}, {})
    answer = Answer("f", {"x": np.zeros((4, 2), np.float32)}, {})
    with pytest.raises(LayertapError, match="x has 4 rows for 1 inputs"):
        make_rows([Entry("a", "0" * 64, b"")], answer, outline, [0])


def _read_rows(out: Path) -> dict[str, list[Any]]:
    """The columns of a file, or of the only one of a folder."""
    return read(out if out.is_file() else next(out.glob("part-*.parquet")))


@pytest.mark.parametrize("name", ["out.parquet", slow("out")])
def test_another_model(command: Command, folder: Path, tmp_path: Path, name: str) -> None:
    """What is complete ends for a model of another fingerprint with a status of its own, and how to embed again."""
    out, config = tmp_path / name, tmp_path / "m.yaml"
    config.write_text(json.dumps({"models": [OTHER]}))
    words = ("bulk", folder / "*.jpg", "--layers", "pool", "--pool", "mean", "--out", out)
    assert command(*words).status == 0
    before = _read_rows(out)
    words = (*words, "--config", config)
    again = [*map(str, words), "--restart"]
    done = command(*words)
    assert (done.status, "it was complete" in done.notes) == (3, False)
    assert shlex.join(["layertap", *again]) in done.notes
    assert _read_rows(out) == before
    assert command(*again).status == 0
    assert _read_rows(out)["key"] == before["key"]
    assert _read_rows(out)["fingerprint"][2] != before["fingerprint"][2]


@pytest.mark.parametrize("data", [b"[]", b"[" * 100_000, b"\xff"])
def test_of_a_wrong_type(command: Command, folder: Path, tmp_path: Path, data: bytes) -> None:
    """Whatever is in a manifest's place is one line, without ``--restart`` as with it, and stays."""
    out = tmp_path / "out"
    out.mkdir()
    (out / NAME).write_bytes(data)
    for words in ((), ("--restart",)):
        done = command("bulk", folder, "--out", out, *words)
        assert (done.status, len(done.notes.splitlines())) == (2, 1)
        assert "is no manifest of a job" in done.notes
        assert "choose another --out" in done.notes
        assert "--restart" not in done.notes  # it would not help
    assert (out / NAME).read_bytes() == data


def test_the_model_that_answered(command: Command, folder: Path, tmp_path: Path) -> None:
    """A job that was begun without a model's name is the same with the name of the one that answered, and no other."""
    words = ("bulk", folder / "0000*.jpg", "--out", tmp_path / "out")
    assert command(*words).status == 0
    for again in ((), ("--model", "digits")):
        assert "it was complete before" in command(*words, *again).notes
    done = command(*words, "--model", "other")
    assert (done.status, "model" in done.notes, "--restart" in done.notes) == (2, True, True)
