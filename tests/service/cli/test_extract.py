"""``extract``: the same answers as over HTTP, files that can't be read left out, mistakes in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from layertap.service.cli import extraction
from tests.server import Live
from tests.service.cli.commands import CONFIG, Command
from tests.service.support import Array, picture


@pytest.mark.parametrize("form", ["json", "npz", "safetensors", "npy", "arrow"])
def test_extract(command: Command, live: Live, pictures: list[Path], tmp_path: Path, form: str) -> None:
    """``extract`` writes the very bytes that the server answers with, and where there is room the names of files."""
    names = "block3" if form == "npy" else "block3,block2.relu#*,head:input"
    file = tmp_path / f"out.{form}"
    options = ("--layers", names, "--pool", "mean", "--normalize", "--out", file)
    done = command("extract", *pictures, *options)
    assert (done.status, done.out) == (0, "")
    parts = [("images", file.read_bytes()) for file in pictures]
    query = {"layers": names, "pool": "mean", "normalize": "true", "format": form, "isolated": "true", "probe": "true"}
    reply = live.client.post("/extract", files=parts, params=query)
    assert reply.status_code == 200
    if form in ("json", "npy"):
        assert file.read_bytes() == reply.content
    else:
        found, wanted = READERS[form](file.read_bytes()), READERS[form](reply.content)
        assert found.pop("files").tolist() == [str(file) for file in pictures]
        assert found.pop("fingerprint") == reply.headers["x-layertap-fingerprint"]
        for name in ("fingerprint", "model", "receipts"):  # a reply of npz has none of them
            wanted.pop(name, None)
            found.pop(name, None)
        assert found.keys() == wanted.keys()
        assert all(found[key].tobytes() == wanted[key].tobytes() for key in wanted)
    assert reply.headers["x-layertap-fingerprint"] in done.notes


def test_extract_in_batches(
    command: Command, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pictures than one batch come back as one answer, in order."""
    monkeypatch.setattr(extraction, "MAX_BATCH_FILES", 2)
    assert command("extract", *pictures * 2, "--layers", "head", "--out", tmp_path / "a.json").status == 0
    monkeypatch.setattr(extraction, "MAX_BATCH_FILES", 6)
    assert command("extract", *pictures * 2, "--layers", "head", "--out", tmp_path / "b.json").status == 0
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert a["rows"] == b["rows"] == 6
    np.testing.assert_allclose(a["features"]["head"]["data"], b["features"]["head"]["data"], atol=1e-5)


@pytest.mark.parametrize("limit", ["MAX_INPUTS", "MAX_QUEUE_ROWS"])
def test_extract_within_limits(
    command: Command, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """More pictures than a request may have, or the queue holds, are taken in smaller batches."""
    monkeypatch.setenv(f"LAYERTAP_{limit}", "2")
    done = command("extract", *pictures, "--layers", "head", "--out", tmp_path / "a.json")
    assert (done.status, json.loads((tmp_path / "a.json").read_text())["rows"]) == (0, 3)


def test_summary(command: Command, pictures: list[Path]) -> None:
    """Without a file ``extract`` prints what it found."""
    done = command("extract", pictures[0], "--layers", "block1,head")
    assert done.status == 0
    assert "1×16×32×32" in done.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--layers", "block4"), "did you mean 'block"),
        (("--layers", ""), "at least one"),
        (("--layers", "head", "--pool", "average"), "use one of none, mean"),
        (("--layers", "head", "--model", "digit"), "did you mean 'digits'"),
        (("--layers", "head", "--out", "x.exe"), ".json, .npy, .npz, .safetensors, .arrow"),
        (("--layers", "head", "--out", "nowhere/x.npz"), "nowhere/x.npz"),
        (("--layers", "block1,head", "--out", "x.npy"), "npz"),
        (("--layers", "head", "--config", "nowhere.yaml"), "can't read nowhere.yaml"),
    ],
)
def test_extract_refused(command: Command, pictures: list[Path], words: tuple[str, ...], says: str) -> None:
    """What can't be done is one line that says what to type instead, and status 2; no file is begun."""
    done = command("extract", pictures[0], *words)
    assert (done.status, done.out) == (2, "")
    assert "Traceback" not in done.notes
    assert says in " ".join(done.notes.split())
    assert not Path("x.npy").exists()


