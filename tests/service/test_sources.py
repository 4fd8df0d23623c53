"""What articles on hooks do with models other than ``digits``: each request gives the plain script's numbers.

Those with ``digits`` are on the page of hooks; one row without a batch axis, MNIST's pictures and rollouts have tests
of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import random_images
from tests.service.support import Json, arrays_of, configured, tensor

CLASS = 3
NUMBERS = np.random.default_rng(1).normal(size=(1, 5)).astype(np.float32)


class Doubled(nn.Module):
    """b = 2 a."""

    def forward(self, a: Tensor) -> Tensor:
        """Twice the numbers."""
        return 2 * a


class Silent(nn.Module):
    """It computes, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> None:
        self.last(self.first(x))


@pytest.fixture(scope="module")
def served(serve: Serve) -> Iterator[Live]:
    numbers, pictures = (InputSpec("x", (5,)),), (InputSpec("x", (3, 32, 32)),)
    specs = [
        ModelSpec("doubled", f"python:{__name__}:Doubled", weights="random:0", inputs=numbers, device="cpu"),
        ModelSpec("silent", f"python:{__name__}:Silent", weights="random:0", inputs=numbers, device="cpu"),
        ModelSpec("vit", "python:tests.service.test_every_kind:fused", inputs=pictures, device="cpu"),
    ]
    with serve(configured(*specs)) as live:
        yield live


def module_of(live: Live, name: str) -> Any:
    entry: Any = live.engine.manager.registry.get_entry(name)
    return copy.deepcopy(entry.model.module)


def extract(live: Live, model: str, rows: Any, **body: Any) -> dict[str, Any]:
    sent: Json = {"model": model, "inputs": [tensor(row) for row in rows], "encoding": "base64", **body}
    return arrays_of(live.client.post("/extract", json=sent))


def test_a_model_that_returns_nothing(served: Live) -> None:
    module, saved = module_of(served, "silent"), dict[str, Tensor]()

    def save(name: str, part: nn.Module, args: Any, output: Tensor) -> None:
        saved[name] = output.detach().clone()

    for name, part in module.named_modules():
        if name:
            part.register_forward_hook(partial(save, name))
    module(torch.from_numpy(NUMBERS))
    found = extract(served, "silent", NUMBERS, layers=["*"])
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_twice_a_tensor(served: Live) -> None:
    """The gradients of ``b.mean()`` at b, and at a."""
    a = torch.from_numpy(NUMBERS).requires_grad_()
    b = 2 * a
    b.retain_grad()
    b.mean().backward()
    found = extract(served, "doubled", NUMBERS, layers=[".:grad_output", ".:grad_input"], objective={"kind": "mean"})
    assert a.grad is not None
    np.testing.assert_array_equal(found[".:grad_output"], b.grad)
    np.testing.assert_array_equal(found[".:grad_input"], a.grad)


def test_attention_by_a_part_of_the_name(served: Live) -> None:
    """Weights and their gradients, of all layers that have ``attn`` in their names."""
    module, x, kept = module_of(served, "vit"), random_images(2, 6), list[Tensor]()

    def keep(part: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    for name, part in module.requires_grad_(True).named_modules():
        if name.endswith("attn"):
            part.fused_attn = False
        if "attn_drop" in name:
            part.register_forward_hook(keep)
    module(torch.from_numpy(x))[:, CLASS].sum().backward()
    layers = ["*.attn:attention", "*.attn:attention_grad"]
    found = extract(served, "vit", x, layers=layers, objective={"class": CLASS})
    for number, value in enumerate(kept):
        assert value.grad is not None
        for site, wanted in (("attention", value), ("attention_grad", value.grad)):
            reached = found[f"blocks.{number}.attn:{site}"]
            np.testing.assert_allclose(reached, wanted.detach(), rtol=1e-3, atol=1e-6)
