"""Detectors: lists of pictures of several sizes in, boxes of each out, as by plain hooks on the model alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.errors import LoadError
from layertap.models.loading import load_model
from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.detection_nets import build
from tests.service.support import Array, Json, arrays_of, encode, image, net, tensor

IMAGES = InputSpec("images", (3, 64, 80), as_list=True)
PIXELS = PreprocessSpec(mean=(0, 0, 0), std=(1, 1, 1))
SIZES = ((64, 80), (50, 70), (64, 80), (90, 90), (64, 80))
LAYERS = ("backbone", "rpn.head.cls_logits", "roi_heads.box_head", ".[0][boxes]", ".[0][labels]", ".[0][scores]")


def spec(*inputs: InputSpec, **fields: Any) -> ModelSpec:
    return net("rcnn", "build", *inputs, module="tests.service.detection_nets", weights="DEFAULT", **fields)


def draw(number: int) -> Tensor:
    """A picture whose values are those of pixels; the last one is of one colour, and has no box."""
    shape, generator = (3, *SIZES[number]), torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, shape, generator=generator)
    return (pixels if number < len(SIZES) - 1 else pixels * 0).float() / 255


PICTURES = [draw(number) for number in range(len(SIZES))]


live = server_of(spec(IMAGES, preprocess=PIXELS))


def ask(live: Live, inputs: list[Json], *layers: str, **more: Any) -> dict[str, Array]:
    body = {"model": "rcnn", "inputs": inputs, "layers": list(layers or LAYERS), "encoding": "base64", **more}
    return arrays_of(live.client.post("/extract", json=body))


def run(picture: Tensor) -> dict[str, Array]:
    """What plain hooks see in a forward of one picture."""
    detector, seen = build(), dict[str, Tensor]()
    for name in LAYERS[:3]:
        detector.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: seen.update({name: out}))
    with torch.no_grad():
        (found,) = detector([picture])
    return {key: each.numpy() for key, each in {**seen, **{f".[0][{name}]": found[name] for name in found}}.items()}


EXPECTED = [run(picture) for picture in PICTURES]


@pytest.mark.parametrize("form", ["tensor", "picture"])
def test_values(live: Live, form: str) -> None:
    """Layers and boxes of each picture, alone and beside others, of which each has a number of boxes of its own."""
    counts = [len(each[".[0][scores]"]) for each in EXPECTED]
    assert (len(set(counts)) > 2, min(counts)) == (True, 0)
    pixels = [(picture * 255).round().byte().permute(1, 2, 0).numpy() for picture in PICTURES]
    sent = [tensor(each.numpy()) for each in PICTURES] if form == "tensor" else [image(encode(each)) for each in pixels]
    for entry, expected in zip(sent, EXPECTED, strict=True):
        found = ask(live, [entry])
        assert found.keys() == expected.keys()
        for key, value in found.items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-5)
    together = ask(live, sent)
    for key in LAYERS:
        for number, expected in enumerate(EXPECTED):
            rows = slice(number * len(expected[key]), (number + 1) * len(expected[key]))
            value = together[key][rows] if key in together else together[f"{key}.input{number}"]
            np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-5)


def test_gradients(live: Live) -> None:
    """The gradient of one box's score, and of the sum of all, is what autograd gives for the picture alone."""
    for picture, kind in ((PICTURES[0], {"kind": "layer", "channel": 2}), (PICTURES[2], {"kind": "sum"})):
        detector, seen = build(), list[Tensor]()
        detector.backbone.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out))
        given = picture.clone().requires_grad_()
        scores = detector([given])[0]["scores"]
        score = scores[2] if "channel" in kind else scores.sum()
        expected = torch.autograd.grad(score, [given, seen[0]])
        objective = {**kind, "layer": ".[0][scores]"}
        found = ask(live, [tensor(picture.numpy())], ".:grad_input", "backbone:grad_output", objective=objective)
        for value, wanted in zip(found.values(), expected, strict=True):
            assert wanted.abs().max() > 0
            np.testing.assert_allclose(value.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-7)


def test_single_input() -> None:
    with pytest.raises(LoadError, match="only input"):
        load_model(spec(IMAGES, InputSpec("targets", (2,))))
