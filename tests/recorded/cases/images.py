"""Every codec, mode and orientation of a picture."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

import numpy as np
from PIL import Image

from tests.recorded.request import Json, Request, image, picture, post, send

ORIENTATION = 0x0112
CODECS: dict[str, tuple[str, Json]] = {
    "png": ("PNG", {}),
    "jpeg": ("JPEG", {"quality": 90}),
    "progressive jpeg": ("JPEG", {"progressive": True}),
    "jpeg 4:4:4": ("JPEG", {"subsampling": 0}),
    "webp": ("WEBP", {}),
    "lossless webp": ("WEBP", {"lossless": True}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
}
MODES = {
    "grey": ("PNG", "L"),
    "palette": ("PNG", "P"),
    "alpha": ("PNG", "RGBA"),
    "one bit": ("PNG", "1"),
    "cmyk": ("JPEG", "CMYK"),
    "grey jpeg": ("JPEG", "L"),
    "16 bits": ("PNG", "I;16"),
}
SIZES = {"one pixel": (1, 1), "wide": (400, 20), "large": (1200, 900), "exact": (32, 32)}
QUERY: Json = {"layers": "head"}


def _turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return picture(3, format="JPEG", exif=exif)


def _sixteen_bits() -> bytes:
    stream = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 65536, (32, 40), dtype=np.uint16)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def requests() -> Iterator[Request]:
    """One picture each, to ``digits``."""
    for name, (format_, options) in CODECS.items():
        data = picture(4, format=format_, **options)
        yield send(f"images/{name}", data, f"image/{format_.lower()}", **QUERY)
    for name, (format_, mode) in MODES.items():
        data = _sixteen_bits() if mode == "I;16" else picture(5, format=format_, mode=mode)
        yield send(f"images/{name}", data, f"image/{format_.lower()}", **QUERY)
    for name, size in SIZES.items():
        yield send(f"images/{name}", picture(6, size), "image/png", **QUERY)
    for orientation in range(1, 9):
        yield send(f"images/orientation {orientation}", _turned(orientation), "image/jpeg", **QUERY)
    yield send("images/jpeg that is called png", picture(7, format="JPEG"), "image/png", **QUERY)
    yield post(
        "images/codecs in one request",
        {
            "layers": ["head"],
            "inputs": [image(picture(8, format=f)) for f in ("PNG", "JPEG", "WEBP", "GIF", "BMP")],
        },
    )
