"""The embedded model as the chain that it is, computed part by part: no hook has a share in what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.server import Live
from tests.service.support import Array


def copy_digits(live: Live) -> Any:
    """A copy of the embedded model that no hook ever touches."""
    model = live.engine.manager.registry.get_entry("digits").model
    assert model is not None
    return copy.deepcopy(model.module).eval()


def random_images(count: int, seed: int) -> Array:
    """Random rows for the embedded model."""
    return np.random.default_rng(seed).normal(size=(count, 3, 32, 32)).astype(np.float32)


def forward(module: Any, x: Tensor, upto: str = "head", behind: str | None = None) -> Tensor:
    """The embedded model, part by part; it is a chain, of which ``behind`` names what came before ``x``."""
    names = [name for name, _ in module.named_children()]
    for name in names[0 if behind is None else names.index(behind) + 1 : names.index(upto) + 1]:
        x = getattr(module, name)(x)
    return x


def gradient(module: Any, x: Tensor, at: str, score: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient at what a part returns, by autograd on the chain cut in two."""
    start = forward(module, x, at).detach().requires_grad_()
    return torch.autograd.grad(score(forward(module, start.clone(), behind=at)).sum(), start)[0]
