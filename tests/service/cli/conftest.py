"""Pictures on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.support import picture


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
