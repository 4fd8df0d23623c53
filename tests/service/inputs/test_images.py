"""Encoded pictures become upright RGB with the right values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.service.inputs.picture_files import NOISE, RAMP, SMOOTH, decode_pixels, encode
from tests.service.support import UPRIGHT

RAMP8 = np.floor(RAMP / 257 + 0.5).astype(np.uint8)

LOSSLESS: dict[str, Callable[[Image.Image], bytes]] = {
    "png": lambda image: encode(image, "PNG"),
    "webp": lambda image: encode(image, "WEBP", lossless=True),
    "bmp": lambda image: encode(image, "BMP"),
}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless(kind: str) -> None:
    """A lossless RGB file decodes to exactly the pixels it was made from."""
    assert np.array_equal(decode_pixels(LOSSLESS[kind](Image.fromarray(NOISE))), NOISE)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 100, "subsampling": 0}])
def test_jpeg(options: dict[str, Any]) -> None:
    """A JPEG decodes to what Pillow gives for it."""
    data = encode(Image.fromarray(SMOOTH), "JPEG", **options)
    assert np.array_equal(decode_pixels(data), np.asarray(Image.open(BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_boxes(kind: str, mode: str) -> None:
    """A smooth picture in either format of boxes comes out nearly as it went in."""
    data = encode(Image.fromarray(SMOOTH).convert(mode), kind, quality=98)
    wanted = np.asarray(Image.fromarray(SMOOTH).convert(mode).convert("RGB"), int)
    assert np.abs(decode_pixels(data) - wanted).max() <= 8


def test_heif_is_not_registered() -> None:
    """Whoever else opens pictures in this process finds Pillow as it was."""
    decode_pixels(encode(Image.fromarray(SMOOTH), "HEIF"))
    assert "HEIF" not in Image.OPEN


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("kind", ["JPEG", "AVIF"])
def test_orientation(kind: str, orientation: int) -> None:
    """A picture with an EXIF orientation comes out as its stored pixels turned by hand."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    plain = encode(Image.fromarray(SMOOTH), kind, **options)
    turned = encode(Image.fromarray(SMOOTH), kind, exif=exif, **options)
    assert np.array_equal(decode_pixels(turned), UPRIGHT[orientation](decode_pixels(plain)))


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\x00\x00",
        b"Exif\x00\x00garbage",
        b"Exif\x00\x00II*\x00\xff\xff\xff\xff",
        b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff",
        b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x02\x00\x00\x00\x0999999999",
    ],
)
def test_exif_garbage(exif: bytes) -> None:
    """An EXIF block that makes no sense is ignored."""
    plain = encode(Image.fromarray(SMOOTH), "JPEG")
    assert np.array_equal(decode_pixels(encode(Image.fromarray(SMOOTH), "JPEG", exif=exif)), decode_pixels(plain))


GRAY16 = {
    "png": (encode(Image.fromarray(RAMP), "PNG"), RAMP8),
}


@pytest.mark.parametrize("kind", GRAY16)
def test_gray16(kind: str) -> None:
    """A deep gray picture is scaled so that its full scale becomes 255, never clipped."""
    data, expected = GRAY16[kind]
    assert np.array_equal(decode_pixels(data), np.repeat(expected[..., None], 3, -1))


def test_threads() -> None:
    """Many threads decoding at once each get their own picture."""
    files = [encode(Image.new("RGB", (16, 16), (shade, 0, 255 - shade)), "PNG") for shade in range(0, 256, 8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(decode_pixels, files * 4))
    assert [int(each[0, 0, 0]) for each in found] == list(range(0, 256, 8)) * 4
