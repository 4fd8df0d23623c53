"""Names of classes: where they come from, what replies say of them, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models import save_for_hf
from torchvision.models import SqueezeNet1_1_Weights, get_model
from transformers import ViTConfig, ViTForImageClassification

from layertap.models.digits import architecture
from layertap.service.config.configuration import Configuration, read_configuration
from layertap.service.config.file import ConfigError
from tests.oracle import seeded
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, npy, picture, raw

DIGITS = {
    "source": "python:layertap.models.digits:digits",
    "weights": str(Path(architecture.__file__).with_name("digits.safetensors")),
    "inputs": [{"name": "image", "shape": [3, 32, 32]}],
    "preprocess": {"resize": 32, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3},
}
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TOP = {"layers": ".:grad_input", "objective": "logit", "class": "top", "format": "json"}


def configuration(folder: Path, **fields: Any) -> Configuration:
    (folder / "models.json").write_text(json.dumps({"models": [{"name": "own", "device": "cpu", **fields}]}))
    return read_configuration(folder / "models.json", before_loading=True)


LABELS: dict[str, tuple[object, str]] = {  # what is configured, and what a file of that name holds
    "configuration": (WORDS, ""),
    "names.txt": ("names.txt", "\n".join(WORDS) + "\n"),
    "names.json": ("names.json", json.dumps(WORDS)),
    "numbered.json": ("numbered.json", json.dumps({str(number): word for number, word in enumerate(WORDS)})),
}


@pytest.mark.parametrize("origin", LABELS)
def test_configured(serve: Serve, tmp_path: Path, live: Live, origin: str) -> None:
    """The class that was chosen has its name, in extracts and explanations; nothing else of a reply is different."""
    labels, content = LABELS[origin]
    (tmp_path / origin).write_text(content)
    sent = raw(picture(), "image/png", **TOP)
    plain = live.client.post("/extract", **sent).json()
    with serve(configuration(tmp_path, **DIGITS, labels=labels)) as own:
        answer = own.client.post("/extract", **sent).json()
        explained = own.client.post("/explain", **raw(picture(), "image/png", method="saliency", format="json")).json()
        assert own.client.get("/models/own").json()["labels"] == {"count": 10, "from": origin}
    (receipt,), (other,), (explanation,) = (each["receipts"].values() for each in (answer, plain, explained))
    assert receipt.pop("labels") == [WORDS[number] for number in receipt["classes"]]
    assert "labels" not in other
    assert receipt["classes"] == other["classes"]
    assert explanation["labels"] == [WORDS[number] for number in explanation["classes"]]


def from_torchvision(folder: Path) -> tuple[Json, list[str], str]:
    name = SqueezeNet1_1_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(seeded(get_model("squeezenet1_1"), 0).state_dict(), folder / name)
    categories = list(SqueezeNet1_1_Weights.DEFAULT.meta["categories"])
    return {"source": "torchvision:squeezenet1_1", "weights": name}, categories, "weights"


def from_timm(folder: Path) -> tuple[Json, list[str], str]:
    module = seeded(timm.create_model("test_resnet", num_classes=3), 0)
    names = ["n1", "n2", "n3"]
    shown = {"n1": "ant", "n2": "bee", "n3": "cat"}
    save_for_hf(module, folder / "saved", model_config={"label_names": names, "label_descriptions": shown})
    return {"source": "timm:saved/"}, list(shown.values()), "config.json"


def from_transformers(folder: Path) -> tuple[Json, list[str], str]:
    names = ["ant", "bee", "cat"]
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=16,
        id2label=dict(enumerate(names)),
    )
    seeded(ViTForImageClassification(config), 0).save_pretrained(folder / "vit")
    return {"source": "transformers:vit"}, names, "config.json"


@pytest.mark.parametrize("write", [from_torchvision, from_timm, from_transformers])
def test_of_the_weights(serve: Serve, tmp_path: Path, write: Callable[[Path], tuple[Json, list[str], str]]) -> None:
    """What a library says of weights names the classes; what is configured goes before it."""
    fields, names, origin = write(tmp_path)
    with serve(configuration(tmp_path, **fields)) as live:
        shown = live.client.get("/models/own").json()
        assert live.client.get("/models/own/labels").json() == {"model": "own", "labels": names}
        shape = shown["inputs"][0]["shape"]
        row = np.random.default_rng(0).standard_normal(shape, np.float32)
        (receipt,) = (
            live.client.post("/extract", **raw(npy(row), "application/x-npy", **TOP)).json()["receipts"].values()
        )
    assert shown["labels"] == {"count": len(names), "from": origin}
    assert receipt["labels"] == [names[number] for number in receipt["classes"]]
    if write is from_timm:
        with serve(configuration(tmp_path, **fields, labels=["a", "b", "c"])) as live:
            assert live.client.get("/models/own").json()["labels"] == {"count": 3, "from": "configuration"}


def test_wrong_number(serve: Serve, tmp_path: Path) -> None:
    """A model fails whose classes are others in number than its labels, and says both numbers."""
    with serve(configuration(tmp_path, **DIGITS, labels=["x"] * 9, required=False)) as live:
        shown = live.client.get("/models/own").json()
        assert shown["state"] == "failed"
        assert "labels has 9 names, and the model has 10 classes" in shown["reason"]


@pytest.mark.parametrize(
    ("labels", "content", "message"),
    [
        ("names.csv", "a,b", "of a kind that is not read"),
        ("numbers.json", "[1, 2]", "can't be read"),
        ("empty.txt", "", "names no class"),
    ],
)
def test_mistakes(tmp_path: Path, labels: object, content: str | None, message: str) -> None:
    """What shows before anything is loaded is a mistake of the file, at its place."""
    if content is not None:
        (tmp_path / str(labels)).write_text(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        configuration(tmp_path, **DIGITS, labels=labels)
    assert "models.0.labels" in str(refusal.value)
