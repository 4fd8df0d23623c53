"""Pixels of every kind become 8-bit RGB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from layertap.models.errors import InputError
from layertap.models.spec import Color
from layertap.service.inputs.image_limits import damaged_error

_CHUNK = 1 << 20


def load_rgb(image: ImageFile, background: Color | None = None) -> Image.Image:
    """Decode a picture whose header was read; alpha is dropped, or shows a ``background``.

    InputError: pixels of a type with no fixed scale. Whatever broken data leads a decoder to raise comes through.
    """
    image.load()
    if background is not None and (image.mode in _ALPHA or (image.mode in _KEYED and "transparency" in image.info)):
        canvas = Image.new("RGBA", image.size, (*background, 255))
        opaque = Image.alpha_composite(canvas, image.convert(_ALPHA.get(image.mode, "RGBA")).convert("RGBA"))
        return opaque.convert("RGB")
    # A transparent colour is of no use for RGB, and Pillow warns where it can't carry it over.
    image.info.pop("transparency", None)
    return _CONVERTERS.get(image.mode, _convert_any)(image)


def _convert_any(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _convert_premultiplied_gray(image: Image.Image) -> Image.Image:
    return image.convert("LA").convert("RGB")


def _convert_lab(image: Image.Image) -> Image.Image:
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    rgb = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    if rgb is None:
        raise damaged_error()
    return rgb


def _convert_gray16(image: Image.Image) -> Image.Image:
    """Scaled so that full scale is 255; ``convert`` would clip at 255 instead."""
    full, inverted = _read_scale(image)
    table = np.clip((np.arange(65536, dtype=np.uint32) * 255 + full // 2) // full, 0, 255).astype(np.uint8)
    values: NDArray[Any] = np.asarray(image)
    gray = np.empty(values.shape, np.uint8)
    source, target = values.reshape(-1), gray.reshape(-1)
    for start in range(0, source.size, _CHUNK):  # indices are widened to 64 bits: not for the whole picture at once
        target[start : start + _CHUNK] = table[source[start : start + _CHUNK]]
    return Image.fromarray(255 - gray if inverted else gray).convert("RGB")


def _read_scale(image: Image.Image) -> tuple[int, bool]:
    """The value that means full scale, and whether zero means white."""
    if not isinstance(image, TiffImageFile):
        return 65535, False
    bits = image.tag_v2.get(ExifTags.Base.BitsPerSample, (16,))
    return (1 << int(bits[0])) - 1, image.tag_v2.get(ExifTags.Base.PhotometricInterpretation) == 0


def _convert_int32(image: Image.Image) -> Image.Image:
    # Older Pillow reads a 16-bit PNG into this mode; in a TIFF it means signed or 32-bit values, which have no scale.
    if not isinstance(image, PngImageFile):
        return _refuse(image)
    return _convert_gray16(Image.fromarray(np.asarray(image).astype(np.uint16)))


def _refuse(image: Image.Image) -> Image.Image:
    hint = "convert it to 8 or 16 unsigned bits per channel, or send it as a tensor"
    raise InputError("pictures of float, signed or 32-bit pixels are not taken", hint=hint)


_ALPHA = {"RGBA": "RGBA", "RGBa": "RGBA", "LA": "LA", "La": "LA", "PA": "RGBA"}  # modes, and what undoes them
_KEYED = frozenset({"1", "L", "P", "RGB"})  # modes that may have a transparent colour
_CONVERTERS: dict[str, Callable[[Image.Image], Image.Image]] = {  # by Pillow's mode
    "I;16": _convert_gray16,
    "I;16B": _convert_gray16,
    "I;16L": _convert_gray16,
    "I;16N": _convert_gray16,
    "I": _convert_int32,
    "F": _refuse,
    "La": _convert_premultiplied_gray,
    "LAB": _convert_lab,
}
