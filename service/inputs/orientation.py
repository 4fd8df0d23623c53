"""Which way up a picture is stored, by EXIF, and what turns it upright."""

from __future__ import annotations

from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile

from layertap.models.spec import Box

_TURNS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset(_TURNS[orientation] for orientation in (5, 6, 7, 8))
_SIDES: dict[Image.Transpose | None, tuple[int, int, int, int]] = {  # which side before is left, upper, right, lower
    None: (0, 1, 2, 3),
    Image.Transpose.FLIP_LEFT_RIGHT: (2, 1, 0, 3),
    Image.Transpose.ROTATE_180: (2, 3, 0, 1),
    Image.Transpose.FLIP_TOP_BOTTOM: (0, 3, 2, 1),
    Image.Transpose.TRANSPOSE: (1, 0, 3, 2),
    Image.Transpose.ROTATE_270: (3, 0, 1, 2),
    Image.Transpose.TRANSVERSE: (3, 2, 1, 0),
    Image.Transpose.ROTATE_90: (1, 2, 3, 0),
}


def read_turn(image: ImageFile) -> Image.Transpose | None:
    """What turns a picture upright; None where it is, or says nothing that makes sense.

    To be called once: for an EXIF block that is broken Pillow may answer otherwise the second time.
    """
    try:
        value: object = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # whatever is wrong with the EXIF block, the picture itself is fine
        return None
    return _TURNS.get(value) if isinstance(value, int) else None


def apply_turn(image: Image.Image, turn: Image.Transpose | None) -> Image.Image:
    """The picture after a turn."""
    return image if turn is None else image.transpose(turn)


def turn_size(size: tuple[int, int], turn: Image.Transpose | None) -> tuple[int, int]:
    """Width and height before a turn from those after it, or the other way round."""
    width, height = size
    return (height, width) if turn in _SIDEWAYS else (width, height)


def turn_margins(margins: Box, turn: Image.Transpose | None) -> Box:
    """The margins of a picture after a turn from those before it: left, upper, right, lower."""
    left, upper, right, lower = (margins[side] for side in _SIDES[turn])
    return left, upper, right, lower
