"""The command line: the same answers as over HTTP, errors in one line, a server that ends well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from layertap.service.cli import extraction
from layertap.service.cli.main import main
from tests.server import Live
from tests.service.support import Array, Json, picture

ROOT = Path(__file__).parents[3]
CONFIG = """
models:
  - name: touchy
    source: python:tests.service.nets_http:Touchy
    weights: random:0
    device: cpu
    inputs: [{name: x, shape: [4]}]
"""


@dataclass(frozen=True)
class Done:
    """What a command left: its exit status, stdout and stderr."""

    status: int
    out: str
    notes: str


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``layertap`` in this process."""
    monkeypatch.setenv("COLUMNS", "200")

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


def test_models(command: Command, tmp_path: Path) -> None:
    """``models`` lists what is configured, without loading it or showing where weights lie."""
    done = command("models")
    assert done.status == 0
    assert "digits (default)" in done.out
    assert "torchvision:resnet50" in done.out
    assert str(ROOT) not in done.out
    (tmp_path / "m.yaml").write_text(CONFIG)
    done = command("models", "--config", tmp_path / "m.yaml")
    assert ("touchy (default)" in done.out, "digits" in done.out) == (True, False)


def test_layers(command: Command) -> None:
    """``layers`` shows the tree, each layer with its class and the shape of one row."""
    done = command("layers", "digits")
    assert done.status == 0
    shown = ("digits Digits 1×10 NC", "conv1 Conv2d 1×32×16×16 NCHW", "2 calls", "pool AdaptiveAvgPool2d 1×64×1×1")
    assert [words for words in shown if words not in " ".join(done.out.split())] == []
    assert all(len(line) <= 100 for line in done.out.splitlines())
    assert "\x1b" not in done.out


@pytest.mark.parametrize("form", ["json", "npz", "safetensors", "npy"])
def test_extract(command: Command, live: Live, pictures: list[Path], tmp_path: Path, form: str) -> None:
    """``extract`` writes the very bytes that the server answers with, and where there is room the names of files."""
    names = "block3" if form == "npy" else "block3,block2.relu#*,head:input"
    file = tmp_path / f"out.{form}"
    options = ("--layers", names, "--pool", "mean", "--normalize", "--out", file)
    done = command("extract", *pictures, *options)
    assert (done.status, done.out) == (0, "")
    parts = [("images", file.read_bytes()) for file in pictures]
    query = {"layers": names, "pool": "mean", "normalize": "true", "format": form, "isolated": "true"}
    reply = live.client.post("/extract", files=parts, params=query)
    assert reply.status_code == 200
    if form in ("json", "npy"):
        assert file.read_bytes() == reply.content
    else:
        found, wanted = READERS[form](file.read_bytes()), READERS[form](reply.content)
        assert found.pop("files").tolist() == [str(file) for file in pictures]
        assert found.pop("fingerprint") == reply.headers["x-layertap-fingerprint"]
        wanted.pop("fingerprint", None)
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
        (("--layers", "head", "--out", "x.exe"), ".json, .npy, .npz, .safetensors"),
        (("--layers", "head", "--out", "nowhere/x.npz"), "nowhere/x.npz"),
        (("--layers", "block1,head", "--out", "x.npy"), "npz"),
        (("--layers", "head", "--config", "nowhere.yaml"), "can't read nowhere.yaml"),
    ],
)
def test_extract_refused(command: Command, pictures: list[Path], words: tuple[str, ...], says: str) -> None:
    """What can't be done is one line that says what to type instead, and status 2."""
    done = command("extract", pictures[0], *words)
    assert (done.status, done.out) == (2, "")
    assert "Traceback" not in done.notes
    assert says in " ".join(done.notes.split())


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


READERS: dict[str, Callable[[bytes], dict[str, Array]]] = {"npz": npz_of, "safetensors": safetensors_of}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A file that is no picture."""
    file = tmp_path / "bad.png"
    file.write_bytes(b"no picture")
    return file


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


RAISING = """
def raising():
    raise ValueError("words of the operator's own code")
"""


@pytest.mark.parametrize("words", [("check",), ("layers", "touchy"), ("plan",)])
def test_a_factory_that_raises(command: Command, tmp_path: Path, words: tuple[str, ...]) -> None:
    """The traceback of the operator's own code is on stderr, and that is where they are told to look."""
    (tmp_path / "own_raising.py").write_text(RAISING)
    warm = "warm: [{layers: [linear], compile: true}]"
    text = CONFIG.replace("tests.service.nets_http:Touchy", "own_raising:raising")
    (tmp_path / "m.yaml").write_text(f"{text}    {warm}\n")
    done = command(*words, "--config", tmp_path / "m.yaml")
    assert done.status == 2
    assert "ValueError: words of the operator's own code" in done.notes
    assert "own_raising.py" in done.notes
    assert "stderr has the traceback" in done.out + done.notes
    assert "server" not in done.out


def test_unknown_model(command: Command) -> None:
    """``layers`` of an unknown model is answered with near names."""
    done = command("layers", "digit")
    assert done.status == 2
    assert "'digits'" in done.notes


