"""Pixels of every kind become 8-bit RGB."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile

from layertap.models.spec import Color

_CHUNK = 1 << 20
_ALPHA = {"RGBA": "RGBA", "LA": "LA", "PA": "RGBA"}  # modes, and what has their alpha
_KEYED = frozenset({"1", "L", "P", "RGB"})  # modes that may have a transparent colour


def load_rgb(image: ImageFile, background: Color | None = None) -> Image.Image:
    """Decode a picture whose header was read; alpha is dropped, or shows a ``background``.

    Whatever broken data leads a decoder to raise comes through.
    """
    image.load()
    if background is not None and (image.mode in _ALPHA or (image.mode in _KEYED and "transparency" in image.info)):
        canvas = Image.new("RGBA", image.size, (*background, 255))
        opaque = Image.alpha_composite(canvas, image.convert(_ALPHA.get(image.mode, "RGBA")).convert("RGBA"))
        return opaque.convert("RGB")
    # A transparent colour is of no use for RGB, and Pillow warns where it can't carry it over.
    image.info.pop("transparency", None)
    if image.mode.startswith("I;16"):
        return _convert_gray16(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _convert_gray16(image: Image.Image) -> Image.Image:
    """Scaled so that 65535 is 255; ``convert`` would clip at 255 instead."""
    table = ((np.arange(65536, dtype=np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    values: NDArray[Any] = np.asarray(image)
    gray = np.empty(values.shape, np.uint8)
    source, target = values.reshape(-1), gray.reshape(-1)
    for start in range(0, source.size, _CHUNK):  # indices are widened to 64 bits: not for the whole picture at once
        target[start : start + _CHUNK] = table[source[start : start + _CHUNK]]
    return Image.fromarray(gray).convert("RGB")
