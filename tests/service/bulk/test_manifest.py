"""What a job has written down of itself, and what others put in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layertap.service.bulk.job import BatchLimits, Column, Outline
from layertap.service.bulk.manifest import NAME, Manifest
from tests.service.cli.commands import Command

OUTLINE = Outline("net", "f", {"x": Column((2,), "float32")}, {"x": {"row_axis": 0, "probe": [0.5]}})
MANIFEST = Manifest({"model": None, "layers": ["x"], "source": "/photos"}, OUTLINE, BatchLimits(32, 1000))


def change(field: str, value: Any, folder: Path) -> bytes:
    """A manifest with another value somewhere."""
    MANIFEST.save(folder)
    return json.dumps({**json.loads((folder / NAME).read_text()), field: value}).encode()


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("format", 1), ("outline", "o"), ("limits", {"rows": "many"})],
)
def test_with_a_wrong_field(command: Command, folder: Path, tmp_path: Path, field: str, value: Any) -> None:
    """A field of another type, or another version's number, is told as the whole file would be."""
    out = tmp_path / "out"
    out.mkdir()
    (out / NAME).write_bytes(change(field, value, tmp_path))
    done = command("bulk", folder, "--out", out)
    assert (done.status, "is no manifest of a job" in done.notes) == (2, True)


def test_the_model_that_answered(command: Command, folder: Path, tmp_path: Path) -> None:
    """A job that was begun without a model's name is the same with the name of the one that answered, and no other."""
    words = ("bulk", folder / "0000*.jpg", "--out", tmp_path / "out")
    assert command(*words).status == 0
    for again in ((), ("--model", "digits")):
        assert "it was complete before" in command(*words, *again).notes
    done = command(*words, "--model", "other")
    assert (done.status, "model" in done.notes, "--restart" in done.notes) == (2, True, True)
