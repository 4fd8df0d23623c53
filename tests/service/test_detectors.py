"""Detectors: lists of pictures of several sizes in, boxes of each out, as by plain hooks on the model alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.errors import LoadError
from layertap.models.loading import load_model
from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.detection_nets import build
from tests.service.support import Array, Json, arrays_of, configured, encode, image, net, problem, tensor

IMAGES = InputSpec("images", (3, 64, 80), as_list=True)
PIXELS = PreprocessSpec(mean=(0, 0, 0), std=(1, 1, 1))
SIZES = ((64, 80), (50, 70), (64, 80), (90, 90), (64, 80), (90, 90))
SEEDS = (0, 1, 2, 3, 4, 17)
LAYERS = ("backbone", "rpn.head.cls_logits", "roi_heads.box_head", ".[0][boxes]", ".[0][labels]", ".[0][scores]")


def spec(name: str, *inputs: InputSpec) -> ModelSpec:
    """The entry of the detector, which takes pictures too."""
    fields = {"module": "tests.service.detection_nets", "weights": "DEFAULT", "preprocess": PIXELS}
    return net(name, "build", *inputs, **fields)


def draw(number: int) -> Tensor:
    """A picture of noise."""
    shape, generator = (3, *SIZES[number]), torch.Generator().manual_seed(SEEDS[number])
    return torch.randint(0, 256, shape, generator=generator).float() / 255


PICTURES = [draw(number) for number in range(len(SIZES))]
EMPTY, FULL = 3, 5  # pictures of one size, of which the first has no box


@pytest.fixture(scope="module")
def live(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of the detector as noise surveys it, and as a picture without boxes does."""
    file = tmp_path_factory.mktemp("examples") / "empty.npz"
    np.savez(file, images=PICTURES[EMPTY].numpy())
    example = replace(IMAGES, shape=tuple(PICTURES[EMPTY].shape), example=str(file))
    with serve(configured(spec("rcnn", IMAGES), spec("empty", example))) as found:
        yield found


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


@pytest.mark.parametrize(
    ("model", "number", "box"), [("rcnn", 0, 2), ("rcnn", 2, None), ("empty", FULL, 1), ("empty", FULL, None)]
)
def test_gradients(live: Live, model: str, number: int, box: int | None) -> None:
    """The gradient of one box's score, and of the sum of all, is what autograd gives for the picture alone."""
    detector, seen = build(), list[Tensor]()
    detector.backbone.register_forward_hook(lambda _, args, out: seen.append(out))
    given = PICTURES[number].clone().requires_grad_()
    scores = detector([given])[0]["scores"]
    expected = torch.autograd.grad(scores.sum() if box is None else scores[box], [given, seen[0]])
    kind = {"kind": "sum"} if box is None else {"kind": "layer", "channel": box}
    objective = {**kind, "layer": ".[0][scores]"}
    sent, layers = [tensor(PICTURES[number].numpy())], (".:grad_input", "backbone:grad_output")
    found = ask(live, sent, *layers, objective=objective, model=model)
    for value, wanted in zip(found.values(), expected, strict=True):
        assert wanted.abs().max() > 0
        np.testing.assert_allclose(value.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-7)


def test_box_that_is_not_there(live: Live) -> None:
    """A number that a picture's boxes do not have is refused, whatever the survey has seen."""
    objective = {"kind": "layer", "layer": ".[0][scores]", "channel": 2}
    body = {"model": "rcnn", "layers": ["backbone:grad_output"], "objective": objective}
    for number in (EMPTY, FULL):
        sent = {"inputs": [tensor(PICTURES[number].numpy())]}
        assert "'channel'" in problem(live.client.post("/extract", json={**body, **sent}), 422)["detail"]


def climb(picture: Tensor, box: int | None, steps: int) -> tuple[Array, list[float], set[int]]:
    """A loop as people write it: the last picture, the objective at each step, and how many boxes steps found."""
    detector, curve, counts = build(), list[float](), set[int]()
    for _ in range(steps):
        picture = picture.detach().requires_grad_()
        scores = detector([picture])[0]["scores"]
        value = scores.sum() if box is None else scores[box]
        (slope,) = torch.autograd.grad(value, picture)
        curve, counts = [*curve, value.item()], counts | {len(scores)}
        picture = picture + 0.05 * slope / slope.abs().mean()
    scores = detector([picture])[0]["scores"].detach()
    return picture.detach().numpy(), [*curve, float(scores.sum() if box is None else scores[box])], counts


