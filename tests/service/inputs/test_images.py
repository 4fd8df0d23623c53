"""Encoded pictures become upright RGB with the right values, or are refused: cut short, damaged, foreign, too large.

Hostile ones ``tests/service/test_hostile_pictures.py`` sends.
"""

from __future__ import annotations

import random
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from layertap.models.errors import InputError, TooLargeError
from layertap.service.inputs.images import decode_image
from tests.service.support import UPRIGHT

LIMIT = 1_000_000
NOISE = np.random.default_rng(7).integers(0, 256, (6, 9, 3), dtype=np.uint8)
SMOOTH = np.stack(np.meshgrid(np.arange(0, 240, 5), np.arange(0, 160, 5), indexing="xy") * 2, -1)[..., :3].astype("u1")


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = BytesIO()
    if kind == "HEIF":  # its plugin is registered nowhere
        pillow_heif.from_pillow(image).save(stream, **options)
    else:
        image.save(stream, kind, **options)
    return stream.getvalue()


def oriented(value: object) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def decode_pixels(data: bytes, limit: int = LIMIT) -> np.ndarray[Any, Any]:
    image = decode_image(data, limit).image
    assert image.mode == "RGB"
    return np.asarray(image)


def make_png(width: int, height: int, depth: int, colour: int, body: bytes, interlaced: int = 0) -> bytes:
    """A PNG by hand, of filtered rows."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


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
    plain = encode(Image.fromarray(SMOOTH), kind)
    turned = encode(Image.fromarray(SMOOTH), kind, exif=oriented(orientation))
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


KINDS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF", "HEIF")
GRAIN = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8))
BROKEN = {
    **{f"{kind} cut short": (data := encode(GRAIN, kind))[: len(data) * 7 // 10] for kind in KINDS},
    "start of a JPEG": b"\xff\xd8\xff",
    "start of a WebP": b"RIFF\x00\x00\x00\x00WEBP",
    "PNG of no pixels": make_png(0, 0, 8, 2, b""),
    "text": b"hello",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken(kind: str) -> None:
    """A picture cut short, or what is not one of the formats, is refused, with the formats to send."""
    with pytest.raises(InputError) as caught:
        decode_image(BROKEN[kind], LIMIT)
    assert "JPEG, PNG, WebP, AVIF, GIF or BMP" in caught.value.hint


@pytest.mark.parametrize("progressive", [False, True])
def test_no_end_marker(progressive: bool) -> None:
    """A JPEG that lacks no more than its end marker is refused as Pillow refuses it, by words that say so."""
    stream = BytesIO()
    Image.fromarray(NOISE).save(stream, "JPEG", progressive=progressive)
    with pytest.raises(OSError, match="truncated"):
        Image.open(BytesIO(stream.getvalue()[:-2])).load()
    with pytest.raises(InputError, match=r"^the picture is cut short$"):
        decode_image(stream.getvalue()[:-2], LIMIT)


def test_text_before_the_head() -> None:
    """A PNG whose head is not its first part is damaged: what is behind its signature would be taken for the head."""
    whole, text = encode(Image.fromarray(NOISE), "PNG"), b"tEXt" + bytes(18)
    part = struct.pack(">I", 18) + text + struct.pack(">I", zlib.crc32(text))
    data = whole[:8] + part + whole[8:]
    Image.open(BytesIO(data)).load()
    with pytest.raises(InputError, match="damaged"):
        decode_image(data, LIMIT)


@pytest.mark.parametrize(("kind", "side", "claimed"), [("AVIF", 8, 12_000), ("HEIF", 64, 30_000)])
def test_too_many_pixels(kind: str, side: int, claimed: int) -> None:
    """A file of boxes that claims more pixels than are in it is refused with figure and limit."""
    small = encode(Image.new("RGB", (side, side)), kind)
    data = small.replace(struct.pack(">II", side, side), struct.pack(">II", claimed, claimed))
    with pytest.raises(TooLargeError, match=f"{claimed**2} pixels.*the limit is {LIMIT}"):
        decode_image(data, LIMIT)


def test_without_heif(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra a picture of that kind is refused with how to have it."""
    data = encode(Image.fromarray(SMOOTH), "HEIF")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(InputError, match="need pillow-heif") as caught:
        decode_image(data, LIMIT)
    assert 'pip install "layertap[heif]"' in caught.value.hint


def test_exactly_the_limit() -> None:
    """A picture of exactly as many pixels as allowed passes; one more does not."""
    data = encode(Image.fromarray(NOISE), "PNG")
    assert decode_pixels(data, 54).shape == (6, 9, 3)
    with pytest.raises(TooLargeError, match=r"54 pixels.*limit is 53"):
        decode_image(data, 53)


def refusal(data: bytes) -> str:
    """What the decoder says of ``data``; nothing where it decodes."""
    try:
        assert decode_image(data, LIMIT).image.mode == "RGB"
    except (InputError, TooLargeError) as error:
        return error.detail
    return ""


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged(kind: str) -> None:
    """Whatever bytes of a file are changed, it decodes or is refused in the tree's own errors and plain words."""
    chance = random.Random(kind)
    whole = encode(Image.fromarray(SMOOTH), kind)
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        assert not any(mark in refusal(bytes(data)) for mark in ("0x", "/", "object", "\\"))
