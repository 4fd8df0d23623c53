"""The geometry of resizing and cropping a picture, and the grid of its patches; without torch."""

from __future__ import annotations

from math import isqrt, prod

from layertap.models.spec import Box, PreprocessSpec

Grid = tuple[int, int]  # rows, columns
Window = tuple[int, int, int, int]  # left, top, width, height


def compute_resized_size(spec: PreprocessSpec, width: int, height: int) -> tuple[int, int]:
    """Width and height of a ``width`` x ``height`` image after the resize step.

    Check it before resizing: enlarging the short side of a thin image makes the long side huge.
    """
    if spec.resize is None:
        return width, height
    if spec.letterbox is not None:
        return _compute_contained_size(spec.resize, width, height)
    if isinstance(spec.resize, tuple):
        return spec.resize[1], spec.resize[0]
    short, long = sorted((width, height))
    longer = int(spec.resize * long / short)
    return (spec.resize, longer) if width <= height else (longer, spec.resize)


def _compute_contained_size(size: int | tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """Width and height of the largest picture of the same ratio in a box, rounded as in ``PIL.ImageOps.contain``."""
    high, wide = list_sides(size)
    if width * high > wide * height:
        return wide, max(round(height / width * wide), 1)
    return max(round(width / height * high), 1), high


def find_window(spec: PreprocessSpec, wide: int, high: int) -> Window:
    """The window of a resized picture that a row has; left and top are negative if it begins outside the picture."""
    size = spec.crop if spec.letterbox is None else spec.resize
    if size is None:
        return 0, 0, wide, high
    height, width = list_sides(size)
    return _find_start(spec, wide, width), _find_start(spec, high, height), width, height


def _find_start(spec: PreprocessSpec, length: int, size: int) -> int:
    """The start of a centred window, rounded as in torchvision (two ways), transformers or ``ImageOps.pad``."""
    if spec.letterbox is not None:
        return -round((size - length) / 2)
    if spec.crop_rounding == "floor":
        return (length - size) // 2
    return -((size - length) // 2) if size > length else round((length - size) / 2)


def list_sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else size


def find_seen_box(spec: PreprocessSpec, width: int, height: int) -> Box:
    """The part of a ``width`` x ``height`` picture that a model sees, in pixels of that picture.

    If the crop is larger than the resized picture, the box extends beyond the picture.
    """
    wide, high = compute_resized_size(spec, width, height)
    left, top, across, down = find_window(spec, wide, high)
    scale_x, scale_y = width / wide, height / high
    return left * scale_x, top * scale_y, (left + across) * scale_x, (top + down) * scale_y


def find_grid(tokens: int, known: Grid | None = None) -> Grid | None:
    """The grid of ``tokens`` patches: the known one if it fits, else a square; None if they form no square."""
    if known is not None and prod(known) == tokens:
        return known
    side = isqrt(max(tokens, 0))
    return (side, side) if side and side**2 == tokens else None
