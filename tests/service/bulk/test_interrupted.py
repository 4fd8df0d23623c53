"""Jobs that are killed, and gone on with: in the end they have what one uninterrupted run gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from layertap.service.bulk import bulk, pipeline
from layertap.service.bulk.manifest import lock_folder
from tests.service.bulk.conftest import read, start, write_pictures
from tests.service.cli.commands import Command
from tests.service.gated_server import wait_until

WORDS = ("--layers", "pool", "--pool", "mean")
COUNT = 600


@pytest.mark.slow
def test_killed(command: Command, tmp_path: Path) -> None:
    """Killed, a job refuses other inputs and layers, and gives the file of one run, each broken picture named."""
    source, whole, killed = tmp_path / "source", tmp_path / "whole.parquet", tmp_path / "killed.parquet"
    write_pictures(source, COUNT)
    bad = [f"{number:05}.jpg" for number in range(0, COUNT, 120)]
    for name in bad:
        (source / name).write_bytes(b"\xff\xd8\xff" + bytes(50))
    words, parts = ("bulk", source, *WORDS, "--out"), tmp_path / "killed.parquet.parts"
    process = start(*words, killed)
    wait_until(lambda: bool(list(parts.glob("part-*.parquet"))) or process.poll() is not None)
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert not killed.exists()
    (source / "00000-first.jpg").write_bytes((source / "00003.jpg").read_bytes())
    done = command(*words, killed)
    assert done.status == 2
    assert "other inputs than before" in done.notes
    assert "--restart" in done.notes
    (source / "00000-first.jpg").unlink()
    done = command("bulk", source, "--layers", "block3", "--pool", "mean", "--out", killed)
    assert done.status == 2
    assert "layers ['pool']" in done.notes
    done = command(*words, killed)
    assert done.status == 0, done.notes
    assert "rows are there already" in done.notes
    assert command(*words, whole).status == 0
    assert killed.read_bytes() == whole.read_bytes()
    rows = read(whole)
    assert len(set(rows["key"])) == COUNT
    assert [key for key, error in zip(rows["key"], rows["error"], strict=True) if error] == bad
    assert all(len(vector) == 64 for vector, error in zip(rows["pool"], rows["error"], strict=True) if not error)


def test_one_process_at_a_time(command: Command, folder: Path, tmp_path: Path) -> None:
    """Nobody writes where another job does."""
    with lock_folder(tmp_path):
        done = command("bulk", folder, *WORDS, "--out", tmp_path)
    assert (done.status, "another process writes" in done.notes) == (2, True)


# Killed while it removes what it needs no more


class KilledError(BaseException):
    """In the place of a signal: nothing runs after it."""


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Cleaning ends after so many steps: before the first part, the manifest (3), the lock or the folder (5) goes."""
    clear, steps = bulk._clear, iter(range(step + 1))

    def die_at_last(remove: Callable[[Path], None]) -> Callable[[Path], None]:
        def remove_or_die(path: Path) -> None:
            if next(steps) == step:
                raise KilledError
            remove(path)

        return remove_or_die

    def clear_partly(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "unlink", die_at_last(Path.unlink))
            patch.setattr(Path, "rmdir", die_at_last(Path.rmdir))
            clear(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "_clear", clear_partly)
        yield


@pytest.mark.parametrize(("step", "restart"), [(0, False), (5, False), (3, True)])
def test_killed_at_the_end(
    command: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, restart: bool
) -> None:
    """The same command says that all is there, ``--restart`` makes it anew; no part is left beside it."""
    monkeypatch.setattr(pipeline, "PART_S", 0.0)
    out = tmp_path / "out.parquet"
    words = ("bulk", folder, *WORDS, "--out", out)
    with killed_at(step), pytest.raises(KilledError):
        command(*words)
    before = out.read_bytes()
    done = command(*words, *(["--restart"] if restart else []))
    assert done.status == 0, done.notes
    assert ("it was complete before" in done.notes) is not restart
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
