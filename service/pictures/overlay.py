"""Maps over the pictures that they explain: what the model saw of an upright original, and what of it mattered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from layertap.models.spec import Box
from layertap.service.pictures.colormaps import Scale

Array = NDArray[Any]

STRONGEST = 0.85  # how much the strongest place covers the picture
UNSEEN = 0.35  # how bright is what the model does not see


@dataclass(frozen=True)
class Original:
    """A picture that was sent, upright and RGB, and the part of it that the model sees, in its pixels."""

    image: Image.Image
    seen: Box


def fit_original(original: Original, side: int) -> Original:
    """The same in a square of so many pixels a side: smaller so that it fits, or a whole number of times larger."""
    width, height = original.image.size
    scale = side / max(width, height)
    scale = float(int(scale)) if scale > 1 else scale
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX
    left, upper, right, lower = original.seen
    box = (left * size[0] / width, upper * size[1] / height, right * size[0] / width, lower * size[1] / height)
    return Original(original.image.resize(size, resampling), box)


def lay_over(original: Original, values: Array, scale: Scale) -> Image.Image:
    """A map, (H, W), in the colours of a scale over what the model sees of a picture; the rest of it is dark.

    Where the map is low (of a diverging scale: near zero) the picture shows, in grey.
    """
    base = Image.fromarray(np.rint(np.asarray(original.image) * UNSEEN).astype(np.uint8))
    left, upper, right, lower = (round(side) for side in original.seen)
    inside = (max(left, 0), max(upper, 0), min(right, base.width), min(lower, base.height))
    if inside[2] <= inside[0] or inside[3] <= inside[1]:
        return base
    across, down = values.shape[1] / max(right - left, 1), values.shape[0] / max(lower - upper, 1)
    box = (
        (inside[0] - left) * across,
        (inside[1] - upper) * down,
        (inside[2] - left) * across,
        (inside[3] - upper) * down,
    )
    part = stretch(values, (inside[2] - inside[0], inside[3] - inside[1]), box)  # however far the crop goes beyond
    grey = np.asarray(original.image.crop(inside).convert("L"), np.float64)[..., None]
    places = scale.to_places(part)
    strength = np.abs(places * 2 - 1) if scale.diverging else places
    cover = STRONGEST * strength[..., None]
    mixed = grey * (1 - cover) + scale.to_colors(part) * cover
    base.paste(Image.fromarray(np.rint(mixed).astype(np.uint8)), inside[:2])
    return base


def stretch(values: Array, size: tuple[int, int], box: Box | None = None) -> Array:
    """A map, or a ``box`` of it, in so many columns and rows, smooth and never beyond its numbers; NaN is 0."""
    finite = np.where(np.isfinite(values), values, 0.0).astype(np.float32)
    image = Image.fromarray(finite).resize(size, Image.Resampling.BICUBIC, box)
    smooth: Array = np.asarray(image).clip(finite.min(), finite.max())
    return smooth
