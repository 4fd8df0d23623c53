"""``layertap bulk``: the same vectors as over HTTP, whatever the source is, and a row with a reason for what is bad."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from tests.server import Live
from tests.service.bulk.conftest import COUNT, read, write_pictures
from tests.service.cli.commands import Command, run_here
from tests.service.support import arrays_of, raw

LAYERS = ("--layers", "block2,pool", "--pool", "mean", "--normalize")
QUERY = {"layers": "block2,pool", "pool": "mean", "normalize": "true", "format": "npz"}


def list_files(folder: Path) -> list[Path]:
    """The pictures of a folder in their order: its own, then those of folders in it."""
    return [*sorted(folder.glob("*.jpg")), *sorted(folder.glob("sub/*.png"))]


def test_folder(command: Command, live: Live, folder: Path, tmp_path: Path) -> None:
    """A row for each picture: its key, its digest, the vectors that a request gives, their fingerprint."""
    out = tmp_path / "out.parquet"
    done = command("bulk", folder, *LAYERS, "--out", out)
    assert (done.status, done.out) == (0, "")
    assert "70 rows" in done.notes
    assert re.match(r"waiting for the model\nmodel digits is ready after [\d.]+ s\n", done.notes)
    assert list(tmp_path.iterdir()) == [out]
    rows, files = read(out), list_files(folder)
    assert list(rows) == ["key", "digest", "block2", "pool", "fingerprint", "space", "error"]
    assert rows["key"] == [str(file.relative_to(folder)) for file in files]
    assert rows["digest"] == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert rows["error"] == [None] * COUNT
    for place in (0, 1, 31, 32, 33, COUNT - 1):
        reply = live.client.post("/extract", **raw(files[place].read_bytes(), "image/*", **QUERY))
        for name, array in arrays_of(reply).items():
            np.testing.assert_allclose(rows[name][place], array[0], atol=1e-6)
        assert rows["fingerprint"][place] == reply.headers["x-layertap-fingerprint"]
    metadata = {name.decode(): value.decode() for name, value in pq.read_schema(out).metadata.items()}
    assert metadata["model"] == "digits"
    assert metadata["fingerprint"] == rows["fingerprint"][0]
    assert json.loads(metadata["receipts"])["pool"]["probe"]


def write_tar(files: list[Path], folder: Path, path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for file in files:
            archive.add(file, str(file.relative_to(folder)))
            archive.addfile(tarfile.TarInfo("notes.txt"), io.BytesIO())


def write_list(files: list[Path], folder: Path, path: Path) -> None:
    """As Windows writes it: a byte order mark is no part of the first path."""
    path.write_text("\ufeff" + "\r\n".join(map(str, files)) + "\r\n", encoding="utf-8")


def write_structs(files: list[Path], folder: Path, path: Path) -> None:
    """As the datasets library has them."""
    values = [{"bytes": file.read_bytes(), "path": str(file.relative_to(folder))} for file in files]
    pq.write_table(pa.table({"label": list(range(len(files))), "image": values}), path)


SOURCES = {"list.txt": write_list, "packed.tar.gz": write_tar, "structs.parquet": write_structs}


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The columns of the folder's file."""
    out = tmp_path_factory.mktemp("expected") / "out.parquet"
    assert run_here("bulk", folder, *LAYERS, "--out", out).status == 0
    return read(out)


@pytest.mark.parametrize("name", SOURCES)
def test_sources(command: Command, folder: Path, tmp_path: Path, expected: dict[str, list[Any]], name: str) -> None:
    """Whatever the pictures come from, they give the same bits; keys are what the source calls them."""
    files = list_files(folder)
    SOURCES[name](files, folder, tmp_path / name)
    assert command("bulk", tmp_path / name, *LAYERS, "--out", tmp_path / "out.parquet").status == 0
    keys = {"list.txt": [str(file) for file in files], "structs.parquet": [str(number) for number in range(COUNT)]}
    assert read(tmp_path / "out.parquet") == {**expected, "key": keys.get(name, expected["key"])}


