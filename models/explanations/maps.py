"""Maps that explain an answer, made of what was captured; nothing is hooked for them beside that.

Each function takes float arrays with rows first and gives a new float32 array. SelectorError if nothing tells how
patches stand, and they make no square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import SelectorError
from layertap.models.inputs.geometry import Grid, find_grid

Array = NDArray[Any]


def grad_cam(values: Array, gradients: Array, info: TensorInfo) -> Array:
    """Where a layer speaks for the objective: its channels weighted by their mean gradients, what is below 0 cut off.

    ``values`` and ``gradients`` are of that layer; the result is (N, H, W) in the layer's own pixels, or patches of a
    token grid, 0 and above. Selvaraju et al., "Grad-CAM", 2017, equations 1 and 2.
    """
    maps, slopes = (_move_channels_first(each.astype(np.float32), info) for each in (values, gradients))
    return _weigh_channels(maps, slopes.mean((2, 3), keepdims=True))


def hires_cam(values: Array, gradients: Array, info: TensorInfo) -> Array:
    """As Grad-CAM, each value weighted by its own gradient.

    (N, H, W), 0 and above. Draelos and Carin, "Use HiResCAM instead of Grad-CAM", 2020, equation 3.
    """
    maps, slopes = (_move_channels_first(each.astype(np.float32), info) for each in (values, gradients))
    return _weigh_channels(maps, slopes)


def layer_cam(values: Array, gradients: Array, info: TensorInfo) -> Array:
    """As Grad-CAM, each value weighted by its own gradient where that is above 0: fine maps of early layers.

    (N, H, W), 0 and above. Jiang et al., "LayerCAM", 2021, equations 5 to 7.
    """
    maps, slopes = (_move_channels_first(each.astype(np.float32), info) for each in (values, gradients))
    return _weigh_channels(maps, np.maximum(slopes, 0.0))


def xgrad_cam(values: Array, gradients: Array, info: TensorInfo) -> Array:
    """As Grad-CAM, a channel's weight being its gradients' mean weighted by its values; 0 if these add up to 0.

    (N, H, W), 0 and above. Fu et al., "Axiom-based Grad-CAM", 2020, equation 8.
    """
    maps, slopes = (_move_channels_first(each.astype(np.float64), info) for each in (values, gradients))
    totals, moments = maps.sum((2, 3), keepdims=True), (maps * slopes).sum((2, 3), keepdims=True)
    return _weigh_channels(maps, np.divide(moments, totals, out=np.zeros_like(moments), where=totals != 0))


def weigh_by_drops(values: Array, drops: Array, info: TensorInfo) -> Array:
    """As Grad-CAM of one row, (1, H, W), a channel's weight being how far the score drops without it, (channels,)."""
    return _weigh_channels(_move_channels_first(values.astype(np.float32), info), drops[None, :, None, None])


def eigen_cam(values: Array, info: TensorInfo) -> Array:
    """Where a layer's values vary together most: their projection on the first principal component over positions.

    (N, H, W), 0 and above, NaN for a row with a value that is not finite; its sign is the one that agrees with the
    channels' mean. Muhammad and Yeasin, "Eigen-CAM", 2020, of values less their mean, as pytorch-grad-cam has it.
    """
    maps = _move_channels_first(values, info)
    result = np.full((len(maps), *maps.shape[2:]), np.nan, np.float32)
    for row, found in zip(maps, result, strict=True):
        flat = row.reshape(len(row), -1).astype(np.float64)
        if not np.isfinite(flat).all():
            continue
        centred = flat - flat.mean(1, keepdims=True)
        if len(centred) <= centred.shape[1]:  # the smaller of the two products has the component as well
            component = np.linalg.eigh(centred @ centred.T).eigenvectors[:, -1] @ centred
        else:
            direction = np.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
            component = np.linalg.norm(centred @ direction) * direction
        agrees = component @ flat.mean(0) >= 0
        found[...] = np.maximum(component if agrees else -component, 0.0).reshape(found.shape)
    return result


def grad_cam_plusplus(values: Array, gradients: Array, info: TensorInfo, epsilon: float = 0.0) -> Array:
    """As Grad-CAM, each position's gradient weighted so that small evidence counts as much as large.

    (N, H, W), 0 and above. Chattopadhay et al., "Grad-CAM++", 2018, equations 10 and 19: of Y = exp(S) with S linear in
    the layer's values, so that Y's derivatives are powers of S's gradient times Y. That factor of each row is left out,
    as it only scales its map and soon overflows. pytorch-grad-cam adds 1e-6, ``epsilon``, to what it divides by.
    """
    maps, slopes = (_move_channels_first(each.astype(np.float64), info) for each in (values, gradients))
    below = 2 * slopes**2 + maps.sum((2, 3), keepdims=True) * slopes**3 + epsilon
    alphas = np.divide(slopes**2, below, out=np.zeros_like(below), where=below != 0)
    return _weigh_channels(maps, (alphas * np.maximum(slopes, 0.0)).sum((2, 3), keepdims=True))


def input_gradient(gradients: Array, info: TensorInfo) -> Array:
    """Gradients at the model's input as they are: (N, C, H, W), signed.

    Guided backpropagation's (Springenberg et al., "Striving for simplicity", 2014, section 3.4) where each ReLU has cut
    off what is below 0 of the gradient that it was given.
    """
    return np.ascontiguousarray(_move_channels_first(gradients.astype(np.float32), info))


