"""What a fingerprint depends on, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.loading import identify_model
from layertap.models.plan.plan import ResolvedIntervention, ResolvedObjective
from layertap.models.plan.requested import LinearStep, Objective, Operation, Reduction, Sample, Selector, TensorData
from layertap.models.points import Point
from layertap.models.run.fingerprint import (
    digest_architecture,
    digest_changes,
    digest_explanation,
    digest_model,
    digest_reply,
    digest_result,
    digest_rows,
    digest_variant,
    get_proven_part,
    make_unproven,
    make_unrepeatable,
)
from layertap.models.sources.build import build_model
from layertap.models.spec import InputSpec, PreprocessSpec
from tests.conftest import net_spec
from tests.loading import load_model

MODEL = "0" * 32
POINT = Point("layer3", 0, (), "output")
PREPROCESS = PreprocessSpec(resize=32, crop=28)
INPUTS = (InputSpec("x", (4,)),)


def identity(**how: Any) -> str:
    return load_model(replace(net_spec("Chain"), **how)).identity


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "random:1"},
        {"dtype": "bfloat16"},
        {"inputs": (InputSpec("image", (3, 8, 9)),)},
        {"preprocess": PreprocessSpec(crop=8)},
    ],
    ids=lambda value: next(iter(value)),
)
def test_model(other: dict[str, Any]) -> None:
    """Other weights, another dtype or other rows make another model."""
    assert identity(**other) != identity()


def test_weights_bit(tmp_path: Path) -> None:
    """One bit of one weight makes another model; another place of the same file does not."""
    state = load_model(net_spec("Chain")).module.state_dict()
    for name in ("a", "b", "changed"):
        state["conv.bias"].view(torch.int32)[3] ^= name == "changed"
        save_file(state, tmp_path / f"{name}.safetensors")
    first, same, changed = (identity(weights=f"{tmp_path}/{name}.safetensors") for name in ("a", "b", "changed"))
    assert first == same != changed


def test_not_model() -> None:
    """The name, the memory format, the time of loading and the default embedding go in nowhere."""
    assert identity(name="another", load="lazy", memory_format="channels_last", embedding="conv") == identity()


def test_rows() -> None:
    """Rows of the model's own making leave its part as it is; others make another of it, by whom and by shape."""
    assert digest_rows(MODEL, "", None) == digest_rows(MODEL, "", [(4,)]) == MODEL
    digests = [digest_rows(MODEL, whose, shapes) for whose in ("caller", "mixed") for shapes in (None, [(4,)], [(5,)])]
    assert len({MODEL, *digests}) == 7
    assert digest_rows(MODEL, "caller", ((3, 4, 4),)) == "a6946d68ca3df4fdf19a261d5dee2529"


def test_preprocess() -> None:
    """Each step of preprocessing counts; with it, the input's own name does not."""
    changes: dict[str, dict[str, Any]] = {
        "resize": {"resize": 33},
        "crop": {"crop": None},
        "mean": {"mean": (0.5, 0.5, 0.5)},
        "std": {"std": (0.5, 0.5, 0.5)},
        "interpolation": {"interpolation": "bicubic"},
        "channels": {"channels": "bgr"},
        "letterbox": {"letterbox": (0, 0, 0), "crop": None},
        "background": {"background": (0, 0, 0)},
        "scale": {"scale": (0.0, 255.0), "mean": (0.0,) * 3, "std": (1.0,) * 3},
        "crop_rounding": {"crop_rounding": "floor"},
    }
    assert changes.keys() == {field.name for field in fields(PreprocessSpec)}
    specs = [PREPROCESS, None, *(replace(PREPROCESS, **change) for change in changes.values())]
    digests = [digest_model("w", "s", "float32", spec, INPUTS) for spec in specs]
    assert len(set(digests)) == len(digests)
    assert digest_model("w", "s", "float32", PREPROCESS, (InputSpec("y", (4,)),)) == digests[0]


def grow(module: nn.Module) -> None:
    """Change what a library may change tomorrow and compute the same: attributes, what is printed, tensors it makes."""
    part = next(part for part in module.modules() if isinstance(part, nn.Linear))
    part.tomorrow = 3
    part.extra_repr = lambda: "printed otherwise"
    part.register_buffer("table", torch.ones(2), persistent=False)
    module.add_module("unused", nn.Identity())


@pytest.mark.parametrize(("source", "lasts"), [("timm:test_resnet", True), ("python:tests.nets:Chain", False)])
def test_a_library_that_grows(source: str, lasts: bool) -> None:
    """A library's name stands for the structure, which may be written otherwise; of own code all of it counts."""
    spec = replace(net_spec("Chain"), source=source, inputs=None if lasts else net_spec("Chain").inputs)
    built = build_model(spec)
    before = identify_model(built, spec)
    if not lasts:
        built.module.add_module("linear", nn.Linear(1, 1))
    grow(built.module)
    assert (identify_model(built, spec) == before) is lasts


POINTS: dict[str, Any] = {"layer": "layer2", "call": 1, "path": ("0",), "site": "input", "function": "add#0"}
REDUCTIONS: dict[str, Any] = {
    "grid": (2, 2),
    "sample": Sample(2),
    "project": (LinearStep(bias=TensorData((1,), b"\0" * 4)),),
    "channels": (0, 1),
    "tokens": (0, 1),
    "heads": (0, 1),
    "queries": (0, 1),
    "keys": (0, 1),
    "stats": ("mean", "std"),
    "by": "channel",
    "over": "inputs",
    "edges": (0.0, 1.0),
    "combine": "sum",
    "metric": Objective("sum"),
    "pool": "mean",
    "normalize": True,
    "dtype": "float16",
}


