"""Maps made of captures, against the same sums written out."""

from __future__ import annotations

import numpy as np
import pytest
from timm.models.vision_transformer import VisionTransformer

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import SelectorError
from layertap.models.explanations.map_layers import find_attention, find_map_layers, is_map
from layertap.models.explanations.maps import (
    average_heads,
    find_zero_rows,
    grad_cam,
    relevance,
    rollout,
    saliency,
    weight_by_gradient,
)
from layertap.models.selection.hook_points import HookPoint
from tests.nets import resnet, surveyed, swin, vit

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

    def at(array: np.ndarray, row: int, channel: int, y: int, x: int) -> float:  # type: ignore[type-arg]
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


def test_saliency() -> None:
    """The largest absolute gradient over channels."""
    gradients = np.zeros((1, 3, 2, 4), np.float32)
    gradients[0, :, 0, 1] = (1.0, -5.0, 2.0)
    gradients[0, :, 1, 3] = (-0.5, 0.25, 0.0)
    wanted = np.zeros((1, 2, 4), np.float32)
    wanted[0, 0, 1], wanted[0, 1, 3] = 5.0, 0.5
    assert np.array_equal(saliency(gradients, LEAVES["NCHW"]), wanted)


@pytest.mark.parametrize("prefix", [1, 0])
def test_rollout(prefix: int) -> None:
    """Layer by layer, entry by entry: attention and shortcut, each half, multiplied in the order of the forward."""
    tokens = 4 + prefix
    generator = np.random.default_rng(2)
    layers = [generator.random((2, tokens, tokens)).astype(np.float32) for _ in range(3)]
    found = rollout(layers, 0.0, prefix)
    assert found.shape == (2, 2, 2)
    for row in range(2):
        whole = [[float(i == j) for j in range(tokens)] for i in range(tokens)]
        for layer in layers:
            step = [[float(layer[row, i, j]) + (i == j) for j in range(tokens)] for i in range(tokens)]
            step = [[entry / sum(line) for entry in line] for line in step]
            whole = [
                [sum(step[i][k] * whole[k][j] for k in range(tokens)) for j in range(tokens)] for i in range(tokens)
            ]
        wanted = whole[0] if prefix else [sum(line[j] for line in whole) / tokens for j in range(tokens)]
        np.testing.assert_allclose(found[row].reshape(-1), wanted[prefix:], rtol=1e-5)


@pytest.mark.parametrize("prefix", [1, 0])
def test_relevance(prefix: int) -> None:
    """Entry by entry: R is one at first and becomes R + A R with each layer; nothing is normalised."""
    tokens = 4 + prefix
    generator = np.random.default_rng(3)
    layers = [generator.random((2, tokens, tokens)).astype(np.float32) for _ in range(3)]
    found = relevance(layers, prefix)
    assert found.shape == (2, 2, 2)
    places = range(tokens)
    for row in range(2):
        whole = [[float(i == j) for j in places] for i in places]
        for layer in layers:
            whole = [
                [whole[i][j] + sum(float(layer[row, i, k]) * whole[k][j] for k in places) for j in places]
                for i in places
            ]
        wanted = whole[0] if prefix else [sum(line[j] for line in whole) / tokens for j in places]
        np.testing.assert_allclose(found[row].reshape(-1), wanted[prefix:], rtol=1e-5)


def test_discard() -> None:
    """The lowest share of a layer's entries counts as 0, row by row of the batch."""
    layer = np.arange(1, 33, dtype=np.float32).reshape(2, 4, 4)
    cut = layer.copy()
    cut[0].flat[:8] = 0
    cut[1].flat[:8] = 0
    assert np.array_equal(rollout([layer], 0.5, 0), rollout([cut], 0.0, 0))
    assert not np.array_equal(rollout([layer], 0.0, 0), rollout([cut], 0.0, 0))


def test_relevant_attention() -> None:
    """Only what speaks for the objective, averaged over heads."""
    weights = np.array([[[[0.5, 0.5]], [[0.2, 0.8]]]], np.float32)
    gradients = np.array([[[[2.0, -4.0]], [[1.0, 0.5]]]], np.float32)
    np.testing.assert_allclose(weight_by_gradient(weights, gradients), [[[0.6, 0.2]]], rtol=1e-6)
    np.testing.assert_allclose(average_heads(weights), [[[0.35, 0.65]]], rtol=1e-6)


def test_what_can_be_rolled_out() -> None:
    """Attention over all patches in every layer: not windows, not convolutions."""
    found = find_attention(surveyed(vit(), 3, 32, 32, prefix=1), 1)
    assert [tap.point.layer for tap in found] == [
        f"encoder.layers.encoder_layer_{number}.self_attention" for number in range(2)
    ]
    for factory in (swin, resnet):
        with pytest.raises(SelectorError, match="rolled out"):
            find_attention(surveyed(factory(), 3, 32, 32), 0)


def test_zero_maps() -> None:
    """Which rows have nothing but zeros: NaN is something."""
    found = np.zeros((4, 2, 2), np.float32)
    found[1, 0, 1], found[2, 1, 1] = 1e-30, np.nan
    assert find_zero_rows(found) == [0, 3]
    assert find_zero_rows(found[1:2]) == []


def test_what_is_a_map() -> None:
    """A grid of positions for every row: not what was pooled, not a sequence that makes no square."""
    assert all(is_map(info) for info in LEAVES.values())
    assert not is_map(TensorInfo((), (1, 3, 1, 1), "float32", layout="NCHW"))
    assert not is_map(TensorInfo((), (1, 7, 3), "float32", layout="NTC", prefix=2))
    assert not is_map(TensorInfo((), (1, 3), "float32", layout="NC"))
    assert not is_map(TensorInfo((), (4, 3, 2, 2), "float32", layout="NCHW"))
    assert not is_map(TensorInfo((), (1, 3, 2, 2), "float32", layout=None))


def test_maps() -> None:
    """Layers that return maps, the last one first, the outer one of those that return the same."""
    end = HookPoint(".", 0, (), "output")
    assert find_map_layers(surveyed(resnet(), 3, 64, 64), end)[0].point.layer == "layer4"
    assert (
        find_map_layers(surveyed(resnet(), 3, 64, 64), HookPoint("layer2.0.relu", 0, (), "output"))[0].point.call == 0
    )
    assert find_map_layers(surveyed(vit(), 3, 32, 32, prefix=1), end)[0].point.layer == "encoder"
    tap = find_map_layers(surveyed(swin(), 3, 32, 32), end)[0]
    assert tap.info.shape[0] == 1
    assert tap.point.layer in ("norm", "permute")
    with pytest.raises(SelectorError, match="no layer"):
        find_map_layers(surveyed(resnet().fc, 512), end)


def test_maps_are_not_of_queries() -> None:
    """What an attention is made of inside is no map, though it has an entry for each patch."""
    catalog = surveyed(
        VisionTransformer(img_size=32, patch_size=8, depth=1, num_heads=2, embed_dim=24), 3, 32, 32, prefix=1
    )
    names = [tap.point.layer for tap in find_map_layers(catalog, HookPoint(".", 0, (), "output"))]
    assert is_map(catalog.layers["blocks.0.attn.qkv"].calls[0].output.tensors[0])
    assert {"blocks.0.norm1", "blocks.0.attn", "blocks.0.mlp.fc1"} <= set(names)
    assert not [name for name in names if name.startswith("blocks.0.attn.")]