def saliency(gradients: Array, info: TensorInfo) -> Array:
    """How much each pixel of the model's input moves the objective: the largest absolute gradient of its channels.

    (N, H, W), 0 and above. Simonyan et al., "Deep inside convolutional networks", 2013, section 3.1.
    """
    result: Array = np.abs(_move_channels_first(gradients.astype(np.float32), info)).max(1)
    return result


def rollout(layers: Sequence[Array], discard: float, prefix: int, grid: Grid | None = None) -> Array:
    """How much each patch reaches the answer through all layers: their attention, with the shortcut, multiplied up.

    ``layers`` are (N, T, T) in the order of the forward, one weight for each pair of tokens, 0 and above; of each row's
    matrix the lowest share ``discard`` is taken for 0. The result is (N, H, W) over the ``grid`` of patches (None: a
    square): what the first of ``prefix`` tokens looks at, or all tokens on average where there is none. Abnar and
    Zuidema, "Quantifying attention flow in transformers", 2020, section 3.
    """
    product: Array | None = None
    for layer in layers:
        mixed = _zero_lowest(layer, discard) + np.eye(layer.shape[-1], dtype=np.float32)
        mixed = mixed / mixed.sum(-1, keepdims=True)
        product = mixed if product is None else mixed @ product
    if product is None:
        raise ValueError("a rollout is over one layer or more")
    return _read_patches(product, prefix, grid)


def vit_explain_rollout(
    layers: Sequence[Array], discard: float, prefix: int, grid: Grid | None = None, *, keeps_first: bool
) -> Array:
    """As a rollout by the code of vit-explain: columns are divided by the sums of rows, the map by its maximum.

    ``keeps_first``: what the first token looks at in itself is not discarded.
    """
    product: Array = np.eye(layers[0].shape[-1], dtype=np.float32)
    for layer in layers:
        kept = _zero_lowest(layer, discard)
        if keeps_first and kept is not layer:
            kept[:, 0, 0] = layer[:, 0, 0]
        mixed = kept + np.eye(layer.shape[-1], dtype=np.float32)
        product = (mixed / mixed.sum(-1)[:, None]) @ product
    patches = _read_patches(product, prefix, grid)
    largest = patches.max((1, 2), keepdims=True)
    result: Array = np.divide(patches, largest, out=np.zeros_like(patches), where=largest != 0)
    return result


def relevance(layers: Sequence[Array], prefix: int, grid: Grid | None = None) -> Array:
    """How much each patch bears on the answer through all layers: R, at first one, becomes R + A R with each.

    ``layers`` are as a rollout takes them, and so is what is read off R; nothing is normalised. Chefer et al., "Generic
    attention-model explainability", 2021, equation 6.
    """
    total: Array = np.broadcast_to(np.eye(layers[0].shape[-1], dtype=np.float32), layers[0].shape)
    for layer in layers:
        total = total + layer @ total
    return _read_patches(total, prefix, grid)


def average_heads(weights: Array) -> Array:
    """(N, heads, T, T) to (N, T, T): the mean over heads."""
    mean: Array = weights.astype(np.float32).mean(1)
    return mean


def weight_by_gradient(weights: Array, gradients: Array) -> Array:
    """(N, heads, T, T) to (N, T, T): the mean over heads of weight times gradient, where that is above 0.

    Chefer et al., "Generic attention-model explainability", 2021, equation 5.
    """
    mean: Array = np.maximum(weights.astype(np.float32) * gradients.astype(np.float32), 0.0).mean(1)
    return mean


def differentiate_scores(weights: Array, gradients: Array) -> Array:
    """Gradients with respect to what softmax was taken of, from those with respect to weights, (N, heads, T, T)."""
    weights, gradients = weights.astype(np.float32), gradients.astype(np.float32)
    result: Array = weights * (gradients - (weights * gradients).sum(-1, keepdims=True))
    return result


def _weigh_channels(maps: Array, weights: Array) -> Array:
    """The weighted sum over channels, (N, H, W); what is below 0 is cut off."""
    result: Array = np.maximum((weights * maps).sum(1), 0.0).astype(np.float32)
    return result


def _read_patches(mixed: Array, prefix: int, grid: Grid | None) -> Array:
    """The row of the first token, or the mean of all where there is no prefix, as a grid."""
    attention = mixed[:, 0] if prefix else mixed.mean(1)
    patches = attention[:, prefix:]
    return patches.reshape(len(patches), *_find_grid(patches.shape[1], grid))


def _find_grid(patches: int, known: Grid | None) -> Grid:
    """The rows and columns of patches; SelectorError if nothing tells, and they make no square."""
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


def _move_channels_first(values: Array, info: TensorInfo) -> Array:
    """(N, C, H, W); prefix tokens are left out, the others stand in their grid."""
    if info.layout == "NTC":
        patches = values[:, info.prefix :]
        values = patches.reshape(len(patches), *_find_grid(patches.shape[1], info.grid_size), patches.shape[2])
    return values if info.layout == "NCHW" else np.moveaxis(values, -1, 1)