def test_result() -> None:
    """Everything about a result counts: model, layer, call, path, site, narrowing, statistics, pool, dtype."""
    assert POINTS.keys() == {field.name for field in fields(Point)}
    assert REDUCTIONS.keys() == {field.name for field in fields(Reduction)}
    plain = Reduction()
    digests = [
        digest_result(MODEL, POINT, plain),
        digest_result("1" * 32, POINT, plain),
        *(digest_result(MODEL, replace(POINT, **{name: value}), plain) for name, value in POINTS.items()),
        *(digest_result(MODEL, POINT, replace(plain, **{name: value})) for name, value in REDUCTIONS.items()),
        digest_result(MODEL, POINT, Reduction(channels=(1, 0))),
        digest_result(MODEL, POINT, Reduction(tokens=(1, 0))),
        digest_result(MODEL, POINT, Reduction(stats=("std", "mean"))),
        digest_result(MODEL, replace(POINT, path=("0", "1")), plain),
        digest_result(MODEL, replace(POINT, path=("01",)), plain),
    ]
    assert len(set(digests)) == len(digests)


def test_digests_stay() -> None:
    """Digests are what they were: vectors of an index are compared with those of a later version."""
    assert digest_model(MODEL, MODEL, net_spec("Chain").precision, None, INPUTS) == "fec1127c0ab8b3d44937adf5e6671a35"
    gradient = replace(POINT, site="grad_output")
    info = TensorInfo((), (1, 3), "float32", layout="NC")
    goal = ResolvedObjective(POINT, info, Objective("layer", selector=Selector("a", "a"), channel=1))
    how = Reduction(channels=(1,), tokens=(2,), pool="mean", normalize=True, dtype="float16")
    assert digest_model("w", "s", "float32", PREPROCESS, INPUTS) == "6b1f7b88de21a9342d303cd54c27d5b1"
    assert digest_model("w", "s", "float32", PREPROCESS, INPUTS, decode="fast") == "82ba0c3453a61b5fb058a324df8b7d8d"
    assert digest_model("w", "s", "float32", PREPROCESS, INPUTS, decode="device") == "320a3db05c726c7e14159809fef30675"
    assert digest_model("w", "s", "float32", None, INPUTS) == "f35d4db6bc2126b0382e983110ef83e1"
    assert digest_architecture("torchvision:resnet18") == "f8dd4447889ecb97996149727f93e1f7"
    assert digest_architecture("torchvision:resnet18", '{"num_classes": 10}') == "4bc10851af509c16c556fa5096a28472"
    assert digest_result(MODEL, POINT, Reduction()) == "4fe3f0b01c5dc2794e4d295de88b514a"
    function = replace(POINT, layer="mixer", function="add#0")
    assert digest_result("m", function, Reduction(pool="mean")) == "4f47d0211af24f981f952d2f17aaa0b0"
    assert digest_result(MODEL, POINT, how) == "360ea010ba6e47f7eb92755cf295afcc"
    assert digest_explanation("gradient_rollout", ["b", "a"]) == "14decdc0229aa00c3736c3a95be8e71d"
    assert digest_result(MODEL, gradient, Reduction(), digest_changes([goal])) == "4dc5d5569e3d6587a9385bf1fce253a2"
    change = ResolvedIntervention(POINT, info, Operation("zero", channels=(1,)))
    assert digest_changes([change]) == "467aadeaa6a8be60ccbc5f5a319993a6"


def test_reply() -> None:
    """A reply's fingerprint is that of its only result, or of the set of them in any order."""
    assert digest_reply(["a"]) == digest_reply(["a", "a"]) == "a"
    assert digest_reply(["a", "b"]) == digest_reply(["b", "a"]) == digest_reply(["b", "a", "b"])
    assert len({digest_reply(each) for each in (["a"], ["a", "b"], ["a", "c"], ["a", "b", "c"])}) == 4


@pytest.mark.parametrize("make", [lambda: make_unproven(MODEL), make_unrepeatable])
def test_what_is_made_of_doubtful_ones(make: Callable[[], str]) -> None:
    """What a fingerprint is digested into is unproven or unrepeatable too, and another one each time."""
    pairs = [
        (
            digest_rows(each, "caller", None),
            digest_rows(each, "", None, "text"),
            digest_variant(each, "prompt", "query"),
            digest_result(each, POINT, Reduction()),
            digest_explanation("occlusion", ["a", each]),
            digest_variant(each, "sources", "change"),
            digest_variant(each, "dimensions", 8),
            digest_variant(each, "batch"),
            digest_reply(["a", each]),
        )
        for each in (make(), make())
    ]
    prefix = make().partition("-")[0]
    assert all(each.startswith(f"{prefix}-") for pair in pairs for each in pair)
    assert all(one != other for one, other in zip(*pairs, strict=True))


def test_proven_part() -> None:
    """Two loads of an unproven model have the part in common that was read; of others it is all."""
    one, two = make_unproven(MODEL), make_unproven(MODEL)
    assert one != two
    assert get_proven_part(one) == get_proven_part(two) != get_proven_part(make_unproven("1" * 32))
    assert get_proven_part(MODEL) == MODEL