@pytest.mark.parametrize(
    ("variables", "words", "says"),
    [
        ({"LAYERTAP_PORT": "http"}, (), "LAYERTAP_PORT"),
        ({"LAYERTAP_MAX_PIXELS": "-1"}, (), "LAYERTAP_MAX_PIXELS"),
        ({"LAYERTAP_LOG_LEVEL": "loud"}, (), "LAYERTAP_LOG_LEVEL"),
        ({"LAYERTAP_ROOT_PATH": "features"}, (), "LAYERTAP_ROOT_PATH"),
        ({}, ("--port", "99999"), "LAYERTAP_PORT"),
        ({}, ("--root-path", "/features/"), "'/features'"),
        ({}, ("--log-level", "loud"), "'info'"),
        ({}, ("--config", "nowhere.yaml"), "can't read nowhere.yaml"),
        ({"LAYERTAP_CONFIG": "nowhere.yaml"}, (), "can't read nowhere.yaml"),
        ({"LAYERTAP_HOST": "0.0.0.0"}, (), "LAYERTAP_API_KEYS"),
        ({"LAYERTAP_API_KEYS_FILE": "nowhere/keys"}, (), "nowhere/keys: No such file"),
        ({"LAYERTAP_ADMIN_KEYS_FILE": os.devnull, "LAYERTAP_HOST": "0.0.0.0"}, (), "no key in /dev/null"),
        ({"LAYERTAP_API_KEYS_FILE": "nowhere/keys"}, (), "LAYERTAP_API_KEYS_FILE: nowhere/keys"),
        ({"LAYERTAP_ADMIN_KEYS_FILE": os.devnull}, (), "LAYERTAP_ADMIN_KEYS_FILE: there is no key"),
        ({"LAYERTAP_CONFIG": "nowhere.yaml"}, (), "LAYERTAP_CONFIG"),
        ({"LAYERTAP_ALLOW_URLS": "127.1"}, (), "LAYERTAP_ALLOW_URLS"),
        ({"LAYERTAP_MAX_HEAD_BYTES": "0"}, (), "LAYERTAP_MAX_HEAD_BYTES"),
        ({"LAYERTAP_MAX_HEAD_BYTES": "64 furlongs"}, (), "LAYERTAP_MAX_HEAD_BYTES: a size is"),
        (
            {"LAYERTAP_API_KEY": "secret"},
            (),
            "LAYERTAP_API_KEY: there is no such setting; the nearest is LAYERTAP_API_KEYS",
        ),
        ({"layertap_prot": "1"}, (), "the nearest is LAYERTAP_PORT"),
        ({"LAYERTAP_KEY_RATE": "3"}, (), "LAYERTAP_KEY_RATE: it means nothing without keys"),
        ({"LAYERTAP_API_KEYS": ","}, (), "LAYERTAP_API_KEYS: there is nothing between the commas"),
    ],
)
def test_serve_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, variables: Json, words: tuple[str, ...], says: str
) -> None:
    """A setting that makes no sense is refused by its name before anything starts."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = command("serve", *words)
    assert done.status == 2
    assert says in done.notes
    assert "Traceback" not in done.notes
    assert "secret" not in done.notes


def test_serve_refused_without_torch(tmp_path: Path) -> None:
    """What is wrong with settings and configuration is told, all of it, a line each, before torch is imported."""
    (tmp_path / "models.yaml").write_text("models:\n- {name: a, source: torchvision:resnet5O, device: tpu}\n")
    script = """
import sys
from layertap.service.cli.main import main
for words in (["--port", "http"], ["--config", "models.yaml"]):
    sys.argv = ["layertap", "serve", *words]
    try:
        main()
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules, "torchvision" in sys.modules)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=kept, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "False", "False"] * 2
    lines = done.stderr.splitlines()[-2:]
    assert all(line.startswith("layertap: models.yaml:2: models.0.") for line in lines)
    assert "'tpu' is no device" in lines[0]
    assert "did you mean 'torchvision:resnet50'" in lines[1]


def test_no_server_for_all_without_a_key() -> None:
    """Without a key the server listens on loopback only: anything else ends with status 2, and no socket is opened."""
    script = """
import sys
sys.addaudithook(lambda event, _: event.startswith("socket.") and print("opened", event, flush=True))
from layertap.service.cli.main import main
for host in ("0.0.0.0", "::", "", "192.168.0.1", "0", "example.org"):
    sys.argv = ["layertap", "serve", "--host", host, "--port", "0"]
    try:
        main()
    except SystemExit as ended:
        print(ended.code, flush=True)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2"] * 6
    assert done.stderr.count("LAYERTAP_API_KEYS") == 6


def test_plan(command: Command, tmp_path: Path) -> None:
    """``plan`` lists every warm plan, what answers it, and what a row costs; a bad one is told in a line."""
    file = tmp_path / "models.yaml"
    file.write_text(f"{CONFIG}    warm: [{{layers: ['.'], pool: flatten}}]\n")
    done = command("plan", "--config", file)
    assert done.status == 0
    line = next(line for line in done.out.splitlines() if "touchy" in line)
    assert "hooks" in line
    assert "." in line
    file.write_text(f"{CONFIG}    warm: [{{layers: [nowhere]}}]\n")
    bad = command("plan", "--config", file)
    assert bad.status == 2
    assert "nowhere" in bad.notes
    assert "Traceback" not in bad.notes
