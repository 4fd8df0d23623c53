"""The position that an objective looks at: a token, or a pixel of a map; needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from layertap.models.catalog.catalog import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

Position = tuple[int, ...]
AXES = {1: "T", 2: "HW"}  # of how many numbers a position is, and the axes that they are along


def find_axes(info: TensorInfo, position: Position) -> tuple[int, ...] | None:
    """The axes of a tensor along which a position is; None where it has none of them."""
    layout, letters = info.layout or "", AXES[len(position)]
    axes = tuple(layout.find(letter) for letter in letters)
    return None if -1 in axes or info.row_axis in axes else axes


def select_position(value: Tensor, info: TensorInfo, position: Position | None) -> Tensor:
    """What of a tensor is at a position, without the axes along which it is; differentiable.

    A lone number of each row, (rows,), is the score of a lone class: (rows, 1).
    """
    axes = find_axes(info, position) if position is not None else None
    for axis, index in sorted(zip(axes or (), position or (), strict=True), reverse=True):
        value = value.select(axis, index)
    return value.unsqueeze(1) if value.ndim == 1 else value


def describe_position(info: TensorInfo, position: Position | None) -> TensorInfo:
    """What ``select_position`` gives of a tensor, as a catalogue says it."""
    axes = find_axes(info, position) if position is not None else None
    if not axes:
        return replace(info, shape=(*info.shape, 1), layout="NC") if len(info.shape) == 1 else info
    kept = [axis for axis in range(len(info.shape)) if axis not in axes]
    described = replace(
        info,
        shape=tuple(info.shape[axis] for axis in kept),
        layout="".join((info.layout or "")[axis] for axis in kept),
        row_axis=kept.index(info.row_axis) if info.row_axis is not None else None,
        token_axes=tuple(kept.index(axis) for axis in info.token_axes if axis in kept),
    )
    return describe_position(described, None)
