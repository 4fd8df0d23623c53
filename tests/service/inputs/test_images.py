"""Encoded pictures become upright RGB with the right values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.service.inputs.picture_files import NOISE, RAMP, SMOOTH, decode_pixels, encode, make_png
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
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_orientation(kind: str, orientation: int) -> None:
    """A picture with an EXIF orientation comes out as its stored pixels turned by hand."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    plain = encode(Image.fromarray(SMOOTH), kind, **options)
    turned = encode(Image.fromarray(SMOOTH), kind, exif=exif, **options)
    assert np.array_equal(decode_pixels(turned), UPRIGHT[orientation](decode_pixels(plain)))


@pytest.mark.parametrize("orientation", [0, 9, 600])
def test_orientation_out_of_range(orientation: int) -> None:
    """An orientation that does not exist is ignored."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode_pixels(encode(Image.fromarray(NOISE), "PNG", exif=exif)), NOISE)


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


@pytest.mark.parametrize(("colour", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_deep_colour(colour: int, channels: int) -> None:
    """A PNG of 16 bits a channel comes out within one step of its scaled values, alpha dropped."""
    values = np.random.default_rng(3).integers(0, 65536, (5, 7, channels), dtype=np.uint16)
    rows = b"".join(b"\x00" + row.astype(">u2").tobytes() for row in values)
    expected = values[..., :3] if channels > 2 else np.repeat(values[..., :1], 3, -1)
    assert np.abs(decode_pixels(make_png(7, 5, 16, colour, rows)) - np.round(expected / 257)).max() <= 1


def palette() -> Image.Image:
    image = Image.frombytes("P", (9, 6), bytes(n % 4 for n in range(54)))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 200, 100, 0])
    return image


COLOURS = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90], [200, 100, 0]], np.uint8)[np.arange(54).reshape(6, 9) % 4]

PALETTES = {
    "png": encode(palette(), "PNG"),
    "png-one-transparent": encode(palette(), "PNG", transparency=2),
    "png-transparencies": encode(palette(), "PNG", transparency=b"\x00\x80\xff\x10"),
    "gif": encode(palette(), "GIF"),
    "gif-transparent": encode(palette(), "GIF", transparency=1),
    "bmp": encode(palette(), "BMP"),
}


@pytest.mark.parametrize("kind", PALETTES)
def test_palette(kind: str) -> None:
    """A palette picture has its palette's colours, whichever of them are transparent."""
    assert np.array_equal(decode_pixels(PALETTES[kind]), COLOURS)


GRAY = NOISE[..., 0]

ALPHA = NOISE[..., 1]

GRAYS = {
    "L png": encode(Image.fromarray(GRAY), "PNG"),
    "LA png": encode(Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(ALPHA)]), "PNG"),
    "L png, one transparent": encode(Image.fromarray(GRAY), "PNG", transparency=int(GRAY[0, 0])),
}


@pytest.mark.parametrize("kind", GRAYS)
def test_gray(kind: str) -> None:
    """A gray picture, with alpha or without, has three equal channels."""
    assert np.array_equal(decode_pixels(GRAYS[kind]), np.repeat(GRAY[..., None], 3, -1))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_dropped(kind: str) -> None:
    """Alpha is dropped and the colours under it stay as they are."""
    image = Image.fromarray(np.concatenate([NOISE, ALPHA[..., None]], -1))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert np.array_equal(decode_pixels(encode(image, kind, **options)), NOISE)


def test_bilevel() -> None:
    """A picture of one bit a pixel is black and white."""
    data = encode(Image.fromarray(GRAY > 127), "PNG")
    assert np.array_equal(decode_pixels(data), np.repeat(np.where(GRAY > 127, 255, 0)[..., None], 3, -1))


def test_cmyk() -> None:
    """CMYK, which Adobe's JPEG stores inverted, comes out in its colours."""
    ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    assert np.abs(decode_pixels(encode(ink, "JPEG")).astype(int) - [0, 255, 255]).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO"])
def test_first_frame(kind: str) -> None:
    """Of an animation, or of several pages, the first one counts."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.abs(decode_pixels(data).astype(int) - [255, 0, 0]).max() <= 1


def test_one_pixel() -> None:
    """A picture of a single pixel is a picture."""
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        assert decode_pixels(encode(Image.new("RGB", (1, 1)), kind)).shape == (1, 1, 3)


def test_threads() -> None:
    """Many threads decoding at once each get their own picture."""
    files = [encode(Image.new("RGB", (16, 16), (shade, 0, 255 - shade)), "PNG") for shade in range(0, 256, 8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(decode_pixels, files * 4))
    assert [int(each[0, 0, 0]) for each in found] == list(range(0, 256, 8)) * 4
