"""Explanation maps, computed from captured arrays alone.

Each function takes float arrays, rows first, and returns a new float32 array. SelectorError if the grid of the patches
is unknown and they form no square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import SelectorError
from layertap.models.points import Grid, find_grid

Array = NDArray[Any]


def grad_cam(values: Array, gradients: Array, info: TensorInfo) -> Array:
    """ReLU of a layer's channels weighted by their mean gradients.

    ``values`` and ``gradients`` are that layer's; the result is (N, H, W) in its own pixels, or patches of its token
    grid, 0 and above. Selvaraju et al., "Grad-CAM", 2017, equations 1 and 2.
    """
    maps, slopes = (move_channels_first(each.astype(np.float32), info) for each in (values, gradients))
    return _weigh_channels(maps, slopes.mean((2, 3), keepdims=True))


def hires_cam(values: Array, gradients: Array, info: TensorInfo) -> Array:
    """As Grad-CAM, each value weighted by its own gradient.

    (N, H, W), 0 and above. Draelos and Carin, "Use HiResCAM instead of Grad-CAM", 2020, equation 3.
    """
    maps, slopes = (move_channels_first(each.astype(np.float32), info) for each in (values, gradients))
    return _weigh_channels(maps, slopes)


def layer_cam(values: Array, gradients: Array, info: TensorInfo) -> Array:
    """As Grad-CAM, each value weighted by its own gradient where that is above 0: fine maps of early layers.

    (N, H, W), 0 and above. Jiang et al., "LayerCAM", 2021, equations 5 to 7.
    """
    maps, slopes = (move_channels_first(each.astype(np.float32), info) for each in (values, gradients))
    return _weigh_channels(maps, np.maximum(slopes, 0.0))


def xgrad_cam(values: Array, gradients: Array, info: TensorInfo) -> Array:
    """As Grad-CAM, but gradients are averaged weighted by the channel's values; 0 if these add up to 0.

    (N, H, W), 0 and above. Fu et al., "Axiom-based Grad-CAM", 2020, equation 8.
    """
    maps, slopes = (move_channels_first(each.astype(np.float64), info) for each in (values, gradients))
    totals, moments = maps.sum((2, 3), keepdims=True), (maps * slopes).sum((2, 3), keepdims=True)
    return _weigh_channels(maps, np.divide(moments, totals, out=np.zeros_like(moments), where=totals != 0))


def weigh_by_scores(values: Array, weights: Array, info: TensorInfo) -> Array:
    """As Grad-CAM of one row, (1, H, W), each channel weighted by what scores of changed rows say; (channels,)."""
    return _weigh_channels(move_channels_first(values.astype(np.float32), info), weights[None, :, None, None])


def eigen_cam(values: Array, info: TensorInfo) -> Array:
    """A layer's values projected on their first principal component over positions.

    (N, H, W), 0 and above, NaN for a row with a value that is not finite; the sign agrees with the channels' mean.
    Muhammad and Yeasin, "Eigen-CAM", 2020, with the mean subtracted, as in pytorch-grad-cam.
    """
    maps = move_channels_first(values, info)
    result = np.full((len(maps), *maps.shape[2:]), np.nan, np.float32)
    for row, found in zip(maps, result, strict=True):
        flat = row.reshape(len(row), -1).astype(np.float64)
        if not np.isfinite(flat).all():
            continue
        centred = flat - flat.mean(1, keepdims=True)
        if len(centred) <= centred.shape[1]:  # either product gives the component: take the smaller one
            component = np.linalg.eigh(centred @ centred.T).eigenvectors[:, -1] @ centred
        else:
            direction = np.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
            component = np.linalg.norm(centred @ direction) * direction
        agrees = component @ flat.mean(0) >= 0
        found[...] = np.maximum(component if agrees else -component, 0.0).reshape(found.shape)
    return result


def grad_cam_plusplus(values: Array, gradients: Array, info: TensorInfo, epsilon: float = 0.0) -> Array:
    """As Grad-CAM, each position's gradient weighted so that small evidence counts as much as large.

    (N, H, W), 0 and above. Chattopadhay et al., "Grad-CAM++", 2018, equations 10 and 19, for Y = exp(S) with S linear
    in the layer's values, so that Y's derivatives are powers of S's gradient times Y. The factor Y is left out: it only
    scales a row's map, and soon overflows. ``epsilon`` is added to the denominator: 1e-6 in pytorch-grad-cam.
    """
    maps, slopes = (move_channels_first(each.astype(np.float64), info) for each in (values, gradients))
    below = 2 * slopes**2 + maps.sum((2, 3), keepdims=True) * slopes**3 + epsilon
    alphas = np.divide(slopes**2, below, out=np.zeros_like(below), where=below != 0)
    return _weigh_channels(maps, (alphas * np.maximum(slopes, 0.0)).sum((2, 3), keepdims=True))


def input_gradient(gradients: Array, info: TensorInfo) -> Array:
    """Gradients at the model's input: (N, C, H, W), signed.

    This is guided backpropagation (Springenberg et al., "Striving for simplicity", 2014, section 3.4) if every ReLU set
    negative gradients to 0.
    """
    return np.ascontiguousarray(move_channels_first(gradients.astype(np.float32), info))


def saliency(gradients: Array, info: TensorInfo) -> Array:
    """The largest absolute gradient over the channels of each pixel of the model's input.

    (N, H, W), 0 and above. Simonyan et al., "Deep inside convolutional networks", 2013, section 3.1.
    """
    result: Array = np.abs(move_channels_first(gradients.astype(np.float32), info)).max(1)
    return result


def rollout(layers: Sequence[Array], discard: float, prefix: int, grid: Grid | None = None) -> Array:
    """Attention rollout: the product of all layers' attention matrices, each with the identity added.

    ``layers`` are (N, T, T) in the order of the forward, one weight for each pair of tokens, 0 and above; the lowest
    share ``discard`` of each row's matrix is set to 0. The result is (N, H, W) over the ``grid`` of patches (None: a
    square): the attention of the first of ``prefix`` tokens, or the mean of all tokens if ``prefix`` is 0. Abnar and
    Zuidema, "Quantifying attention flow in transformers", 2020, section 3.
    """
    if not layers:
        raise ValueError("a rollout is over one layer or more")
    matrices = [_add_identity(_zero_lowest(layer, discard)) for layer in layers]
    return _read_patches([each / each.sum(-1, keepdims=True) for each in matrices], prefix, grid)


def vit_explain_rollout(
    layers: Sequence[Array], discard: float, prefix: int, grid: Grid | None = None, *, keeps_first: bool
) -> Array:
    """Rollout as vit-explain computes it: columns are divided by the sums of rows, the map by its maximum.

    ``keeps_first``: the first token's attention to itself is never discarded.
    """
    matrices = []
    for layer in layers:
        kept = _zero_lowest(layer, discard)
        if keeps_first and kept is not layer:
            kept[:, 0, 0] = layer[:, 0, 0]
        weights = _add_identity(kept)
        matrices.append(weights / weights.sum(-1)[:, None])
    patches = _read_patches(matrices, prefix, grid)
    largest = patches.max((1, 2), keepdims=True)
    result: Array = np.divide(patches, largest, out=np.zeros_like(patches), where=largest != 0)
    return result


def relevance(layers: Sequence[Array], prefix: int, grid: Grid | None = None) -> Array:
    """Relevance over all layers: R starts as the identity, and each layer's A makes it R + A R.

    ``layers`` and the result are as in ``rollout``; nothing is normalised. Chefer et al., "Generic attention-model
    explainability", 2021, equation 6.
    """
    return _read_patches([_add_identity(layer) for layer in layers], prefix, grid)


def average_heads(weights: Array) -> Array:
    """(N, heads, T, T) to (N, T, T): the mean over heads."""
    mean: Array = weights.mean(1, dtype=np.float32)
    return mean


def weight_by_gradient(weights: Array, gradients: Array) -> Array:
    """(N, heads, T, T) to (N, T, T): the mean over heads of weight times gradient, negative products set to 0.

    Chefer et al., "Generic attention-model explainability", 2021, equation 5.
    """
    mean: Array = np.maximum(weights.astype(np.float32) * gradients.astype(np.float32), 0.0).mean(1)
    return mean


def differentiate_scores(weights: Array, gradients: Array) -> Array:
    """Gradients with respect to softmax's input, from those with respect to its output, (N, heads, T, T)."""
    weights, gradients = weights.astype(np.float32), gradients.astype(np.float32)
    result: Array = weights * (gradients - (weights * gradients).sum(-1, keepdims=True))
    return result