def npz_of(data: bytes) -> dict[str, Array]:
    """The members of a .npz file."""
    with np.load(BytesIO(data), allow_pickle=False) as archive:
        return dict(archive)


def safetensors_of(data: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file, and what its metadata says of files and fingerprint."""
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    files = {"files": np.array(json.loads(metadata["files"]))} if "files" in metadata else {}
    return {**safetensors.numpy.load(data), **files, "fingerprint": np.array(metadata["fingerprint"])}


def arrow_of(data: bytes) -> dict[str, Array]:
    """The columns of an Arrow stream, and what its metadata says."""
    with pa.ipc.open_stream(data) as reader:
        table = reader.read_all()
    columns = {name: np.stack(table[name].to_pylist()) for name in table.column_names}
    files = {"files": columns.pop("file")} if "file" in columns else {}
    return {**columns, **files, "fingerprint": np.array(table.schema.metadata[b"fingerprint"].decode())}


READERS: dict[str, Callable[[bytes], dict[str, Array]]] = {
    "npz": npz_of,
    "safetensors": safetensors_of,
    "arrow": arrow_of,
}


@pytest.mark.parametrize("batch", [1, 2, 32])
@pytest.mark.parametrize("form", ["npz", "safetensors"])
def test_a_broken_file(
    command: Command,
    pictures: list[Path],
    broken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    batch: int,
) -> None:
    """What can't be read is named and left out, the rest is written with the names of its files, the status is 1."""
    monkeypatch.setattr(extraction, "MAX_BATCH_FILES", batch)
    whole, rest = tmp_path / f"whole.{form}", tmp_path / f"rest.{form}"
    unreadable = Path("/proc/self/mem")  # for root as well
    assert command("extract", *pictures, "--layers", "head", "--out", whole).status == 0
    given = [pictures[0], broken, broken, unreadable, *pictures[1:], broken]
    done = command("extract", *given, "--layers", "head", "--out", rest)
    assert (done.status, done.out) == (1, "")
    lines = done.notes.splitlines()
    assert sum(line.startswith(f"{broken}: ") for line in lines) == 3
    assert sum(line.startswith(f"{unreadable}: ") for line in lines) == 1
    found, wanted = READERS[form](rest.read_bytes()), READERS[form](whole.read_bytes())
    assert found["files"].tolist() == wanted["files"].tolist() == [str(file) for file in pictures]
    assert found["fingerprint"] == wanted["fingerprint"]
    np.testing.assert_allclose(found["head"], wanted["head"], rtol=1e-4, atol=1e-5)
    assert form != "npz" or found["skipped"].tolist() == [1, 2, 3, 6]


@pytest.mark.timeout(60)
def test_a_pipe(command: Command, pictures: list[Path], tmp_path: Path) -> None:
    """A pipe that nobody writes to is named and left out, not waited for."""
    os.mkfifo(tmp_path / "pipe.png")
    done = command("extract", tmp_path / "pipe.png", *pictures, "--layers", "head")
    assert (done.status, "pipe.png: is no regular file" in done.notes) == (1, True)
    assert "3×10" in done.out


def test_nothing_but_broken_files(command: Command, broken: Path, tmp_path: Path) -> None:
    """Where nothing is left the status is 2, and no file is written."""
    file = tmp_path / "out.npz"
    done = command("extract", broken, broken, "--layers", "head", "--out", file)
    assert (done.status, done.out) == (2, "")
    assert done.notes.count("bad.png") == 2
    assert "nothing could be extracted" in done.notes
    assert not file.exists()


def test_no_such_file(command: Command, pictures: list[Path], tmp_path: Path) -> None:
    """A name that stands for no file is a mistake, told before anything is computed."""
    done = command("extract", *pictures, tmp_path / "nowhere.png", "--layers", "head")
    assert done.status == 2
    assert "nowhere.png" in done.notes.replace("\n", "")


def test_summary_beside_a_broken_file(command: Command, pictures: list[Path], broken: Path) -> None:
    """Without a file the rest is summed up, and the status tells as well."""
    done = command("extract", *pictures, broken, "--layers", "head")
    assert done.status == 1
    assert "3×10" in done.out
    assert "bad.png" in done.notes


def test_a_strange_file_name(command: Command, pictures: list[Path], tmp_path: Path) -> None:
    """A name that is no UTF-8 is written with its bytes escaped."""
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    strange.write_bytes(pictures[0].read_bytes())
    for form in READERS:
        file = tmp_path / f"out.{form}"
        assert command("extract", strange, "--layers", "head", "--out", file).status == 0
        assert READERS[form](file.read_bytes())["files"].tolist() == [f"{tmp_path}/\\xff.png"]


FILING = """
models:
  - name: filing
    source: python:tests.service.nets_http:Filing
    weights: random:0
    device: cpu
    inputs: [{name: x, shape: [3, 8, 8]}]
    preprocess: {resize: [8, 8]}
"""


@pytest.mark.parametrize("batch", [1, 32])
def test_another_shape(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """A picture whose results fit to no others is left out, in whatever batch it is; pooled they fit."""
    monkeypatch.setattr(extraction, "MAX_BATCH_FILES", batch)
    (tmp_path / "m.yaml").write_text(FILING.replace("[8, 8]}", "8}"))
    files = [tmp_path / f"{place}.png" for place in range(3)]
    for file, size in zip(files, ((16, 16), (32, 16), (16, 16)), strict=True):
        file.write_bytes(picture(1, size))
    options = ("--config", tmp_path / "m.yaml", "--layers", ".", "--out", tmp_path / "out.npz")
    done = command("extract", *files, *options)
    assert (done.status, done.notes.count("1.png: ")) == (1, 1)
    found = npz_of((tmp_path / "out.npz").read_bytes())
    assert found["files"].tolist() == [str(files[0]), str(files[2])]
    assert found["."].shape == (2, 2, 8, 8)
    assert command("extract", *files, *options, "--pool", "mean").status == 0
    assert npz_of((tmp_path / "out.npz").read_bytes())["."].shape == (3, 2)


@pytest.mark.parametrize("name", ["files", "fingerprint", "skipped"])
def test_a_layer_of_that_name(command: Command, pictures: list[Path], tmp_path: Path, name: str) -> None:
    """A layer called as a member of the file is refused for npz, with how to get it; other formats have room for it."""
    (tmp_path / "m.yaml").write_text(FILING)
    options = ("--config", tmp_path / "m.yaml", "--layers")
    for layers in (name, "*"):
        done = command("extract", *pictures, *options, layers, "--out", tmp_path / "out.npz")
        assert (done.status, done.out) == (2, "")
        assert "LAYER:output" in " ".join(done.notes.split())
        assert not (tmp_path / "out.npz").exists()
    assert command("extract", *pictures, *options, f"{name}:output", "--out", tmp_path / "out.npz").status == 0
    assert npz_of((tmp_path / "out.npz").read_bytes())[f"{name}:output"].shape == (3, 2, 8, 8)
    assert command("extract", *pictures, *options, name, "--out", tmp_path / "out.safetensors").status == 0
    assert safetensors.numpy.load((tmp_path / "out.safetensors").read_bytes())[name].shape == (3, 2, 8, 8)


def test_a_model_of_tensors(command: Command, pictures: list[Path], tmp_path: Path) -> None:
    """A model that takes no pictures is told in one line, not once for each file."""
    (tmp_path / "m.yaml").write_text(CONFIG)
    done = command("extract", *pictures, "--config", tmp_path / "m.yaml", "--layers", "linear")
    assert done.status == 2
    assert done.notes.count("takes tensors, not pictures") == 1