@pytest.mark.parametrize("box", [None, 0])
def test_optimise(live: Live, box: int | None) -> None:
    """Steps that raise a box's score, or the sum of all, follow the boxes that each finds."""
    kind = {"kind": "sum"} if box is None else {"kind": "layer", "channel": box}
    body: Json = {"model": "rcnn", "steps": 3, "learning_rate": 0.05, "rule": "scaled", "encoding": "base64"}
    body |= {
        "objective": {**kind, "layer": ".[0][scores]"},
        "inputs": [tensor(PICTURES[each].numpy()) for each in (1, 4)],
    }
    found = arrays_of(live.client.post("/optimise", json=body))
    for row, number in enumerate((1, 4)):
        picture, curve, counts = climb(PICTURES[number], box, 3)
        assert len(counts) > 1
        assert curve[-1] > curve[0]
        np.testing.assert_allclose(found["objective"][row], curve, rtol=1e-4)
        np.testing.assert_allclose(found[f"input.input{row}"][0], picture, atol=1e-3)


def test_optimised_box_that_vanishes(live: Live) -> None:
    """A step that leaves a picture without the box ends the optimisation, and says so."""
    body: Json = {"model": "rcnn", "steps": 3, "learning_rate": 0.02, "rule": "sign"}
    body |= {
        "objective": {"kind": "layer", "layer": ".[0][scores]", "channel": 1},
        "inputs": [tensor(PICTURES[5].numpy())],
    }
    assert "'channel'" in problem(live.client.post("/optimise", json=body), 422)["detail"]


def test_boxes_are_no_classes(live: Live) -> None:
    """A map needs the score of a box as its objective, which the hint is; nothing names boxes as the best classes."""
    body: Json = {"model": "rcnn", "method": "grad_cam", "inputs": [tensor(PICTURES[0].numpy())]}
    for objective in ({}, {"class": 1}, {"kind": "probability", "layer": ".[0][scores]"}):
        refused = problem(live.client.post("/explain", json=body | {"objective": objective}), 422)
        assert "has as many entries as an input has boxes" in refused["detail"]
    hint = json.loads(refused["hint"][refused["hint"].index("{") : refused["hint"].index("}") + 1])
    reply = live.client.post("/explain", json=body | {"objective": hint | {"channel": 1}, "encoding": "base64"})
    assert "top_classes" not in reply.json()

    detector, seen = build(), list[Tensor]()
    detector.backbone.register_forward_hook(lambda _, args, out: seen.append(out))
    score = detector([PICTURES[0]])[0]["scores"][1]
    values = seen[0][0]
    (slope,) = torch.autograd.grad(score, seen[0])
    expected = (slope[0].mean((1, 2))[:, None, None] * values).sum(0).clamp_min(0).detach().numpy()
    np.testing.assert_allclose(arrays_of(reply)["grad_cam"][0], expected, rtol=1e-3, atol=1e-6 * expected.max())


REFUSED: dict[str, Json] = {
    "channel": {"layers": ["backbone"], "interventions": [{"layer": "backbone", "op": "zero", "channels": [999]}]},
    "objective": {"layers": [".:grad_input"], "objective": {"kind": "layer", "layer": "backbone", "channel": 999}},
    "no boxes": {"layers": [{"layer": ".[0][scores]", "pool": "max"}], "inputs": [tensor(PICTURES[EMPTY].numpy())]},
    "no statistics": {"layers": [{"layer": ".[0][scores]", "stats": ["mean"]}]},
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("model", ["rcnn", "empty"])
def test_refused(live: Live, model: str, case: str) -> None:
    """What a picture's sizes don't allow is refused, also if they are those that the survey saw; skipped if asked."""
    picture = PICTURES[0] if model == "rcnn" else PICTURES[EMPTY]
    full = tensor(PICTURES[FULL].numpy())
    body = {"model": model, "inputs": [tensor(picture.numpy())], **REFUSED[case]}
    if case == "no statistics":
        body["inputs"] = [tensor(PICTURES[EMPTY].numpy())]
    problem(live.client.post("/extract", json=body), 422)
    if case.startswith("no "):
        reply = live.client.post("/extract", json={**body, "inputs": [full, *body["inputs"]], "on_error": "skip"})
        assert (reply.status_code, reply.headers["x-layertap-skipped"]) == (200, "1"), reply.text


def test_larger_than_planned(serve: Serve) -> None:
    """A reply is bounded by what pictures turn out to have, not by what the survey saw."""
    with serve(configured(spec("rcnn", IMAGES)), max_json_numbers=40) as small:
        body = {"model": "rcnn", "inputs": [tensor(each.numpy()) for each in PICTURES], "layers": [".[0][boxes]"]}
        problem(small.client.post("/extract", json=body), 413)


def test_single_input() -> None:
    """A list is of the only input: of several the forward's own code makes one."""
    with pytest.raises(LoadError, match="only input"):
        load_model(spec("several", IMAGES, InputSpec("targets", (2,))))
