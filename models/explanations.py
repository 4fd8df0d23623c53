"""Maps that explain an answer, made of what was captured; nothing is hooked for them beside that.

Each function takes float arrays with rows first and gives a new float32 array.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalog import Catalog, Leaf
from models.errors import SelectorError
from models.points import HookPoint

Array = NDArray[Any]
SPATIAL = ("NCHW", "NHWC", "NTC")


def grad_cam(values: Array, gradients: Array, leaf: Leaf) -> Array:
    """Where a layer speaks for the objective: its channels weighted by their mean gradients, what is below 0 cut off.

    ``values`` and ``gradients`` are of that layer; the result is (N, H, W) in the layer's own pixels, or patches of a
    token grid, 0 and above. Selvaraju et al., "Grad-CAM", 2017, equations 1 and 2.
    """
    maps, slopes = (_channels_first(each.astype(np.float32), leaf) for each in (values, gradients))
    weights = slopes.mean((2, 3), keepdims=True)
    found: Array = np.maximum((weights * maps).sum(1), 0.0)
    return found


def saliency(gradients: Array, leaf: Leaf) -> Array:
    """How much each pixel of the model's input moves the objective: the largest absolute gradient of its channels.

    (N, H, W), 0 and above. Simonyan et al., "Deep inside convolutional networks", 2013, section 3.1.
    """
    found: Array = np.abs(_channels_first(gradients.astype(np.float32), leaf)).max(1)
    return found


def is_map(leaf: Leaf) -> bool:
    """Whether a tensor has a grid of positions, each with channels, for every row."""
    if leaf.layout not in SPATIAL or leaf.row_axis != 0 or leaf.mixed or leaf.per_row != 1:
        return False
    if leaf.layout == "NTC":
        tokens = leaf.shape[1] - leaf.prefix
        return tokens > 1 and isqrt(tokens) ** 2 == tokens
    return min(leaf.shape[leaf.layout.index(letter)] for letter in "HW") > 1


def last_map(catalog: Catalog) -> tuple[HookPoint, Leaf]:
    """The last layer of a forward that returns a map, where Grad-CAM looks unless it is told; SelectorError."""
    found = [
        (call.output.order, HookPoint(layer.name, number, leaf.path, "output"), leaf)
        for layer in catalog.layers.values()
        for number, call in enumerate(layer.calls)
        for leaf in call.output.leaves
        if is_map(leaf)
    ]
    if not found:
        raise SelectorError("no layer of this model returns a map", hint="use method 'saliency'")
    # Of a layer and what it is the last part of, the outer one: it returns last.
    _, point, leaf = max(found, key=lambda each: each[0])
    return point, leaf


def _channels_first(values: Array, leaf: Leaf) -> Array:
    """(N, C, H, W); prefix tokens are left out, the others stand in a square."""
    if leaf.layout == "NTC":
        grid = values[:, leaf.prefix :]
        side = isqrt(grid.shape[1])
        values = grid.reshape(len(grid), side, side, grid.shape[2])
    return values if leaf.layout == "NCHW" else np.moveaxis(values, -1, 1)
