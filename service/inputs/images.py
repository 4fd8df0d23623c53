"""Encoded pictures become upright RGB.

A picture is known by its first bytes and handed straight to that format's plugin, so that no label and no other
decoder (EPS starts Ghostscript) has a say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from layertap.models.errors import InputError, LayertapError, TooLargeError
from layertap.models.spec import Box
from layertap.service.inputs import image_limits

_SMALLER = "send a smaller picture"
_CHUNK = 1 << 20
_JPEG, _END = b"\xff\xd8\xff", b"\xff\xd9"
_threshold = Lock()
Fits = Callable[[int, int], None]


@dataclass(frozen=True)
class Picture:
    """A decoded picture, upright and RGB.

    ``size`` is the width and height that it has in full. Where it was decoded smaller, ``box`` is the part of
    ``image`` that they became: the last column and row of a reduced image may stand for less than a pixel's width.
    """

    image: Image.Image
    size: tuple[int, int]
    box: Box | None = None


def decode_image(data: bytes, max_pixels: int, fits: Fits = lambda width, height: None) -> Image.Image:
    """The first frame or page of an encoded picture as 8-bit RGB, fully loaded and upright by its EXIF orientation.

    Alpha is dropped, 16-bit gray is scaled to 8 bits, an EXIF block that makes no sense is ignored. ``fits`` is told
    the stored width and height before anything is decoded, and raises where the picture is of no use.

    InputError: not one of the formats, damaged, cut short, or of a pixel type with no fixed scale (float, 32-bit).
    TooLargeError: more than ``max_pixels``, by the header and before anything is decoded; or what ``files`` refuses.
    """
    return _upright(_opened(data, max_pixels, fits))


def decode_reduced(
    data: bytes,
    max_pixels: int,
    enough: Callable[[int, int], tuple[int, int] | None],
    fits: Fits = lambda width, height: None,
) -> Picture:
    """The same, but a large JPEG at a half, a quarter or an eighth of its width and height.

    libjpeg leaves out the higher frequencies of each block, which is less work than to decode and average them.
    ``enough`` is told the upright picture's width and height and says the least ones that do, or None for all of it.

    Errors as for ``decode_image``; ``max_pixels`` counts the picture in full.
    """
    image = _opened(data, max_pixels, fits)
    if not isinstance(image, JpegImageFile):
        whole = _upright(image)
        return Picture(whole, whole.size)
    turn = _turn(image)  # asked once: for an EXIF block that is broken Pillow may answer otherwise the second time
    size = _swapped(image.size, turn)
    least = enough(*size)
    margins = _reduce(image, _swapped(least, turn)) if least else None
    try:
        with _refusing():
            reduced = _turned(_rgb(image), turn)
    except InputError:
        if margins is None:
            raise
        # A lossless JPEG has no scales. What is broken is refused here, by what refuses it in full.
        whole = decode_image(data, max_pixels)
        return Picture(whole, whole.size)
    return Picture(reduced, size, _box(reduced, margins, turn) if margins else None)


def plain_jpeg(data: bytes, max_pixels: int, fits: Fits = lambda width, height: None) -> tuple[int, int] | None:
    """Width and height of a JPEG that any decoder should make the same picture of; None for all other bytes.

    It is whole to its end, upright, gray or of luma and two chromas, and says so in no odd way. ``fits`` and
    TooLargeError as for ``decode_image``; what is damaged, the others refuse.
    """
    if not data.startswith(_JPEG) or not data.endswith(_END):
        return None
    try:
        image = _opened(data, max_pixels, fits)
    except InputError:
        return None
    plain = isinstance(image, JpegImageFile) and _turn(image) is None and (image.layers == 1 or _is_ycc(image))
    return image.size if plain else None


def _is_ycc(image: JpegImageFile) -> bool:
    """Whether three components are luma and chroma by every sign there is: decoders weigh contrary ones differently."""
    transform, ids = image.info.get("adobe_transform"), tuple(part[0] for part in image.layer)
    told = "jfif" in image.info or transform == 1
    return image.layers == 3 and transform in (None, 1) and (told or "adobe" not in image.info) and ids == (1, 2, 3)


def _opened(data: bytes, max_pixels: int, fits: Fits) -> ImageFile:
    plugin = _plugin(data)
    _let_through(max_pixels)
    stream = image_limits.Stream(data)
    try:
        if plugin is TiffImageFile:
            image_limits.check_directory(data)
        image = plugin(stream)
    except LayertapError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        detail = f"the picture has more than {Image.MAX_IMAGE_PIXELS} pixels; the limit is {max_pixels}"
        raise TooLargeError(detail, hint=_SMALLER) from error
    except Exception as error:  # a plugin raises whatever a broken header leads it to
        raise image_limits.damaged() from error
    # All of it is here: piece by piece, every piece would give Python's lock away and wait for it again.
    image.decodermaxblock = max(len(data), image.decodermaxblock)
    width, height = image.size
    if width * height > max_pixels:
        detail = f"the picture has {width * height} pixels ({width} by {height}); the limit is {max_pixels}"
        raise TooLargeError(detail, hint=_SMALLER)
    with _refusing():
        image_limits.check(image, data, stream)
    fits(width, height)
    return image


def _plugin(data: bytes) -> type[ImageFile]:
    for start, plugin in _PLUGINS.items():
        if data.startswith(start) and (plugin is not WebPImageFile or data[8:12] == b"WEBP"):
            return plugin
    raise InputError("the bytes are not a picture of a known format", hint=image_limits.HINT)


def _let_through(max_pixels: int) -> None:
    # Pillow warns, and above twice as many pixels raises, by a threshold of its own that TIFF and GIF consult again
    # while they load. Only ever raised, and under a lock: concurrent callers can't lower it for each other.
    with _threshold:
        if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
            Image.MAX_IMAGE_PIXELS = max_pixels


def _reduce(image: JpegImageFile, least: tuple[int, int]) -> Box | None:
    """Have a picture decoded smaller; None where it is too small for that.

    What is given is how far the image's sides then are beyond the picture's: the scales round sizes up.
    """
    full = image.size
    drafted = image.draft(None, least)
    if drafted is None or image.size == full:
        return None
    _, (left, upper, right, lower) = drafted
    return left, upper, image.width - right, image.height - lower


def _swapped(size: tuple[int, int], turn: Image.Transpose | None) -> tuple[int, int]:
    """Width and height before a turn from those after it, or the other way round."""
    width, height = size
    return (height, width) if turn in _SIDEWAYS else (width, height)


def _box(turned: Image.Image, margins: Box, turn: Image.Transpose | None) -> Box:
    """The picture in a turned image, whose sides were so far beyond it before."""
    left, upper, right, lower = (margins[side] for side in _SIDES[turn])
    return left, upper, turned.width - right, turned.height - lower


def _upright(image: ImageFile) -> Image.Image:
    with _refusing():
        # PNG may hold its EXIF after the pixels and TIFF turns itself while loading: the turn is asked for only then.
        return _turned(_rgb(image), _turn(image))


def _rgb(image: ImageFile) -> Image.Image:
    image.load()
    # A transparent colour is of no use for RGB, and Pillow warns where it can't carry it over.
    image.info.pop("transparency", None)
    return _RGB.get(image.mode, _from_any)(image)


def _turned(image: Image.Image, turn: Image.Transpose | None) -> Image.Image:
    return image if turn is None else image.transpose(turn)


@contextmanager
def _refusing() -> Iterator[None]:
    """Decode inside: whatever broken data leads a decoder to raise becomes an InputError."""
    try:
        yield
    except LayertapError:
        raise
    except Exception as error:  # a decoder raises whatever broken data leads it to
        raise image_limits.damaged() from error


def _turn(image: ImageFile) -> Image.Transpose | None:
    try:
        value: object = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # whatever is wrong with the EXIF block, the picture itself is fine
        return None
    return _TURNS.get(value) if isinstance(value, int) else None


def _from_any(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_premultiplied_gray(image: Image.Image) -> Image.Image:
    return image.convert("LA").convert("RGB")


def _from_lab(image: Image.Image) -> Image.Image:
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    rgb = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    if rgb is None:
        raise image_limits.damaged()
    return rgb


def _from_gray16(image: Image.Image) -> Image.Image:
    """Scaled so that full scale is 255; ``convert`` would clip at 255 instead."""
    full, inverted = _scale(image)
    table = np.clip((np.arange(65536, dtype=np.uint32) * 255 + full // 2) // full, 0, 255).astype(np.uint8)
    values: NDArray[Any] = np.asarray(image)
    gray = np.empty(values.shape, np.uint8)
    source, target = values.reshape(-1), gray.reshape(-1)
    for start in range(0, source.size, _CHUNK):  # indices are widened to 64 bits: not for the whole picture at once
        target[start : start + _CHUNK] = table[source[start : start + _CHUNK]]
    return Image.fromarray(255 - gray if inverted else gray).convert("RGB")


def _scale(image: Image.Image) -> tuple[int, bool]:
    """The value that means full scale, and whether zero means white."""
    if not isinstance(image, TiffImageFile):
        return 65535, False
    bits = image.tag_v2.get(ExifTags.Base.BitsPerSample, (16,))
    return (1 << int(bits[0])) - 1, image.tag_v2.get(ExifTags.Base.PhotometricInterpretation) == 0


def _from_int32(image: Image.Image) -> Image.Image:
    # Older Pillow reads a 16-bit PNG into this mode; in a TIFF it means signed or 32-bit values, which have no scale.
    if not isinstance(image, PngImageFile):
        return _refuse(image)
    return _from_gray16(Image.fromarray(np.asarray(image).astype(np.uint16)))


def _refuse(image: Image.Image) -> Image.Image:
    hint = "convert it to 8 or 16 unsigned bits per channel, or send it as a tensor"
    raise InputError("pictures of float, signed or 32-bit pixels are not taken", hint=hint)


_PLUGINS: dict[bytes, type[ImageFile]] = {
    _JPEG: JpegImageFile,
    b"\x89PNG\r\n\x1a\n": PngImageFile,
    b"RIFF": WebPImageFile,
    b"GIF87a": GifImageFile,
    b"GIF89a": GifImageFile,
    b"BM": BmpImageFile,
    b"II*\x00": TiffImageFile,
    b"MM\x00*": TiffImageFile,
    b"II+\x00": TiffImageFile,
    b"MM\x00+": TiffImageFile,
}

_RGB: dict[str, Callable[[Image.Image], Image.Image]] = {
    "I;16": _from_gray16,
    "I;16B": _from_gray16,
    "I;16L": _from_gray16,
    "I;16N": _from_gray16,
    "I": _from_int32,
    "F": _refuse,
    "La": _from_premultiplied_gray,
    "LAB": _from_lab,
}

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
