"""Full disks and damaged Parquet files: one line that says what to do, nothing half-written, and the job goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from layertap.service.cli import bulk
from tests.marks import slow
from tests.service.bulk.conftest import COUNT, read, write_pictures
from tests.service.bulk.test_bulk import list_files
from tests.service.cli.commands import Command, Done
from tests.service.support import picture

FULL = Path("/dev/full")  # a file that has no room for anything
WORDS = ("--layers", "pool", "--pool", "mean")


def list_mistakes(done: Done) -> list[str]:
    """What the command says is wrong, without how far it is."""
    return [line for line in done.notes.splitlines() if line.startswith("layertap: ")]


def test_a_file_on_a_full_disk(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has no room for its file keeps its parts, says so in a line, goes on, and counts all of its rows."""
    monkeypatch.setattr(bulk, "LINE_S", 0.0)  # a line for each batch
    source, out = tmp_path / "source", tmp_path / "out" / "out.parquet"
    write_pictures(source, 3)
    (source / "bad.png").write_bytes(b"no picture")
    out.parent.mkdir()
    (out.parent / "out.parquet.tmp").symlink_to(FULL)
    done = command("bulk", source, *WORDS, "--out", out)
    assert (done.status, len(list_mistakes(done))) == (2, 1)
    assert f"{out} can't be written: No space left on device" in done.notes
    assert [path.name for path in out.parent.iterdir()] == ["out.parquet.parts"]
    (source / "sub" / "later.png").write_bytes(picture(9))
    done = command("bulk", source, *WORDS, "--out", out)
    assert done.status == 0
    assert re.search(r"^4 rows are there already, 1 of them without a result$", done.notes, re.MULTILINE)
    assert re.search(r"^5( of 5)? rows, \d+/s, 1 without a result", done.notes, re.MULTILINE)
    assert re.search(r"5 rows, 1 of them without a result, \d+ s$", done.notes)
    assert len(read(out)["key"]) == 5


def write_source(folder: Path, path: Path) -> None:
    """A Parquet file of the pictures of a folder, as bytes, in groups of ten rows."""
    table = pa.table({"image": [file.read_bytes() for file in list_files(folder)]})
    pq.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False)


def damage(path: Path, group: int) -> None:
    """Overwrite the head of the only page of a row group."""
    offset = pq.read_metadata(path).row_group(group).column(0).data_page_offset
    with path.open("rb+") as file:
        file.seek(offset)
        file.write(b"\xff" * 64)


def test_a_damaged_source(command: Command, folder: Path, tmp_path: Path) -> None:
    """Pages of a source that can't be read end the job with the row's number; with a whole file it goes on."""
    source, whole, out = tmp_path / "source.parquet", tmp_path / "whole", tmp_path / "out.parquet"
    write_source(folder, source)
    whole.write_bytes(source.read_bytes())
    damage(source, 5)
    done = command("bulk", source, *WORDS, "--out", out)
    assert (done.status, "Traceback" in done.notes, len(list_mistakes(done))) == (2, False, 1)
    assert "is damaged from row " in done.notes
    assert "whole file" in done.notes
    whole.replace(source)
    assert command("bulk", source, *WORDS, "--out", out).status == 0
    assert read(out)["key"] == [str(number) for number in range(COUNT)]
    assert read(out)["error"] == [None] * COUNT


@pytest.mark.parametrize("out", [slow("out"), "out.parquet"])
def test_a_damaged_result(command: Command, folder: Path, tmp_path: Path, out: str) -> None:
    """A complete job whose own file is damaged says so, and ``--restart`` makes it anew."""
    words = ("bulk", folder / "*.jpg", *WORDS, "--out", tmp_path / out)
    assert command(*words).status == 0
    path = tmp_path / out
    table = path if path.is_file() else next(path.glob("part-*.parquet"))
    damage(table, 0)
    done = command(*words)
    assert (done.status, len(list_mistakes(done))) == (2, 1)
    assert "is damaged" in done.notes
    assert "--restart" in done.notes
    assert command(*words, "--restart").status == 0
    assert command(*words).status == 0
