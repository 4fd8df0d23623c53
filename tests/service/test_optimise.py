"""Optimised inputs against torch.optim and autograd on copies of the models; what is refused, events, pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, forward, random_images
from tests.service.queue_harness import hold_queue
from tests.service.support import Array, Json, arrays_of, configured, image, net, picture, problem, same, tensor
from tests.transformers_nets import saved

IMAGES = random_images(2, seed=3)
INPUTS = [tensor(each) for each in IMAGES]
CHANNEL: Json = {"kind": "layer", "layer": "block2", "channel": 3}
BASE: Json = {"steps": 4, "learning_rate": 0.05, "inputs": INPUTS, "objective": CHANNEL, "encoding": "base64"}
EVENTS = {"accept": "text/event-stream"}
Value = Callable[[Any, Tensor], Tensor]  # of the module and a batch; a number for each row


@dataclass(frozen=True)
class Nets:
    live: Live
    digits: Any

    def optimise(self, **body: Any) -> dict[str, Array]:
        return arrays_of(self.live.client.post("/optimise", json=BASE | body))


@pytest.fixture(scope="module")
def nets(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nets]:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    saved("gpt2", folder)
    gpt2 = ModelSpec("gpt2", f"transformers:{folder}", device="cpu")
    resnet = ModelSpec("resnet", "python:tests.nets:resnet", inputs=(InputSpec("x", (3, 32, 32)),), preprocess="none")
    with serve(configured(gpt2, resnet, net("rows", "Gated"), load="startup")) as live:
        yield Nets(live, copy_digits(live))


def channel(module: Any, x: Tensor) -> Tensor:
    return forward(module, x, "block2")[:, 3].mean((1, 2))


def climb(
    module: Any,
    starts: Array,
    value: Value,
    make: Callable[..., torch.optim.Optimizer],
    *,
    steps: int = 4,
    rate: float = 0.05,
    adjust: Callable[[Tensor, Tensor], Tensor] = lambda slope, x: slope,
    project: Callable[[Tensor, Tensor], Tensor] = lambda x, start: x,
    penalty: Callable[[Tensor], Tensor] = lambda x: torch.zeros(()),
    shifts: Callable[[int], tuple[int, int]] = lambda step: (0, 0),
    sign: float = -1.0,
) -> dict[str, Array]:
    """A loop as people write it: one optimiser of torch for each row."""
    rows, curves = [], []
    for start in torch.from_numpy(starts)[:, None]:
        x = start.clone().requires_grad_()
        optimizer, curve = make([x], lr=rate), []
        for step in range(steps + 1):
            optimizer.zero_grad()
            measured = value(module, x.roll(shifts(step) if step < steps else (0, 0), (2, 3))).sum()
            curve.append(measured.item())
            if step < steps:
                (sign * measured + penalty(x)).backward()
                assert x.grad is not None
                x.grad = adjust(x.grad, x)
                optimizer.step()
                x.data = project(x.data, start)
        rows.append(x.detach()[0].numpy())
        curves.append(curve)
    return {"input": np.stack(rows), "objective": np.array(curves, np.float32)}


def vary(x: Tensor) -> Tensor:
    return 0.001 * ((x[..., 1:, :] - x[..., :-1, :]).abs().sum() + (x[..., 1:] - x[..., :-1]).abs().sum())


def draw_shift(step: int) -> tuple[int, int]:
    down, right = np.random.default_rng([7, step]).integers(-3, 4, 2)
    return int(down), int(right)




SGD, ADAM = torch.optim.SGD, torch.optim.Adam
# What is asked for, the objective of a batch, and the loop's own options.
RULES: dict[str, tuple[Json, Value, Any, Json]] = {
    "sgd": ({"learning_rate": 2.0}, channel, SGD, {"rate": 2.0}),
    "adam, many steps": ({"rule": "adam", "steps": 12}, channel, ADAM, {"steps": 12}),
    "one step of DeepDream": (
        {"rule": "scaled", "steps": 1, "objective": {"kind": "norm", "layer": "block3"}},
        lambda module, x: forward(module, x, "block3").flatten(1).norm(dim=1),
        SGD,
        {"steps": 1, "adjust": lambda slope, x: slope / slope.abs().mean()},
    ),
    "descent to a target": (
        {"rule": "adam", "minimise": True, "objective": {"kind": "mse", "target": [0.5] * 10}},
        lambda module, x: (module(x) - 0.5).square().mean(1),
        ADAM,
        {"sign": 1.0},
    ),
    "projected sign steps": (
        {"rule": "sign", "epsilon": 0.08, "clamp": [-1, 1], "objective": {"kind": "cross_entropy", "class": 3}},
        lambda module, x: cross_entropy(module(x), torch.tensor([3]).expand(len(x)), reduction="none"),
        SGD,
        {
            "adjust": lambda slope, x: slope.sign(),
            "project": lambda x, start: x.clamp(start - 0.08, start + 0.08).clamp(-1, 1),
        },
    ),
    "jitter and penalties": (
        {"rule": "adam", "jitter": 3, "seed": 7, "total_variation": 0.001, "l2": 0.01},
        channel,
        ADAM,
        {"shifts": draw_shift, "penalty": lambda x: vary(x) + 0.01 * x.square().sum()},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_equals_torch(nets: Nets, name: str) -> None:
    """The inputs after some steps, and the objective at each."""
    body, value, make, options = RULES[name]
    found, wanted = nets.optimise(**body), climb(nets.digits, IMAGES, value, make, **options)
    assert list(found) == ["input", "objective"]
    assert np.abs(found["input"] - IMAGES).max() > 1e-3
    for key, array in wanted.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5, err_msg=key)
