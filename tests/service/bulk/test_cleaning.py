"""Jobs that are killed while they remove what they need no more: the same command finishes, and so does another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from layertap.service.bulk import bulk
from tests.service.bulk.conftest import COUNT, read
from tests.service.cli.commands import Command

WORDS = {
    "out.parquet": ("--layers", "pool", "--pool", "mean"),
    "shards": ("--layers", "block1", "--format", "npy"),
}


class KilledError(BaseException):
    """In the place of a signal: nothing runs after it."""


@pytest.fixture(params=["before", "a part", "the parts", "the manifest"])
def killed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Cleaning ends after one of its steps."""

    def clean(target: bulk.Destination) -> None:
        parts = sorted(target.folder.glob("part-*.parquet"))
        steps = {"before": 0, "a part": 1, "the parts": len(parts), "the manifest": len(parts)}
        for path in parts[: steps[request.param]]:
            path.unlink()
        if request.param == "the manifest" and target.file is not None:
            (target.folder / bulk.NAME).unlink()
        raise KilledError

    monkeypatch.setattr(bulk, "_clean", clean)
    return monkeypatch


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", WORDS)
def test_killed(
    command: Command, folder: Path, tmp_path: Path, killed: pytest.MonkeyPatch, name: str, restart: bool
) -> None:
    """The same command says that all is there, ``--restart`` makes it anew; no part is left beside it."""
    out = tmp_path / name
    with pytest.raises(KilledError):
        command("bulk", folder, *WORDS[name], "--out", out)
    killed.undo()
    done = command("bulk", folder, *WORDS[name], "--out", out, *(["--restart"] if restart else []))
    assert done.status == 0, done.notes
    assert ("it was complete before" in done.notes) is not restart
    table = out if out.is_file() else out / bulk.INDEX
    assert len(read(table)["key"]) == COUNT
    assert not list(tmp_path.rglob("part-*.parquet"))
    assert not out.with_name(out.name + bulk.PARTS).exists() or name == "shards"
