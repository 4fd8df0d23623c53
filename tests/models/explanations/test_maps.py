"""Maps made of captures, against the same sums written out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import SelectorError
from layertap.models.explanations.map_layers import find_attention, find_last_sensitive, find_map_layers
from layertap.models.explanations.maps import grad_cam
from layertap.models.hooks.attach import Modules
from layertap.models.plan.planner import resolve_objective
from layertap.models.plan.requested import Objective
from layertap.models.points import Point
from tests.nets import resnet, surveyed, swin, vit
from tests.oracle import seeded

LEAVES = {
    "NCHW": TensorInfo((), (1, 3, 2, 4), "float32", layout="NCHW"),
    "NHWC": TensorInfo((), (1, 2, 4, 3), "float32", layout="NHWC"),
    "NTC": TensorInfo((), (1, 6, 3), "float32", layout="NTC", prefix=2),
}


@pytest.mark.parametrize("layout", LEAVES)
def test_grad_cam(layout: str) -> None:
    """Each position: the sum over channels of its value times the channel's mean gradient; nothing below 0."""
    info = LEAVES[layout]
    generator = np.random.default_rng(1)
    values, gradients = (generator.normal(size=(2, *info.shape[1:])).astype(np.float32) for _ in range(2))
    found = grad_cam(values, gradients, info)
    height, width = (2, 2) if layout == "NTC" else (2, 4)
    assert found.shape == (2, height, width)
    assert found.dtype == np.float32

    def at(array: np.ndarray, row: int, channel: int, y: int, x: int) -> float:
        places = {"NCHW": (row, channel, y, x), "NHWC": (row, y, x, channel), "NTC": (row, 2 + y * 2 + x, channel)}
        return float(array[places[layout]])

    for row in range(2):
        means = [
            sum(at(gradients, row, channel, y, x) for y in range(height) for x in range(width)) / (height * width)
            for channel in range(3)
        ]
        for y in range(height):
            for x in range(width):
                wanted = max(sum(means[channel] * at(values, row, channel, y, x) for channel in range(3)), 0.0)
                assert found[row, y, x] == pytest.approx(wanted, abs=1e-5)
    assert 0 < (found > 0).mean() < 1


def test_what_can_be_rolled_out() -> None:
    """Attention over all patches in every layer: not windows, not convolutions."""
    found = find_attention(surveyed(vit(), 3, 32, 32, prefix=1), 1)
    assert [tap.point.layer for tap in found] == [
        f"encoder.layers.encoder_layer_{number}.self_attention" for number in range(2)
    ]
    with pytest.raises(SelectorError, match="rolled out"):
        find_attention(surveyed(swin(), 3, 32, 32), 0)


def test_maps() -> None:
    """Layers that return maps, the last one first, the outer one of those that return the same."""
    end = Point(".", 0, (), "output")
    assert find_map_layers(surveyed(resnet(), 3, 64, 64), end)[0].point.layer == "layer4"
    assert find_map_layers(surveyed(vit(), 3, 32, 32, prefix=1), end)[0].point.layer == "encoder"
    with pytest.raises(SelectorError, match="no layer"):
        find_map_layers(surveyed(resnet().fc, 512), end)


TIMM = {"img_size": 32, "patch_size": 8, "depth": 2, "num_heads": 2, "embed_dim": 24, "num_classes": 7}
# What is looked at where no layer is named; nothing for the last layer that returns a map.
LOOKED_AT: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "class token": (vit, 1, "encoder.layers.encoder_layer_1.ln_1"),  # behind the last attention it sees no patch
    "registers": (lambda: seeded(VisionTransformer(**TIMM, reg_tokens=3), 5), 4, "blocks.1.norm1"),
    "mean beside a class token": (lambda: seeded(VisionTransformer(**TIMM, global_pool="avg"), 5), 1, ""),
    "resnet": (resnet, 0, ""),
}


@pytest.mark.parametrize("kind", LOOKED_AT)
def test_the_last_layer_that_matters(kind: str) -> None:
    """Where no layer is named it is the last one with maps by which the objective has a gradient."""
    factory, prefix, name = LOOKED_AT[kind]
    module = factory().requires_grad_(False)
    catalog = surveyed(module, 3, 32, 32, prefix=prefix)
    goal = resolve_objective(Objective("logit", "top"), catalog)
    found = find_map_layers(catalog, goal.point)
    row = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    chosen = find_last_sensitive(Modules(module), lambda: module(row.clone()), found, goal)
    assert chosen is not None
    assert chosen.point.layer == (name or found[0].point.layer)
