"""Pictures that are refused: cut short, damaged, foreign, too large."""

from __future__ import annotations

import pickle
import random
import struct
import sys
from io import BytesIO
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from layertap.models.errors import InputError, TooLargeError
from layertap.service.inputs.images import decode_image
from tests.service.inputs.picture_files import LIMIT, NOISE, SMOOTH, decode_pixels, encode, make_png


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF", "HEIF"])
def test_truncated(kind: str) -> None:
    """A picture cut short is refused, with the formats to send."""
    whole = encode(Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)), kind)
    with pytest.raises(InputError) as caught:
        decode_image(whole[: int(len(whole) * 0.7)], LIMIT)
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


FOREIGN = {
    "text": b"hello",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "eps": encode(Image.fromarray(NOISE), "EPS"),
    "ppm": encode(Image.fromarray(NOISE), "PPM"),
    "pickle": pickle.dumps([1, 2]),
    "jpeg start": b"\xff\xd8\xff",
    "tiff": encode(Image.fromarray(NOISE), "TIFF"),
    "webp start": b"RIFF\x00\x00\x00\x00WEBP",
    "empty png": make_png(0, 0, 8, 2, b""),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign(kind: str) -> None:
    """What is not one of the formats is refused, with the formats to send."""
    with pytest.raises(InputError) as caught:
        decode_image(FOREIGN[kind], LIMIT)
    assert "JPEG, PNG, WebP, AVIF, GIF or BMP" in caught.value.hint


def test_text_before_the_head() -> None:
    """A PNG whose head is not its first part is damaged: what is behind its signature would be taken for the head."""
    whole, text = encode(Image.fromarray(NOISE), "PNG"), b"tEXt" + bytes(18)
    part = struct.pack(">I", 18) + text + struct.pack(">I", crc32(text))
    data = whole[:8] + part + whole[8:]
    Image.open(BytesIO(data)).load()
    with pytest.raises(InputError, match="damaged"):
        decode_image(data, LIMIT)


def claimed(kind: str, side: int, mark: bytes, offset: int, layout: str) -> bytes:
    """A small file whose header, at ``offset`` from ``mark``, claims a square of ``side`` pixels."""
    small = bytearray(encode(Image.new("RGB", (8, 8)), kind))
    struct.pack_into(layout, small, small.index(mark) + offset, side, side)
    return bytes(small)


def claimed_webp(side: int) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    small = encode(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    start = small.index(b"VP8X") + 12
    return small[:start] + (side - 1).to_bytes(3, "little") * 2 + small[start + 6 :]


def claimed_box(kind: str, side: int, claimed_side: int) -> bytes:
    """A small file of boxes that say another size than the pixels in them have."""
    small = encode(Image.new("RGB", (side, side)), kind)
    return small.replace(struct.pack(">II", side, side), struct.pack(">II", claimed_side, claimed_side))


BOMBS = {
    "png": (make_png(30000, 30000, 8, 2, b""), "900000000"),
    "gif": (claimed("GIF", 60000, b"GIF8", 6, "<HH"), "3600000000"),
    "gif, large frame": (claimed("GIF", 10000, b",\x00\x00\x00\x00\x08", 5, "<HH"), ""),
    "bmp": (claimed("BMP", 30000, b"BM", 18, "<ii"), "900000000"),
    "jpeg": (claimed("JPEG", 30000, b"\xff\xc0", 5, ">HH"), "900000000"),
    "avif": (claimed_box("AVIF", 8, 12000), "144000000"),
    "heif": (claimed_box("HEIF", 64, 30000), "900000000"),
    "webp": (claimed_webp(10000), "100000000"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_too_many_pixels(kind: str) -> None:
    """A header that claims too many pixels is refused with figure and limit, whatever follows it."""
    data, figure = BOMBS[kind]
    with pytest.raises(TooLargeError) as caught:
        decode_image(data, LIMIT)
    assert figure in caught.value.detail
    assert f"the limit is {LIMIT}" in caught.value.detail


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
        assert decode_image(data, LIMIT).mode == "RGB"
    except (InputError, TooLargeError) as error:
        return error.detail
    return ""


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF", "HEIF"])
def test_damaged(kind: str) -> None:
    """Whatever bytes of a file are changed, it decodes or is refused in the tree's own errors and plain words."""
    chance = random.Random(kind)
    whole = encode(Image.fromarray(SMOOTH), kind)
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        assert not any(mark in refusal(bytes(data)) for mark in ("0x", "/", "object", "\\"))
