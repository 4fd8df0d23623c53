"""Where the pixels of a picture go when it is resized and cropped; needs no torch."""

from __future__ import annotations

from layertap.models.spec import Box, PreprocessSpec


def compute_resized_size(spec: PreprocessSpec, width: int, height: int) -> tuple[int, int]:
    """Width and height of a ``width`` x ``height`` image after the resize step.

    A thin image whose short side is made longer grows without bound, so this is worth asking first.
    """
    if spec.resize is None:
        return width, height
    if isinstance(spec.resize, tuple):
        return spec.resize[1], spec.resize[0]
    short, long = sorted((width, height))
    longer = int(spec.resize * long / short)
    return (spec.resize, longer) if width <= height else (longer, spec.resize)


def find_crop_start(length: int, size: int) -> int:
    """Where a crop in the middle begins, by torchvision's two roundings; below 0 where it is longer than the image."""
    return -((size - length) // 2) if size > length else round((length - size) / 2)


def list_sides(size: int | tuple[int, int]) -> list[int]:
    """Height and width, or the one side of a square."""
    return [size] if isinstance(size, int) else list(size)


def find_seen_box(spec: PreprocessSpec, width: int, height: int) -> Box:
    """The part of a ``width`` x ``height`` picture that a model sees, in pixels of that picture.

    Where the crop is larger than the resized picture it goes beyond the picture's sides.
    """
    wide, high = compute_resized_size(spec, width, height)
    if spec.crop is None:
        return 0.0, 0.0, float(width), float(height)
    crop_height, *rest = list_sides(spec.crop)
    crop_width = rest[0] if rest else crop_height
    left, top = find_crop_start(wide, crop_width), find_crop_start(high, crop_height)
    across, down = width / wide, height / high
    return left * across, top * down, (left + crop_width) * across, (top + crop_height) * down
