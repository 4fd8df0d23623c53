"""``--retry-errors``: pictures without a result are answered again, all others stay; whenever it is killed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from layertap.service.bulk import pipeline, retry
from layertap.service.bulk.retry import FOLDER
from tests.service.bulk.conftest import COUNT, read, write_pictures
from tests.service.cli.commands import Command

WORDS = ("--layers", "pool", "--pool", "mean")
BROKEN = ("00000.jpg", "00003.jpg", "sub/00031.png", f"sub/{COUNT - 2:05}.png")
OTHER = {
    "name": "digits",
    "source": "python:layertap.models.digits:digits",
    "weights": "random:0",
    "inputs": [{"name": "image", "shape": [3, 32, 32]}],
    "preprocess": {"resize": 32, "crop": 32},
}
OUTS = ("out.parquet", "out")


class KilledError(BaseException):
    """In the place of a signal: nothing runs after it."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Pictures, some of which are broken."""
    path = tmp_path / "source"
    write_pictures(path, COUNT)
    for name in BROKEN:
        (path / name).rename(path / f"{name}.whole")
        (path / name).write_bytes(b"broken")
    return path


def mend(source: Path, *names: str) -> None:
    """Put what was broken in its place."""
    for name in names:
        (source / f"{name}.whole").replace(source / name)


def read_rows(out: Path) -> dict[str, list[Any]]:
    """The columns of a file, or of all files of a folder."""
    tables = [read(path) for path in ([out] if out.is_file() else sorted(out.glob("part-*.parquet")))]
    return {name: [value for table in tables for value in table[name]] for name in tables[0]}


def list_retries(out: Path) -> list[Path]:
    """What is left beside it."""
    return list(out.parent.glob(FOLDER.format(name=out.name, digest="*")))


@pytest.mark.parametrize("name", OUTS)
def test_rows_take_their_places(command: Command, source: Path, tmp_path: Path, name: str) -> None:
    """Mended pictures have the rows of a job that never met them broken; others keep theirs, and are not read."""
    out, whole = tmp_path / name, tmp_path / f"whole-{name}"
    words = ("bulk", source, *WORDS, "--out")
    assert command(*words, out).status == 0
    mend(source, *BROKEN[:2])
    (source / "sub" / "00001.png").write_bytes(b"changed, but it has its row")
    done = command(*words, out, "--retry-errors")
    assert (done.status, f"{COUNT} rows, 2 of them without a result" in done.notes) == (0, True)
    assert [key for key, error in zip(*map(read_rows(out).get, ("key", "error")), strict=True) if error] == [
        *BROKEN[2:]
    ]
    mend(source, *BROKEN[2:])
    assert command(*words, out, "--retry-errors").status == 0
    assert not list_retries(out)
    done = command(*words, out, "--retry-errors")
    assert (done.status, "it was complete before" in done.notes) == (0, True)
    write_pictures(source, 2)
    assert command(*words, whole).status == 0
    assert read_rows(out) == read_rows(whole)
    if out.is_file():
        assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("step", ["before", "after"])
@pytest.mark.parametrize("name", OUTS)
def test_killed(
    command: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: str
) -> None:
    """Killed before or after rows take their places it has lost and doubled nothing, and goes on."""
    out = tmp_path / name
    words = ("bulk", source, *WORDS, "--out", out)
    assert command(*words).status == 0
    keys = read_rows(out)["key"]
    mend(source, *BROKEN)

    def die(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(retry, {"before": "_replace_rows", "after": "remove"}[step], die)
        with pytest.raises(KilledError):
            command(*words, "--retry-errors")
    assert len(list_retries(out)) == 1
    assert read_rows(out)["key"] == keys
    assert command(*words).status == 0
    assert command(*words, "--retry-errors").status == 0
    rows = read_rows(out)
    assert (rows["key"], rows["error"]) == (keys, [None] * COUNT)
    assert not list_retries(out)


def test_killed_between_parts(command: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when some of a folder's parts have their new rows and others not, it answers what is left."""
    monkeypatch.setattr(pipeline, "SHORTEST_PART_S", 0.0)
    monkeypatch.setattr(pipeline, "LONGEST_PART_S", 0.0)
    out = tmp_path / "out"
    words = ("bulk", source, *WORDS, "--out", out)
    assert command(*words).status == 0
    assert len(list(out.glob("part-*.parquet"))) == 3
    keys = read_rows(out)["key"]
    mend(source, *BROKEN)
    write, written = retry.write_batches, list[Path]()

    def write_one(batches: Any, path: Path, *options: Any) -> None:
        if written:
            raise KilledError
        written.append(path)
        write(batches, path, *options)

    with monkeypatch.context() as patch:
        patch.setattr(retry, "write_batches", write_one)
        with pytest.raises(KilledError):
            command(*words, "--retry-errors")
    assert 0 < sum(error is not None for error in read_rows(out)["error"]) < len(BROKEN)
    assert command(*words, "--retry-errors").status == 0
    rows = read_rows(out)
    assert (rows["key"], rows["error"]) == (keys, [None] * COUNT)
    assert not list_retries(out)


def test_interrupted(command: Command, source: Path, tmp_path: Path) -> None:
    """What was answered before the interruption is not answered again; ``--restart`` removes what is left of it."""
    out = tmp_path / "out.parquet"
    words = ("bulk", source, *WORDS, "--out", out)
    assert command(*words).status == 0
    mend(source, *BROKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry, "_replace_rows", lambda *_: (_ for _ in ()).throw(KilledError))
        with pytest.raises(KilledError):
            command(*words, "--retry-errors")
        patch.undo()
    assert f"{len(BROKEN)} rows are there already" in command(*words, "--retry-errors").notes
    for name in BROKEN[:1]:
        (source / name).write_bytes(b"broken")
    assert command(*words, "--restart").status == 0
    assert not list_retries(out)


def test_what_can_not_be(command: Command, source: Path, tmp_path: Path) -> None:
    """A job that is not complete, arrays, and --restart beside it are told in a line."""
    words = ("bulk", source, *WORDS, "--out", tmp_path / "out.parquet")
    done = command(*words, "--retry-errors")
    assert (done.status, "is not complete yet" in done.notes) == (2, True)
    assert command(*words).status == 0
    done = command(*words, "--retry-errors", "--restart")
    assert (done.status, "leave one out" in done.notes) == (2, True)
    arrays = ("bulk", source, "--layers", "block1", "--format", "npy", "--out", tmp_path / "arrays")
    assert command(*arrays).status == 0
    done = command(*arrays, "--retry-errors")
    assert (done.status, "--restart" in done.notes) == (2, True)


@pytest.mark.parametrize("name", OUTS)
def test_another_model(command: Command, source: Path, tmp_path: Path, name: str) -> None:
    """What is complete ends for a model of another fingerprint with a status of its own, and how to embed again."""
    out, config = tmp_path / name, tmp_path / "m.yaml"
    config.write_text(json.dumps({"models": [OTHER]}))
    words = ("bulk", source, *WORDS, "--out", out)
    assert command(*words).status == 0
    before = read_rows(out)
    words = (*words, "--config", config)
    again = [*map(str, words), "--restart"]
    for more in ((), ("--retry-errors",)):
        done = command(*words, *more)
        assert (done.status, "it was complete" in done.notes) == (3, False)
        assert shlex.join(["layertap", *again]) in done.notes
    assert read_rows(out) == before
    assert command(*again).status == 0
    assert read_rows(out)["key"] == before["key"]
    assert read_rows(out)["fingerprint"][2] != before["fingerprint"][2]