def make_huge() -> bytes:
    """A PNG of a few bytes whose head says that it has 900 million pixels."""
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(b""))
    packed = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def test_bad_pictures(command: Command, folder: Path, tmp_path: Path) -> None:
    """What can't be used is a row with a reason, and does not change the others."""
    good = list_files(folder)[:3]
    bad = {
        name: tmp_path / f"{name}.png" for name in ("text", "empty", "cut", "folder", "pipe", "loop", "gone", "huge")
    }
    bad["text"].write_bytes(b"no picture")
    bad["empty"].write_bytes(b"")
    bad["cut"].write_bytes(list_files(folder)[-1].read_bytes()[:1000])
    bad["folder"].mkdir()
    os.mkfifo(bad["pipe"])
    bad["loop"].symlink_to(bad["loop"])
    bad["huge"].write_bytes(make_huge())
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.png"))
    strange.write_bytes(good[0].read_bytes())
    files = [good[0], *bad.values(), good[0], strange, good[1], good[2]]
    (tmp_path / "list.txt").write_bytes(b"\n".join(map(os.fsencode, files)))
    words = ("bulk", tmp_path / "list.txt", *LAYERS, "--out", tmp_path / "out.parquet")
    done = command(*words)
    assert done.status == 0
    assert f"{len(bad)} of them without a result" in done.notes
    assert command(*words, "--strict").status == 1
    rows = read(tmp_path / "out.parquet")
    reasons = {Path(key).stem: error for key, error in zip(rows["key"], rows["error"], strict=True) if error}
    assert reasons.keys() == bad.keys()
    for name, words in {
        "text": "not a picture",
        "empty": "the picture is empty",
        "folder": "directory",
        "pipe": "no regular file",
        "loop": "symbolic links",
        "gone": "No such file",
        "huge": "pixels",
    }.items():
        assert words in reasons[name], reasons[name]
        assert f"{name}.png: {reasons[name]}" in done.notes
    assert [(vector is None) for vector in rows["pool"]] == [error is not None for error in rows["error"]]
    assert [digest is None for digest in rows["digest"]] == [
        Path(key).stem in ("folder", "pipe", "loop", "gone") for key in rows["key"]
    ]
    alone = tmp_path / "good.txt"
    alone.write_bytes(b"\n".join(map(os.fsencode, [good[0], good[0], strange, good[1], good[2]])))
    assert command("bulk", alone, *LAYERS, "--out", tmp_path / "good.parquet").status == 0
    kept = [vector for vector in rows["pool"] if vector is not None]
    np.testing.assert_allclose(kept, read(tmp_path / "good.parquet")["pool"], atol=1e-6)
    assert r"\xff\xfe.png" in rows["key"][-3]


def test_folder_of_links(command: Command, folder: Path, tmp_path: Path) -> None:
    """A folder that links to itself ends; linked pictures are taken, other files passed over, dot files of any suffix.

    So are those of an archive.
    """
    source = tmp_path / "source"
    write_pictures(source, 3)
    (source / "again").symlink_to(source)
    (source / "linked.PNG").symlink_to(list_files(folder)[-1])
    (source / "notes.md").write_text("none")
    (source / "._00000.jpg").write_bytes(b"AppleDouble")
    (source / ".trash").mkdir()
    (source / ".trash" / "old.png").write_bytes(b"old")
    (source / ".closed").mkdir(mode=0)
    done = command("bulk", source, "--out", tmp_path / "out.parquet")
    assert done.status == 0
    keys = read(tmp_path / "out.parquet")["key"]
    assert keys == ["00000.jpg", "linked.PNG", "sub/00001.png", "sub/00002.png"]
    with tarfile.open(tmp_path / "a.tar", "w", dereference=True) as archive:
        for path in (*keys, "._00000.jpg", ".trash/old.png"):
            archive.add(source / path, f"./{path}")
    assert command("bulk", tmp_path / "a.tar", "--out", tmp_path / "archive.parquet").status == 0
    assert read(tmp_path / "archive.parquet")["key"] == [f"./{key}" for key in keys]


