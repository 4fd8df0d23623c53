"""The pictures of a request, the part that the model sees, and maps drawn over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from layertap.models.spec import Box, PreprocessSpec
from layertap.service.inputs.images import decode_image
from layertap.service.pictures.colormaps import Scale, find_scale

Array = NDArray[Any]

OVERLAY = 288  # pixels a side of a picture with a map over it, and of the picture beside it
COMMON = 0.99  # the share of a map's numbers that its scale covers
STRONGEST = 0.85  # opacity of the strongest place over the picture
UNSEEN = 0.35  # brightness outside the part that the model sees
PALE = 0.45  # contrast of the picture under a diverging scale, which is white in the middle and dark at its ends


@dataclass(frozen=True)
class Original:
    """A picture of the request, upright and RGB, and the part that the model sees, in its pixels."""

    image: Image.Image
    seen: Box

    @property
    def is_seen_whole(self) -> bool:
        """Whether the model sees the whole picture."""
        left, upper, right, lower = map(round, self.seen)
        return left <= 0 and upper <= 0 and right >= self.image.width and lower >= self.image.height


@dataclass(frozen=True)
class SentPicture:
    """An encoded picture of at most ``max_pixels``, and how a model preprocesses it."""

    data: bytes = field(repr=False)
    spec: PreprocessSpec
    max_pixels: int

    def decode(self, side: int, max_pixels: int) -> tuple[Original, int]:
        """The upright picture and the number of its pixels at full size.

        It is scaled down to fit into a square of ``side`` pixels, or up by an integer. InputError; TooLargeError,
        before decoding, if it has more than ``max_pixels``.
        """
        picture = decode_image(self.data, min(max_pixels, self.max_pixels), lambda width, height: (side, side))
        image = picture.image
        if picture.box is not None:
            left, upper, right, lower = picture.box
            image = image.crop((round(left), round(upper), round(right), round(lower)))
        scale = side / max(image.size)
        scale = float(int(scale)) if scale > 1 else scale
        resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX
        image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), resampling)
        seen = self.spec.find_seen_box(*picture.size)
        across, down = image.width / picture.size[0], image.height / picture.size[1]
        box = (seen[0] * across, seen[1] * down, seen[2] * across, seen[3] * down)
        return Original(image, box), prod(picture.size)


def lay_over(original: Original, values: Array, scale: Scale) -> Image.Image:
    """Draw a map, (H, W), over the part of a picture that the model sees; the rest is dark.

    Where the map is low (on a diverging scale: near zero), the picture shows, in grey.
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
    part = stretch(values, (inside[2] - inside[0], inside[3] - inside[1]), box)  # the crop may exceed the picture
    base.paste(_mix(original.image.crop(inside), part, scale), inside[:2])
    return base


def crop_seen(original: Original, size: tuple[int, int]) -> Image.Image:
    """The part of a picture that the model sees, resized to ``size``; black outside the picture."""
    box = tuple(round(side) for side in original.seen)
    seen = original.image.crop((box[0], box[1], max(box[2], box[0] + 1), max(box[3], box[1] + 1)))
    return seen.resize(size, Image.Resampling.BICUBIC)


def lay_grid_over(seen: Image.Image, values: Array, scale: Scale) -> Image.Image:
    """Draw a grid, (H, W), over ``seen``, whose size is an integer multiple of it: each number is a square."""
    zoom = seen.height // values.shape[0]
    return _mix(seen, values.repeat(zoom, 0).repeat(zoom, 1), scale)


def find_map_scale(values: Array, is_share: bool, signed: bool = False) -> Scale:
    """The scale of a map's numbers, not affected by a few outliers.

    It begins at zero, which means no effect; for shares of attention, which are never zero, at the least one.
    """
    finite = values[np.isfinite(values)].astype(np.float64)
    bound = np.quantile(np.abs(finite), COMMON) if finite.size else 0.0
    clipped: Array = finite.clip(-bound, bound) if bound > 0 else finite
    return find_scale(clipped if is_share else np.append(clipped, 0.0), signed)


def _mix(image: Image.Image, values: Array, scale: Scale) -> Image.Image:
    """Blend each pixel with its number's colour: the farther from neutral the number, the more opaque."""
    grey = np.asarray(image.convert("L"), np.float64)[..., None]
    grey = 255 * (1 - PALE) + PALE * grey if scale.diverging else grey
    places = scale.to_places(np.where(np.isfinite(values), values, 0.0))
    strength = np.abs(places * 2 - 1) if scale.diverging else places
    cover = STRONGEST * strength[..., None]
    return Image.fromarray(np.rint(grey * (1 - cover) + scale.to_colors(values) * cover).astype(np.uint8))


def stretch(values: Array, size: tuple[int, int], box: Box | None = None) -> Array:
    """Resize a map, or a ``box`` of it, smoothly and within the range of its numbers; NaN counts as 0."""
    finite = np.where(np.isfinite(values), values, 0.0).astype(np.float32)
    image = Image.fromarray(finite).resize(size, Image.Resampling.BICUBIC, box)
    smooth: Array = np.asarray(image).clip(finite.min(), finite.max())
    return smooth