def _weigh_channels(maps: Array, weights: Array) -> Array:
    """ReLU of the weighted sum over channels, (N, H, W)."""
    result: Array = np.maximum((weights * maps).sum(1), 0.0).astype(np.float32)
    return result


def _add_identity(weights: Array) -> Array:
    result: Array = weights + np.eye(weights.shape[-1], dtype=np.float32)
    return result


def _read_patches(matrices: Sequence[Array], prefix: int, grid: Grid | None) -> Array:
    """The first token's row of the matrices' product, the last layer's first, as a grid of patches.

    Without a prefix the mean of all rows. Only that row is multiplied.
    """
    *before, last = matrices
    row: Array = last[:, :1] if prefix else last.mean(1, keepdims=True)
    for matrix in reversed(before):
        row = row @ matrix
    attention = row[:, 0]
    patches = attention[:, prefix:]
    return patches.reshape(len(patches), *_find_grid(patches.shape[1], grid))


def _find_grid(patches: int, known: Grid | None) -> Grid:
    """The rows and columns of patches; SelectorError if the grid is unknown and they form no square."""
    grid = find_grid(patches, known)
    if grid is None:
        raise SelectorError(
            f"nothing tells how the {patches} patches of an input of this shape stand, and they make no square",
            hint="send a square input",
        )
    return grid


def _zero_lowest(layer: Array, share: float) -> Array:
    flat = layer.reshape(len(layer), -1)
    count = int(flat.shape[1] * share)
    if not count:
        return layer
    remaining = flat.copy()
    np.put_along_axis(remaining, np.argpartition(flat, count - 1, axis=1)[:, :count], 0.0, axis=1)
    return remaining.reshape(layer.shape)


def find_zero_rows(maps: Array) -> list[int]:
    """The rows whose map is 0 everywhere."""
    rows: list[int] = np.flatnonzero(~maps.any(tuple(range(1, maps.ndim)))).tolist()
    return rows


def move_channels_first(values: Array, info: TensorInfo) -> Array:
    """(N, C, H, W); prefix tokens are dropped, the others are put in their grid."""
    if info.layout == "NTC":
        patches = values[:, info.prefix :]
        values = patches.reshape(len(patches), *_find_grid(patches.shape[1], info.grid_size), patches.shape[2])
    return values if info.layout == "NCHW" else np.moveaxis(values, -1, 1)
