"""Files are read whole, up to a limit, whatever size they are said to have."""

from __future__ import annotations

from pathlib import Path

import pytest

from layertap.service.inputs.files import FileError, read_regular_file

LIMIT = 32 * 2**20


@pytest.mark.parametrize("size", [0, 1, 1000, 1001])
def test_limit(tmp_path: Path, size: int) -> None:
    """All bytes are there; one more than the limit is refused."""
    (tmp_path / "a").write_bytes(data := bytes(number % 251 for number in range(size)))
    assert read_regular_file(tmp_path / "a") == data
    if size <= 1000:
        assert read_regular_file(tmp_path / "a", 1000) == data
    else:
        with pytest.raises(FileError, match="more than 1000 bytes"):
            read_regular_file(tmp_path / "a", 1000)


def test_a_file_without_a_size() -> None:
    """What the system makes as it is read has the size 0, and is read whole; the limit counts what comes."""
    path = Path("/proc/self/mountinfo")
    whole = path.read_bytes()
    assert path.stat().st_size == 0
    assert read_regular_file(path, LIMIT) == whole
    with pytest.raises(FileError, match="more than 10 bytes"):
        read_regular_file(path, 10)
