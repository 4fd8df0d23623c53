"""What a job has written down of itself, and what others put in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from layertap.service.bulk.manifest import NAME
from tests.service.cli.commands import Command


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
