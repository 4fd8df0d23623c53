"""The recipes with gradients, as their page prints them, against torch's own autograd."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.server import Live
from tests.service.digits_reference import copy_digits, random_images
from tests.service.load_server import ROOT
from tests.service.support import Json, arrays_of, tensor

PAGE = (ROOT / "docs" / "how-to" / "gradient-recipes.md").read_text()
RECIPES = {
    title: json.loads(body)
    for title, body in re.findall(r"^## (.*?)\n.*?```json\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
}
ROWS = torch.from_numpy(random_images(3, seed=1))
INPUT = ".:grad_input"


def gradient_at_input(module: Any, value: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of the sum of a value of the rows."""
    rows = ROWS.clone().requires_grad_()
    value(rows).sum().backward()
    assert rows.grad is not None
    return rows.grad


def upto(module: Any, rows: Tensor, last: str) -> Tensor:
    for name, part in module.named_children():
        rows = part(rows)
        if name == last:
            break
    return rows


class GuidedReLU(torch.autograd.Function):
    """The rule of the paper: a gradient passes where both it and the value are above 0."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (value,) = ctx.saved_tensors
        return gradient.clamp(min=0) * (value > 0)


class Guided(nn.Module):
    """A ReLU of that rule."""

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = GuidedReLU.apply(value)
        return found


def guided(module: Any) -> dict[str, Tensor]:
    """Every ReLU by the paper's rule."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(part, name, Guided())
    return {INPUT: gradient_at_input(module, lambda rows: module(rows).amax(1))}


def one_logit(module: Any) -> dict[str, Tensor]:
    """Gradients at two layers, by what autograd keeps of them."""
    kept: dict[str, Tensor] = {}
    rows = ROWS
    for name, part in module.named_children():
        rows = part(rows)
        if name in ("block2", "block3"):
            rows.requires_grad_().retain_grad()
            kept[f"{name}:grad_output"] = rows
    rows[:, 3].sum().backward()
    return {name: value.grad for name, value in kept.items() if value.grad is not None}


def product(module: Any) -> dict[str, Tensor]:
    """By torch's own function for it."""
    vector = torch.zeros(len(ROWS), 10)
    vector[:, 3], vector[:, 5] = 1, -1
    _, found = torch.autograd.functional.vjp(module, ROWS, vector)  # type: ignore[no-untyped-call]
    return {INPUT: found}


def field(module: Any) -> dict[str, Tensor]:
    """The gradient of the sum of that place's channels."""
    return {INPUT: gradient_at_input(module, lambda rows: upto(module, rows, "block3")[:, :, 2, 3])}


def clipped(module: Any) -> dict[str, Tensor]:
    """By torch's own hook on the tensor."""
    first = upto(module, ROWS, "block1").detach().requires_grad_()
    second = module.block2(first)
    second.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    scores = module.head(module.flatten(module.pool(module.block3(second))))
    nn.functional.cross_entropy(scores, torch.full((len(ROWS),), 3), reduction="sum").backward()
    assert first.grad is not None
    return {"block1:grad_output": first.grad}


TRUTH = {
    "Guided backpropagation": guided,
    "One logit's gradient at any layer": one_logit,
    "A vector-Jacobian product": product,
    "What a unit sees: its receptive field": field,
    "Clipping": clipped,
}


def ask(live: Live, recipe: Json) -> dict[str, Any]:
    inputs = [tensor(row.numpy()) for row in ROWS]
    return arrays_of(live.client.post("/extract", json={**recipe, "inputs": inputs, "model": "digits"}))


def test_every_recipe_is_tested() -> None:
    """The page has these recipes and no others."""
    assert RECIPES.keys() == TRUTH.keys()


@pytest.mark.parametrize("title", TRUTH)
def test_recipe(live: Live, title: str) -> None:
    """A recipe gives what it is called."""
    found, expected = ask(live, RECIPES[title]), TRUTH[title](copy_digits(live))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-4, atol=1e-6)


def test_what_a_unit_does_not_see(live: Live) -> None:
    """The receptive field is a part of the picture, around its place."""
    found = ask(live, RECIPES["What a unit sees: its receptive field"])[INPUT]
    seen = (found != 0).any((0, 1))
    rows, columns = np.nonzero(seen.any(1))[0], np.nonzero(seen.any(0))[0]
    assert 0 <= rows[0] <= 8 <= rows[-1] < 31
    assert 0 <= columns[0] <= 12 <= columns[-1] <= 31
    assert not seen.all()
