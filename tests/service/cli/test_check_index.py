"""``check INDEX``: whether vectors that are kept are still like those that are made here."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from timm.models.resnet import ResNet

from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.support import Json, picture

LAYERS = ("--layers", "block1,head:input", "--pool", "mean", "--normalize")
RESNET: Json = {"name": "net", "source": "timm:test_resnet", "weights": "random:0", "device": "cpu"}


def test_everything_of_a_receipt(command: Command, live: Live, tmp_path: Path) -> None:
    """Calls, paths, channels, statistics and reply dtypes are asked for as they were: fingerprints are the same."""
    layers: list[Json] = [
        {"layer": "block2.relu#0", "channels": [3, 1], "pool": "max", "dtype": "float16"},
        {"layer": "block2", "stats": ["histogram", "mean"]},
        {"layer": "head:input", "dtype": "int8", "pool": "flatten", "normalize": True},
        {"layer": "block2/add#0[1]:input", "pool": "mean"},
    ]
    body: Json = {"layers": layers, "inputs": [{"image": picture_text()}], "probe": True, "model": "digits"}
    file = tmp_path / "index.safetensors"
    file.write_bytes(live.client.post("/extract?format=safetensors", json=body).content)
    for where in ((), ("--url", live.url)):
        done = command("check", file, *where)
        assert done.status == 0
        assert [line.partition(": ")[2] for line in done.out.splitlines()] == ["same"] * 4


def picture_text() -> str:
    return b64encode(picture(1)).decode()


def test_an_older_file(command: Command, pictures: list[Path], tmp_path: Path) -> None:
    """Without probes fingerprints and spaces are compared, and it is said that numbers were not."""
    file = tmp_path / "index.json"
    command("extract", *pictures, *LAYERS, "--out", file)
    reply = json.loads(file.read_text())
    for receipt in reply["receipts"].values():
        del receipt["probe"]
    receipt = reply["receipts"]["block1"]
    receipt["fingerprint"] = "0" * 32
    for space, words in ((receipt["space"], "same space"), ("0" * 32, "another space"), ("", "another fingerprint")):
        receipt["space"] = space
        file.write_text(json.dumps(reply))
        done = command("check", file)
        assert done.status == ("same" not in words)
        first, second = done.out.splitlines()
        assert first.startswith(f"digits block1: {words}; it has no probe")
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
def test_a_library_that_computes_otherwise(
    command: Command, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One epsilon of a library's model is another: the fingerprint stays, and probes find it from there on."""
    config, index = tmp_path / "models.json", tmp_path / "index.safetensors"
    config.write_text(json.dumps({"models": [RESNET]}))
    layers = "conv1,bn1,layer2,global_pool"
    assert command("extract", pictures[0], "--layers", layers, "--out", index, "--config", config).status == 0
    done = command("check", index, "--config", config)
    assert [line.partition(": ")[2] for line in done.out.splitlines()] == ["same"] * 4
    built = ResNet.__init__

    def build(self: ResNet, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.bn1.eps = 1e-3  # was 1e-5

    monkeypatch.setattr(ResNet, "__init__", build)
    done = command("check", index, "--config", config)
    assert done.status == 1
    verdicts = dict(line.removeprefix("net ").split(": ", 1) for line in done.out.splitlines())
    assert verdicts.pop("conv1") == "same"
    assert all(words.startswith("changed by 0.") for words in verdicts.values()), verdicts
    assert "fingerprint" not in done.out


@pytest.mark.parametrize(("name", "says"), [("a.json", "has no receipts"), ("a.npz", "of a kind that is not read")])
def test_no_receipts(command: Command, tmp_path: Path, name: str, says: str) -> None:
    """A file without receipts, or of another kind, is refused, and what is read is named."""
    (tmp_path / name).write_text("[]")
    done = command("check", tmp_path / name)
    assert done.status == 2
    assert says in done.notes
    assert "a folder of `bulk`" in done.notes


@pytest.mark.parametrize(
    ("receipt", "says"),
    [
        ({}, "names no layer"),
        ({"layer": "gone", "call": 0, "site": "output"}, "there is no layer"),
        ({"layer": "block1", "probe": 3}, "this is no probe"),
        ({"layer": "block1", "probe": {"input": "text", "values": "AAAAAAAA"}}, "made of a text"),
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
