"""Commands run in the tests' process, and pictures on disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from layertap.service.cli import console
from layertap.service.cli.main import main
from tests.service.cli.commands import Command, Done
from tests.service.support import picture


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``layertap`` in this process."""
    for printer in (console.stdout, console.stderr):
        monkeypatch.setattr(printer, "width", 200)

    def run(*words: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["layertap", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Done(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Pictures on disk."""
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(picture(number))
    return files


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A file that is no picture."""
    file = tmp_path / "bad.png"
    file.write_bytes(b"no picture")
    return file