def test_maps(command: Command, live: Live, tmp_path: Path) -> None:
    """Maps are arrays in files of their own; the tables beside them say where each picture's row is."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_pictures(source, 20)
    (source / "00000.jpg").write_bytes(b"broken")
    done = command("bulk", source, "--layers", "block2,pool", "--out", out, "--format", "safetensors")
    assert done.status == 0
    (path,) = out.glob("part-*.parquet")
    rows = read(path)
    assert list(rows) == ["key", "digest", "shard", "row", "fingerprint", "space", "error"]
    assert rows["shard"][0] is rows["row"][0] is None
    for place in (1, 7, 19):
        shard, row = rows["shard"][place], rows["row"][place]
        arrays = load_file(out / shard)
        query = {"layers": "block2,pool", "format": "npz"}
        reply = live.client.post("/extract", **raw((source / rows["key"][place]).read_bytes(), "image/*", **query))
        for name, array in arrays_of(reply).items():
            np.testing.assert_allclose(arrays[name][row], array[0], atol=1e-5)
    assert json.loads((out / "manifest.json").read_text())["complete"] is True


REDUCE = ("{folder}", "--layers", "head", "--out", "o", "--reduce")
MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "no source": (("nowhere", "--out", "o.parquet"), "there is nothing at nowhere"),
    "no such layer": (("{folder}", "--layers", "block9", "--out", "o.parquet"), "did you mean 'block"),
    "a list of no layers": (("{folder}", "--layers", "[]", "--out", "o.parquet"), "--layers names no layer"),
    "commas alone": (("{folder}", "--layers", ",", "--out", "o.parquet"), "--layers names no layer"),
    "a map in Parquet": (("{folder}", "--layers", "block1", "--out", "o.parquet"), "--pool mean"),
    "no such model": (("{folder}", "--model", "digit", "--out", "o.parquet"), "did you mean 'digits'"),
    "a table that is none": (("broken.parquet", "--out", "o.parquet"), "broken.parquet can't be read"),
    "a format of folders": (("{folder}", "--out", "o.parquet", "--format", "safetensors"), "--out o"),
    "a gradient": (("{folder}", "--layers", "pool:grad_output", "--out", "o.parquet"), "objective"),
    "Ray and a server": (("{folder}", "--out", "o.parquet", "--ray", "--url", "http://127.0.0.1:9"), "--ray and --url"),
    "a column of none": (("{folder}", "--out", "o.parquet", "--column", "image"), "has no columns"),
    "a reduction of nothing": (("{folder}", "--out", "o", "--reduce", "top"), "add --layers"),
    "no such reduction": ((*REDUCE, "sum"), "one of: stats, top, histogram, covariance"),
    "a reduction twice": ((*REDUCE, "top,top"), "named twice"),
    "a reduction of a pool": ((*REDUCE, "top", "--pool", "mean"), "takes no --pool"),
    "a reduction in a file": ((*REDUCE, "top", "--out", "o.npz"), "--out o"),
    "another folder": (("{folder}", "--layers", "pool", "--out", "{folder}"), "has other files in it"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(command: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A mistake is one line that says what to type, and status 2."""
    (tmp_path / "broken.parquet").write_text("PAR1")
    monkeypatch.chdir(tmp_path)
    words, says = MISTAKES[case]
    done = command("bulk", *(word.format(folder=folder) for word in words))
    assert (done.status, done.out) == (2, "")
    assert says in " ".join(done.notes.split())
    assert "Traceback" not in done.notes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.parquet"]


def test_check(command: Command, folder: Path, tmp_path: Path) -> None:
    """``layertap check`` compares the probes of a finished file, and of a folder."""
    for out in (tmp_path / "out.parquet", tmp_path / "folder"):
        assert command("bulk", folder / "*.jpg", "--layers", "pool,block2", "--pool", "mean", "--out", out).status == 0
        done = command("check", out)
        assert done.status == 0
        assert "digits pool: same" in done.out
        assert "digits block2: same" in done.out
    rows = pq.read_table(tmp_path / "out.parquet")
    older = rows.set_column(rows.column_names.index("space"), "space", pa.array(["0" * 32] * len(rows)))
    pq.write_table(pa.concat_tables([rows, older]), tmp_path / "joined.parquet")  # the first file's metadata stays
    done = command("check", tmp_path / "joined.parquet")
    assert done.status == 1
    assert f"{len(rows)} rows are of another space" in done.out
