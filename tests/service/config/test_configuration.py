"""The configuration file: what it may say, and that its paths stay with the operator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from layertap.models.digits import WEIGHTS
from layertap.models.spec import InputSpec, PreprocessSpec
from layertap.service.config.configuration import read_configuration
from tests.service.config.test_mistakes import MODEL, write_config
from tests.service.conftest import Serve
from tests.service.gated_server import post_rows
from tests.service.nets_http import Gated
from tests.service.support import arrays_of, problem

WHOLE = """
# a comment
models:
  - name: one.A_b-1
    source: torchvision:resnet50
    weights: random:7
    device: cpu
    dtype: float16
    memory_format: channels_last
    load: lazy
    embedding: avgpool
    decode: fast
    preprocess: {resize: [40, 32], crop: 32, mean: [0.1, 0.2, 0.3], std: [1, 1, 1], interpolation: bicubic}
  - name: two
    source: python:package.module:factory
    inputs:
      - {name: x, shape: [3, 32, 32]}
      - {name: kind, shape: [], dtype: int64}
defaults: {model: two}
"""


def test_yaml(tmp_path: Path) -> None:
    """Every field is read, tuples from lists, and what is left out has its default."""
    configuration = read_configuration(write_config(tmp_path, WHOLE))
    one, two = configuration.models
    assert configuration.default == "two"
    assert (one.name, one.source, one.weights, one.device) == ("one.A_b-1", "torchvision:resnet50", "random:7", "cpu")
    assert (one.dtype, one.load, one.embedding) == ("float16", "lazy", "avgpool")
    assert (one.decode, two.decode) == ("fast", "exact")
    assert (one.memory_format, two.memory_format, two.tf32) == ("channels_last", "contiguous", False)
    assert one.preprocess == PreprocessSpec((40, 32), 32, (0.1, 0.2, 0.3), (1, 1, 1), "bicubic")
    assert two.inputs == (InputSpec("x", (3, 32, 32)), InputSpec("kind", (), "int64"))
    assert (two.weights, two.device, two.dtype, two.load, two.preprocess) == (
        *("DEFAULT", "auto", "auto", "startup", "preset"),
    )


@pytest.mark.parametrize("device", ["auto", "cuda:1"])
def test_for_a_gpu(tmp_path: Path, device: str) -> None:
    """What only a GPU does may be asked of a model that may be on one, and goes with what a GPU can resize by."""
    for mode in ("bilinear", "bicubic"):
        how = f"decode: device, device: '{device}', preprocess: {{resize: 8, interpolation: {mode}}}"
        warm = "warm: [{layers: [a], compile: true, cuda_graphs: [32, 1, 8]}, {layers: [b]}]"
        (spec,) = read_configuration(write_config(tmp_path, MODEL.format(f"{how}, {warm}"))).models
        assert spec.decode == "device"
        assert [each.cuda_graphs for each in spec.warm] == [(32, 1, 8), ()]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("weights", "w.safetensors", "{}/w.safetensors"),
        ("weights", "../w.pt", "{}/../w.pt"),
        *(("weights", each, each) for each in ("/abs/w.safetensors", "DEFAULT", "a.b_in1k", "random:1")),
        ("source", "transformers:bert", "transformers:{}/bert"),
        *(("source", each, each) for each in ("transformers:/abs/bert", "timm:bert")),
    ],
)
def test_paths(tmp_path: Path, field: str, value: str, expected: str) -> None:
    """A relative path is looked for beside the file, and only a folder's last part is shown; names stay as they are."""
    entry = {"name": "a", "source": "python:m:f", field: value}
    (spec,) = read_configuration(write_config(tmp_path, json.dumps({"models": [entry]}))).models
    assert getattr(spec, field) == expected.format(tmp_path)
    assert str(tmp_path) not in spec.shown_source
    assert spec.shown_source == entry["source"].replace("/abs/", "")


def test_loadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may load is not refused: factories beside the file, what is not required, names that a factory registers."""
    (tmp_path / "own_nets_beside.py").write_text("raise AssertionError('imported')")
    for name in ("own.pth", "broken.json", "adapter/adapter_config.json", "oldest/modules.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    entries = (
        *("source: 'python:own_nets_beside:build', weights: own.pth", "source: 'timm:registered_by_own_nets'"),
        *("source: 'torchvision:vgg11', weights: gone.pth, required: false", "source: 'python:tests.nets:Chain'"),
        *("source: 'torchvision:vgg11', device: 'cuda:7', required: false", "source: 'timm:resnet18.a1_in1k'"),
        *("source: 'transformers:adapter', required: false", "source: 'transformers:oldest'"),
        "source: 'torchvision:vgg11', labels: broken.json, required: false",
    )
    listed = "".join(f"- {{name: a{number}, {entry}}}\n" for number, entry in enumerate(entries))
    configuration = read_configuration(write_config(tmp_path, f"models:\n{listed}"), before_loading=True)
    assert len(configuration.models) == len(entries)


def test_served(serve: Serve, tmp_path: Path) -> None:
    """A file's models are served: a checkpoint beside it is loaded, one that is missing fails without its path."""
    module = Gated()
    safetensors.torch.save_file(module.state_dict(), tmp_path / "own.safetensors")
    entry = {"source": "python:tests.service.nets_http:Gated", "inputs": [{"name": "x", "shape": [4]}]}
    models = [
        {"name": "gated", "weights": "own.safetensors", **entry},
        {"name": "missing", "weights": "missing.safetensors", "required": False, **entry},
        {"name": "broken", "weights": "broken.pth", "required": False, **entry},
    ]
    (tmp_path / "broken.pth").write_bytes(b"no checkpoint")
    configuration = read_configuration(write_config(tmp_path, json.dumps({"models": models})), before_loading=True)
    with serve(configuration) as live:
        found = arrays_of(post_rows(live))
        weight, bias = (value.detach().numpy() for value in module.linear.parameters())
        np.testing.assert_allclose(found["linear"], np.ones((1, 4), np.float32) @ weight.T + bias, atol=1e-6)
        listed = {model["name"]: model for model in live.client.get("/models").json()["models"]}
        assert listed["gated"]["weights"] == "own.safetensors"
        assert [listed[name]["state"] for name in listed] == ["ready", "failed", "failed"]
        for name in ("missing", "broken"):
            assert name in listed[name]["reason"]
            assert str(tmp_path) not in live.client.get("/models").text
            assert tmp_path.name not in problem(post_rows(live, model=name), 503)["detail"]
        assert str(WEIGHTS.parent) not in live.client.get("/models").text
