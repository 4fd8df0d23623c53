"""At which layer Grad-CAM looks where none is named, against gradients taken without hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.explanations.map_layers import find_last_sensitive, find_map_layers
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.selection.hook_points import HookPoint, Objective
from tests.nets import resnet, surveyed, vit
from tests.oracle import seeded

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "num_heads": 2, "embed_dim": 24, "num_classes": 7}
ROW = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(4))


def timm_vit(**changes: Any) -> VisionTransformer:
    """A small vision transformer of timm, no weight of it zero."""
    return seeded(VisionTransformer(**{**SMALL, **changes}), 5)


def looked_at(module: nn.Module, prefix: int = 0, objective: Objective | None = None) -> tuple[HookPoint, HookPoint]:
    """The layer that is chosen, and the last one that returns a map."""
    catalog = surveyed(module.requires_grad_(False), 3, 32, 32, prefix=prefix)
    goal = resolve_objective(objective or Objective("logit", "top"), catalog)
    found = find_map_layers(catalog, goal.point)
    chosen = find_last_sensitive(FeatureExtractor(module), lambda: module(ROW.clone()), found, goal)
    assert chosen is not None
    return chosen.point, found[0].point


FIRST_NORMS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "torchvision": (vit, 1, "encoder.layers.encoder_layer_1.ln_1"),
    "registers": (partial(timm_vit, reg_tokens=3), 4, "blocks.1.norm1"),
}


@pytest.mark.parametrize("kind", FIRST_NORMS)
def test_class_tokens(kind: str) -> None:
    """Behind the last attention a class token depends on no patch: the norm before it is the last that matters."""
    factory, prefix, name = FIRST_NORMS[kind]
    chosen, last = looked_at(factory(), prefix)
    assert (chosen.layer, chosen.site) == (name, "output")
    assert last.layer != name


USUAL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mean of patches": (partial(timm_vit, global_pool="avg", class_token=False), 0),
    "mean beside a class token": (partial(timm_vit, global_pool="avg"), 1),
    "resnet": (resnet, 0),
}


@pytest.mark.parametrize("kind", USUAL)
def test_the_usual_layer(kind: str) -> None:
    """Where the answer is made of all positions it stays the last layer that returns a map."""
    factory, prefix = USUAL[kind]
    chosen, last = looked_at(factory(), prefix)
    assert chosen == last
