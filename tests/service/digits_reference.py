"""The embedded model as the chain that it is, computed part by part: no hook has a share in what comes out."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
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


def forward(module: Any, x: Tensor, upto: str = "head") -> Tensor:
    """The embedded model, part by part; it is a chain."""
    for name, part in module.named_children():
        x = part(x)
        if name == upto:
            return x
    raise KeyError(upto)
