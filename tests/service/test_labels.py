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

from layertap.models.digits import architecture
from layertap.service.config.configuration import Configuration, read_configuration
from layertap.service.config.file import ConfigError
from tests import transformers_nets
from tests.marks import slow
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


def read(folder: Path, *entries: Json) -> Configuration:
    """A configuration that is written to a file."""
    (folder / "models.json").write_text(json.dumps({"models": entries}))
    return read_configuration(folder / "models.json", before_loading=True)


def configuration(folder: Path, **fields: Any) -> Configuration:
    return read(folder, {"name": "own", "device": "cpu", **fields})


LABELS: dict[str, tuple[object, str]] = {  # what is configured, and what a file of that name holds
    "configuration": (WORDS, ""),
    "names.txt": ("names.txt", "\n".join(WORDS) + "\n"),
    "names.json": ("names.json", json.dumps(WORDS)),
    "numbered.json": ("numbered.json", json.dumps({str(number): word for number, word in enumerate(WORDS)})),
}


def test_configured(serve: Serve, tmp_path: Path, live: Live) -> None:
    """The class that was chosen has its name, in extracts and explanations, wherever the names are written."""
    entries = []
    for number, (origin, (labels, content)) in enumerate(LABELS.items()):
        (tmp_path / origin).write_text(content)
        entries.append({"name": f"m{number}", "device": "cpu", **DIGITS, "labels": labels})
    entries.append({**entries[0], "name": "wrong", "labels": ["x"] * 9, "required": False})
    plain = live.client.post("/extract", **raw(picture(), "image/png", **TOP)).json()["receipts"][".:grad_input"]
    assert "labels" not in plain
    with serve(read(tmp_path, *entries)) as own:
        for number, origin in enumerate(LABELS):
            model = f"m{number}"
            assert own.client.get(f"/models/{model}").json()["labels"] == {"count": 10, "from": origin}
            answer = own.client.post("/extract", **raw(picture(), "image/png", model=model, **TOP)).json()
            explained = own.client.post(
                "/explain", **raw(picture(), "image/png", model=model, method="saliency")
            ).json()
            assert answer["receipts"][".:grad_input"]["classes"] == plain["classes"]
            for receipt in (answer["receipts"][".:grad_input"], explained["receipts"]["saliency"]):
                assert receipt["labels"] == [WORDS[each] for each in receipt["classes"]]
        wrong = own.client.get("/models/wrong").json()
        assert wrong["state"] == "failed"
        assert "labels has 9 names, and the model has 10 classes" in wrong["reason"]


def from_torchvision(folder: Path) -> tuple[Json, list[str], str]:
    weights = SqueezeNet1_1_Weights.DEFAULT
    name = weights.url.rpartition("/")[2]
    torch.save(seeded(get_model("squeezenet1_1"), 0).state_dict(), folder / name)
    return {"source": "torchvision:squeezenet1_1", "weights": name}, list(weights.meta["categories"]), "weights"


def from_timm(folder: Path) -> tuple[Json, list[str], str]:
    module, shown = seeded(timm.create_model("test_resnet", num_classes=3), 0), {"n1": "ant", "n2": "bee", "n3": "cat"}
    save_for_hf(module, folder / "saved", model_config={"label_names": list(shown), "label_descriptions": shown})
    return {"source": "timm:saved/"}, list(shown.values()), "config.json"


def from_transformers(folder: Path) -> tuple[Json, list[str], str]:
    names = ["ant", "bee", "cat"]
    module = transformers_nets.net("vit", 0)
    module.config.id2label = dict(enumerate(names))
    module.save_pretrained(folder / "vit")
    return {"source": "transformers:vit"}, names, "config.json"


@pytest.mark.parametrize("write", [slow(from_torchvision), slow(from_timm), from_transformers])
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


def test_mistakes(tmp_path: Path) -> None:
    """What shows before anything is loaded is a mistake of the file, at its place."""
    (tmp_path / "names.csv").write_text("a,b")
    with pytest.raises(ConfigError, match=r"models\.0\.labels.* of a kind that is not read"):
        configuration(tmp_path, **DIGITS, labels="names.csv")
