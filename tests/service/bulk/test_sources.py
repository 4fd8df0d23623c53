"""Sources that are odd, huge or damaged: each picture is an entry, none stops those behind it, none comes twice."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from layertap.models.errors import LayertapError
from layertap.service.bulk.sources import open_source

LIMIT = 1000


def list_entries(source: Path | str, skip: int = 0) -> list[tuple[str, bytes | None]]:
    """Keys and bytes of all entries of a source."""
    return [(entry.key, entry.data) for entry in open_source(str(source)).iterate(skip, LIMIT)]


def list_errors(source: Path | str) -> dict[str, str]:
    """Why entries have no bytes, by their keys."""
    return {entry.key: entry.error for entry in open_source(str(source)).iterate(0, LIMIT) if entry.data is None}


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``**`` stands for any folders, but for links to folders: one that leads in a circle gives nothing twice."""
    monkeypatch.chdir(tmp_path)
    hidden = (".hidden/x.png", "a/.x.png", "a/.thumbs/x.png", ".git/.thumbs/x.png")
    for name in ("x.png", "a/x.png", "a/b/x.png", "a/b/y.jpg", "c/b/x.png", *hidden):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(name.encode())
    for name in ("a/one", "a/two", "a/b/three"):
        Path(name).symlink_to(tmp_path)
    expected = {
        "**/*.png": ["a/b/x.png", "a/x.png", "c/b/x.png", "x.png"],
        "a/**/*.png": ["a/b/x.png", "a/x.png"],
        "*/**/b/*": ["a/b/x.png", "a/b/y.jpg", "c/b/x.png"],
        "**/b/**/?.*": ["a/b/x.png", "a/b/y.jpg", "c/b/x.png"],
        "a/[xy].png": ["a/x.png"],
        "**/.x.png": ["a/.x.png"],
        "**/.thumbs/*": [".git/.thumbs/x.png", "a/.thumbs/x.png"],
        "a/x*.png": ["a/x.png"],
        f"{tmp_path}/c/**/x.png": [f"{tmp_path}/c/b/x.png"],
    }
    assert {pattern: [key for key, _ in list_entries(pattern)] for pattern in expected} == expected


def write_archive(path: Path, mode: str = "w") -> list[tuple[str, bytes]]:
    """An archive of pictures that are none."""
    files = [(f"{number}.png", bytes([number]) * 700) for number in range(5)]
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
    return files


MEMBER = 512 + 1024  # a head, and the data in blocks of 512


def read_until_damage(path: Path, skip: int = 0) -> list[tuple[str, bytes | None]]:
    """What is read of an archive before it is said to be damaged."""
    found: list[tuple[str, bytes | None]] = []
    entries = open_source(str(path)).iterate(skip, LIMIT)
    with pytest.raises(LayertapError, match="can't be read: "):
        found.extend((entry.key, entry.data) for entry in entries)  # those before the damage, too
    return found


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("size", [100, 512 + 100, 0], ids=["in a head", "in the data", "between members"])
def test_a_cut_archive(tmp_path: Path, size: int, skip: int) -> None:
    """What is there of an archive that was cut off is read, and then the job ends."""
    files = write_archive(tmp_path / "a.tar")
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: 3 * MEMBER + size])
    entries = read_until_damage(tmp_path / "a.tar", skip)
    assert [key for key, _ in entries] == ["0.png", "1.png", "2.png"]
    assert entries[skip:] == files[skip:3]


def test_odd_members(tmp_path: Path) -> None:
    """Links and pipes that are called pictures are entries with a reason; so is what is too large."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in (("s.png", tarfile.SYMTYPE), ("h.png", tarfile.LNKTYPE), ("p.png", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "0.png"
            archive.addfile(member)
        member = tarfile.TarInfo("large.png")
        member.size = LIMIT + 1
        archive.addfile(member, BytesIO(bytes(LIMIT + 1)))
        member = tarfile.TarInfo("good.png")
        member.size = LIMIT
        archive.addfile(member, BytesIO(bytes(LIMIT)))
    errors = list_errors(tmp_path / "a.tar")
    regular = "is no regular file"
    large = f"has more than {LIMIT} bytes"
    assert errors == {"s.png": regular, "h.png": regular, "p.png": regular, "large.png": large}
    assert len(list_entries(tmp_path / "a.tar")) == 5


def test_rows_that_are_there_are_not_read(tmp_path: Path) -> None:
    """Groups of rows of a Parquet file that were answered before are passed over, even where they are damaged."""
    path, data = tmp_path / "a.parquet", [bytes([number]) * 100 for number in range(30)]
    pq.write_table(pa.table({"image": data}), path, row_group_size=10, compression="none", use_dictionary=False)
    column = pq.read_metadata(path).row_group(1).column(0)
    with path.open("rb+") as file:
        file.seek(column.data_page_offset)
        file.write(b"\xff" * 64)
    keys = [str(number) for number in range(30)]
    assert list_entries(path, 30) == [(key, None) for key in keys]
    assert list_entries(path, 20)[20:] == list(zip(keys[20:], data[20:], strict=True))
    with pytest.raises(LayertapError, match="is damaged from row 10 on"):
        list_entries(path)
