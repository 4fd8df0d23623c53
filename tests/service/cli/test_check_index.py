"""``check INDEX``: whether vectors that are kept are still like those that are made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.load_server import ROOT
from tests.service.support import Json, picture

LAYERS = ("--layers", "block1,head:input", "--pool", "mean", "--normalize")
RESNET: Json = {"name": "net", "source": "timm:test_resnet", "weights": "random:0", "device": "cpu"}
OF_ANOTHER_VERSION = """
import sys
from timm.models.resnet import ResNet

built = ResNet.__init__

def build(self, *args, **kwargs):
    built(self, *args, **kwargs)
    self.bn1.eps = 1e-3  # was 1e-5

ResNet.__init__ = build
from layertap.service.cli.main import main
main()
"""


@pytest.mark.parametrize("form", ["json", "safetensors"])
def test_files(command: Command, pictures: list[Path], tmp_path: Path, form: str) -> None:
    """Files of every format that has receipts are compared, result by result."""
    file = tmp_path / f"index.{form}"
    assert command("extract", *pictures, *LAYERS, "--out", file).status == 0
    done = command("check", file)
    assert (done.status, done.out) == (0, "digits block1: same\ndigits head:input: same\n")


def test_everything_of_a_receipt(command: Command, live: Live, tmp_path: Path) -> None:
    """Calls, paths, channels, statistics and reply dtypes are asked for as they were: fingerprints are the same."""
    layers: list[Json] = [
        {"layer": "block2.relu#0", "channels": [3, 1], "pool": "max", "dtype": "float16"},
        {"layer": "block2", "stats": ["histogram", "mean"]},
        {"layer": "head:input", "dtype": "int8", "pool": "flatten", "normalize": True},
        {"layer": "block2/add#0[1]:input", "pool": "mean"},
    ]
    body: Json = {"layers": layers, "inputs": [{"image": picture_text()}], "probe": True, "model": "digits"}
    file = tmp_path / "index.json"
    file.write_bytes(live.client.post("/extract", json=body).content)
    done = command("check", file)
    assert done.status == 0
    assert [line.partition(": ")[2] for line in done.out.splitlines()] == ["same"] * 4


def picture_text() -> str:
    return b64encode(picture(1)).decode()


def test_an_older_file(command: Command, pictures: list[Path], tmp_path: Path) -> None:
    """Without probes fingerprints are compared, and it is said that numbers were not."""
    file = tmp_path / "index.json"
    command("extract", *pictures, *LAYERS, "--out", file)
    reply = json.loads(file.read_text())
    for receipt in reply["receipts"].values():
        del receipt["probe"]
    reply["receipts"]["block1"]["fingerprint"] = "0" * 32
    file.write_text(json.dumps(reply))
    done = command("check", file)
    assert done.status == 1
    first, second = done.out.splitlines()
    assert first.startswith("digits block1: another fingerprint; it has no probe")
    assert second.startswith("digits head:input: same fingerprint; it has no probe")


def test_another_name(command: Command, pictures: list[Path], tmp_path: Path) -> None:
    """Equal numbers under another fingerprint, and under another model's name, are told as such."""
    file = tmp_path / "index.json"
    command("extract", *pictures, *LAYERS, "--out", file)
    file.write_text(
        file.read_text().replace('"model":"digits"', '"model":"old"').replace('"fingerprint":"', '"fingerprint":"x')
    )
    assert "there is no model" in command("check", file).notes
    done = command("check", file, "--model", "digits")
    assert done.status == 0
    assert done.out.splitlines()[0] == "digits block1: same, under another fingerprint"


@pytest.mark.slow
def test_a_library_that_computes_otherwise(tmp_path: Path) -> None:
    """One epsilon of a library's model is another: the fingerprint stays, and probes find it from there on."""
    config = tmp_path / "models.json"
    config.write_text(json.dumps({"models": [RESNET]}))
    file = tmp_path / "p.png"
    file.write_bytes(b64decode(picture_text()))
    index = tmp_path / "index.safetensors"
    layers = "conv1,bn1,layer2,global_pool"
    run("-m", "layertap", "extract", file, "--layers", layers, "--out", index, "--config", config)
    same = run("-m", "layertap", "check", index, "--config", config)
    assert [line.partition(": ")[2] for line in same.splitlines()] == ["same"] * 4
    changed = run("-c", OF_ANOTHER_VERSION, "check", index, "--config", config, status=1)
    verdicts = dict(line.removeprefix("net ").split(": ", 1) for line in changed.splitlines())
    assert verdicts.pop("conv1") == "same"
    assert all(words.startswith("changed by 0.") for words in verdicts.values()), verdicts
    assert "fingerprint" not in changed


def run(*words: str | Path, status: int = 0) -> str:
    """What a process prints that ends with a status."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout


def no_receipts(file: Path) -> None:
    """A file of each kind that holds vectors, and nothing of what made them."""
    if file.suffix == ".safetensors":
        save_file({"vectors": np.zeros(3)}, file)
    else:
        file.write_text("[]" if file.suffix == ".json" else "x")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.safetensors", "has no receipts"),
        ("a.json", "has no receipts"),
        ("a.npz", "of a kind that is not read"),
        ("http://127.0.0.1:9", "of a kind that is not read"),
    ],
)
def test_no_receipts(command: Command, tmp_path: Path, name: str, says: str) -> None:
    """A file without receipts, or of another kind, is refused, and what is read is named."""
    file = name if ":" in name else tmp_path / name
    if isinstance(file, Path):
        no_receipts(file)
    done = command("check", file)
    assert done.status == 2
    assert says in done.notes
    assert "a folder of `bulk`" in done.notes


@pytest.mark.parametrize(
    ("receipt", "says"),
    [
        ({}, "names no layer"),
        ({"layer": "gone", "call": 0, "site": "output"}, "there is no layer"),
        ({"layer": "block1", "pool": "mode"}, "Input should be"),
        ({"layer": "block1", "probe": 3}, "this is no probe"),
        ({"layer": "block1", "probe": {"input": "text", "values": "AAAAAAAA"}}, "made of a text"),
        ({"layer": "block1", "stats": 3}, "statistics"),
    ],
)
def test_receipts_that_make_no_sense(command: Command, tmp_path: Path, receipt: Json, says: str) -> None:
    """A receipt that can't be asked for here is told so, and the others are compared."""
    file = tmp_path / "index.json"
    file.write_text(json.dumps({"model": "digits", "receipts": {"one": receipt, "two": {"layer": "block1"}}}))
    done = command("check", file)
    assert done.status == 1
    one, two = done.out.splitlines()
    assert says in one
    assert two.startswith("digits two: another fingerprint")
