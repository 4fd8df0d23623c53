"""Digests that say which vectors may be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from models import digits
from models.fingerprint import architecture, of_model, of_reply, of_result
from models.loaded import LoadedModel, load
from models.plan import resolve
from models.points import HookPoint, Reduction
from models.selectors import parse
from models.spec import InputSpec, PreprocessSpec
from tests.conftest import Loader, net_spec

POINT = HookPoint("layer1", 1, ("a", "0"), "output")
HOW = Reduction(pool="mean")
PRESET = PreprocessSpec(resize=40, crop=32)
INPUTS = (InputSpec("x", (3, 32, 32)),)


def test_every_ingredient_of_a_result_counts() -> None:
    """Another model, layer, call, path, site or step of the reduction is another fingerprint; the same is the same."""
    points = [
        replace(POINT, **change)
        for change in ({"layer": "layer2"}, {"call": 0}, {"path": ()}, {"path": ("a0",)}, {"site": "input"})
    ]
    ways = [
        replace(HOW, **change)
        for change in (
            *({"pool": pool} for pool in ("none", "max", "gem", "cls", "flatten")),
            *({"dtype": dtype} for dtype in ("float16", "int8")),
            *({"channels": chosen} for chosen in ((0,), (0, 1), (1, 0))),
            *({"tokens": (0,)}, {"normalize": True}),
        )
    ]
    prints = [
        of_result("model", POINT, HOW),
        of_result("other", POINT, HOW),
        *(of_result("model", point, HOW) for point in points),
        *(of_result("model", POINT, how) for how in ways),
    ]
    assert len(set(prints)) == len(prints)
    assert of_result("model", replace(POINT), replace(HOW)) == prints[0]


def test_every_ingredient_of_a_model_counts() -> None:
    """Other weights, architecture, dtype, preprocessing or, without any, inputs are another model."""
    presets = [
        replace(PRESET, **change)  # type: ignore[arg-type]
        for change in (
            *({"resize": 41}, {"resize": (40, 40)}, {"resize": None}, {"crop": 31}, {"interpolation": "bicubic"}),
            *({"mean": (0.5, 0.5, 0.5)}, {"std": (0.5, 0.5, 0.5)}),
        )
    ]
    prints = [
        of_model("w", "s", "float32", PRESET, INPUTS),
        of_model("v", "s", "float32", PRESET, INPUTS),
        of_model("w", "t", "float32", PRESET, INPUTS),
        of_model("w", "s", "bfloat16", PRESET, INPUTS),
        of_model("w", "s", "float32", None, INPUTS),
        of_model("w", "s", "float32", None, (InputSpec("x", (3, 32, 33)),)),
        of_model("w", "s", "float32", None, (InputSpec("x", (3, 32, 32), "uint8"),)),
        *(of_model("w", "s", "float32", preset, INPUTS) for preset in presets),
    ]
    assert len(set(prints)) == len(prints)
    assert of_model("w", "s", "float32", replace(PRESET), INPUTS) == prints[0]


def test_architecture() -> None:
    """The source, a name, a class or a printed setting makes another architecture; weights and addresses do not."""

    def tree(padding: int = 1, act: nn.Module | None = None, name: str = "act", bias: bool = True) -> nn.Module:
        part = nn.Sequential()
        part.add_module("conv", nn.Conv2d(3, 4, 3, padding=padding, bias=bias))
        part.add_module(name, act or nn.ReLU())
        return part

    prints = [
        architecture(tree(), "a"),
        architecture(tree(), "b"),
        architecture(tree(padding=0), "a"),
        architecture(tree(bias=False), "a"),
        architecture(tree(act=nn.GELU()), "a"),
        architecture(tree(act=nn.GELU(approximate="tanh")), "a"),
        architecture(tree(name="activation"), "a"),
    ]
    assert len(set(prints)) == len(prints)
    assert architecture(tree(), "a") == prints[0]

    class Shown(nn.Module):
        def extra_repr(self) -> str:
            return f"function={object()!r}"

    assert architecture(Shown(), "a") == architecture(Shown(), "a")


def test_a_tied_module_is_part_of_the_architecture(load_net: Loader) -> None:
    """A module under two names is not the same as under one."""
    tied = load_net("Tied").module
    before = architecture(tied, "a")
    tied.decode = nn.Tanh()
    assert architecture(tied, "a") != before


def test_replies() -> None:
    """A single result's reply has its fingerprint; several have one that the order and repetitions do not change."""
    assert of_reply(["a"]) == of_reply(["a", "a"]) == "a"
    assert of_reply(["a", "b"]) == of_reply(["b", "a", "b"])
    assert len({of_reply(["a", "b"]), of_reply(["a", "c"]), of_reply(["a", "b", "c"]), "a", "b"}) == 5


def test_not_the_name_nor_the_device_nor_the_file(tmp_path: Path, kept: list[LoadedModel]) -> None:
    """The same weights give the same identity under any name, on any device's name, from a seed or from any file."""
    seeded = load(net_spec("Tied"))
    paths = [tmp_path / "a.safetensors", tmp_path / "deeper" / "b.pth"]
    paths[1].parent.mkdir()
    state = {name: value.clone() for name, value in seeded.module.state_dict().items()}
    save_file(state, paths[0])
    torch.save(state, paths[1])
    specs = [net_spec("Tied", weights=str(path)) for path in paths]
    specs += [replace(specs[0], name="another"), replace(specs[0], device="cpu:0"), replace(specs[0], embedding="act")]
    kept += [load(spec) for spec in specs]
    assert {model.identity for model in kept} == {seeded.identity}
    assert load(net_spec("Tied", weights="random:1")).identity != seeded.identity


def test_configuration_counts() -> None:
    """Another dtype or another preprocessing of the same weights is another identity."""
    specs = [
        digits.spec(),
        replace(digits.spec(), preprocess=replace(digits.PREPROCESS, interpolation="bicubic")),
        replace(digits.spec(), preprocess="none"),
        replace(digits.spec(), dtype="bfloat16"),
    ]
    models = [load(replace(spec, device="cpu")) for spec in specs]
    assert len({model.identity for model in models}) == 4
    assert len({model.digest for model in models}) == 1


CODE = """
import json
from models.loaded import load
from models.fingerprint import of_result
from tests.conftest import net_spec
from tests.models.test_fingerprint import HOW, POINT
model = load(net_spec("resnet", weights="DEFAULT"))
print(json.dumps([model.identity, model.digest, of_result(model.identity, POINT, HOW)]))
"""


def test_another_process(load_net: Loader) -> None:
    """Another process, its hashes seeded otherwise, comes to the same digests."""
    environment: dict[str, Any] = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True)
    model = load_net("resnet", weights="DEFAULT")
    assert json.loads(run.stdout) == [model.identity, model.digest, of_result(model.identity, POINT, HOW)]


def test_spellings_of_one_thing(load_net: Loader) -> None:
    """However a request writes a call, the fingerprint is that of the thing it names."""
    model = load_net("resnet")
    texts = ("layer1.0.relu", "layer1.0.relu#1", "layer1.0.relu#-1", "layer1.0.relu:output", "layer1.0.rel?")
    points = {resolve([parse(text)], model.catalog).results[0].capture.point for text in texts}
    assert len({of_result(model.identity, point, HOW) for point in points}) == 1
