"""Pictures as they were sent, to be shown beside what a model makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from layertap.models.inputs.geometry import find_seen_box
from layertap.models.spec import PreprocessSpec
from layertap.service.inputs.images import decode_reduced
from layertap.service.pictures.overlay import Original, fit_original


@dataclass(frozen=True)
class SentPicture:
    """An encoded picture of at most ``max_pixels``, and how a model preprocesses it."""

    data: bytes = field(repr=False)
    spec: PreprocessSpec
    max_pixels: int

    def decode(self, side: int, max_pixels: int) -> tuple[Original, int]:
        """The picture, upright, in a square of so many pixels a side, and how many it has in full.

        InputError; TooLargeError, before it is decoded, where these are more than ``max_pixels``.
        """
        picture = decode_reduced(self.data, min(max_pixels, self.max_pixels), lambda width, height: (side, side))
        image = picture.image
        if picture.box is not None:
            left, upper, right, lower = picture.box
            image = image.crop((round(left), round(upper), round(right), round(lower)))
        seen = find_seen_box(self.spec, *picture.size)
        across, down = image.width / picture.size[0], image.height / picture.size[1]
        box = (seen[0] * across, seen[1] * down, seen[2] * across, seen[3] * down)
        return fit_original(Original(image, box), side), prod(picture.size)
