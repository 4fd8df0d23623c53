"""Pooling as the documentation defines it, in numpy, and the axes that layers have by their authors' code."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.service.support import Array

Axes = Callable[
    [str, Array], str
]  # of a canonical name and its tensor: letters such as NCHW, none if it can't be pooled


def mean(array: Array, axes: str, rows: int, prefix: int) -> Array:
    """(N, C): over all other axes, without prefix tokens; windows folded into the first axis belong to their row."""
    channel = axes.index("C")
    positions = np.moveaxis(array, channel, -1).reshape(rows, -1, array.shape[channel])
    return positions[:, prefix if axes == "NTC" else 0 :].mean(1, dtype=np.float64)


def flat(array: Array, axes: str, rows: int, prefix: int) -> Array:
    """(N, everything else)."""
    return np.moveaxis(array, axes.index("N"), 0).reshape(rows, math.prod(array.shape) // rows)


def axes_of(architecture: str) -> Axes:
    """How to tell the axes of the tensors of an architecture of torchvision."""
    return FAMILIES.get(architecture.partition("_")[0], _first)


def _first(key: str, array: Array) -> str:
    """Channels first: convolutions, and what comes after them."""
    return {2: "NC", 4: "NCHW", 5: "NCTHW"}[array.ndim]


def _convnext(key: str, array: Array) -> str:
    """A block's layer norm and linear layers stand between two permutations, its parts 1 and 6."""
    name, _, site = key.partition(":")
    _, block, part = name.rpartition(".block.")
    inside = range(2, 7) if site else range(1, 6)
    return "NHWC" if block and int(part) in inside else _first(key, array)


def _swin(key: str, array: Array) -> str:
    """Channels last from the first permutation to the second; a table of positions has no rows."""
    if "cpb_mlp" in key:
        return ""
    before = key in (".:input", "features:input", "features.0:input", "features.0.1:input") or "features.0.0" in key
    after = key.startswith(("permute", "avgpool", "flatten")) and key != "permute:input"
    return _first(key, array) if before or after or array.ndim != 4 else "NHWC"


def _vit(key: str, array: Array) -> str:
    return "NTC" if array.ndim == 3 else _first(key, array)


def _maxvit(key: str, array: Array) -> str:
    """Attention works on windows, (N, windows, tokens, C); around the swaps of a grid that is not known."""
    if ".grid_attention." in key and key.partition("attention.")[2] in MAXVIT_UNKNOWN:
        return ""
    inside = "_attention." in key and not key.endswith((".partition_op:input", ".departition_op"))
    return "NHWC" if inside else _first(key, array)


MAXVIT_UNKNOWN = ("partition_op", "partition_swap:input", "departition_swap", "departition_op:input")
FAMILIES: dict[str, Axes] = {"convnext": _convnext, "swin": _swin, "vit": _vit, "maxvit": _maxvit}
