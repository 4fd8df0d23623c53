"""Encoded pictures become upright RGB with the right values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.service.inputs.picture_files import SMOOTH, decode_pixels, encode
from tests.service.support import UPRIGHT


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 100, "subsampling": 0}])
def test_jpeg(options: dict[str, Any]) -> None:
    """A JPEG decodes to what Pillow gives for it."""
    data = encode(Image.fromarray(SMOOTH), "JPEG", **options)
    assert np.array_equal(decode_pixels(data), np.asarray(Image.open(BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize(("kind", "mode"), [("AVIF", "RGB"), ("AVIF", "RGBA"), ("HEIF", "RGB"), ("HEIF", "L")])
def test_boxes(kind: str, mode: str) -> None:
    """A smooth picture in either format of boxes comes out nearly as it went in."""
    data = encode(Image.fromarray(SMOOTH).convert(mode), kind, quality=98)
    wanted = np.asarray(Image.fromarray(SMOOTH).convert(mode).convert("RGB"), int)
    assert np.abs(decode_pixels(data) - wanted).max() <= 8


def test_heif_is_not_registered() -> None:
    """Whoever else opens pictures in this process finds Pillow as it was."""
    decode_pixels(encode(Image.fromarray(SMOOTH), "HEIF"))
    assert "HEIF" not in Image.OPEN


@pytest.mark.parametrize(("kind", "orientation"), [*(("JPEG", each) for each in UPRIGHT), ("AVIF", 6)])
def test_orientation(kind: str, orientation: int) -> None:
    """A picture with an EXIF orientation comes out as its stored pixels turned by hand."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    plain = encode(Image.fromarray(SMOOTH), kind)
    turned = encode(Image.fromarray(SMOOTH), kind, exif=exif)
    assert np.array_equal(decode_pixels(turned), UPRIGHT[orientation](decode_pixels(plain)))


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\x00\x00",
        b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff",
        b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x02\x00\x00\x00\x0999999999",
    ],
)
def test_exif_garbage(exif: bytes) -> None:
    """An EXIF block that makes no sense is ignored."""
    plain = encode(Image.fromarray(SMOOTH), "JPEG")
    assert np.array_equal(decode_pixels(encode(Image.fromarray(SMOOTH), "JPEG", exif=exif)), decode_pixels(plain))


def test_threads() -> None:
    """Many threads decoding at once each get their own picture."""
    files = [encode(Image.new("RGB", (16, 16), (shade, 0, 255 - shade)), "PNG") for shade in range(0, 256, 8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(decode_pixels, files * 4))
    assert [int(each[0, 0, 0]) for each in found] == list(range(0, 256, 8)) * 4
