"""Jobs that are killed while they remove what they need no more: the same command finishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from layertap.service.bulk import bulk, pipeline
from tests.service.cli.commands import Command

WORDS = ("--layers", "pool", "--pool", "mean")


class KilledError(BaseException):
    """In the place of a signal: nothing runs after it."""


@pytest.fixture(autouse=True)
def _a_part_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PART_S", 0.0)


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
def test_killed_at_the_end(command: Command, folder: Path, tmp_path: Path, step: int, restart: bool) -> None:
    """The same command says that all is there, ``--restart`` makes it anew; no part is left beside it."""
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
