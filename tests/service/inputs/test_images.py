from __future__ import annotations

import pickle
import random
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from layertap.models.errors import InputError, TooLargeError
from layertap.service.inputs.images import decode_image
from tests.service.support import UPRIGHT

LIMIT = 1_000_000
NOISE = np.random.default_rng(7).integers(0, 256, (6, 9, 3), dtype=np.uint8)
SMOOTH = np.stack(np.meshgrid(np.arange(0, 240, 5), np.arange(0, 160, 5), indexing="xy") * 2, -1)[..., :3].astype("u1")
RAMP = np.arange(65536, dtype=np.uint16).reshape(128, 512)
RAMP8 = np.floor(RAMP / 257 + 0.5).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels(data: bytes, limit: int = LIMIT) -> np.ndarray[Any, Any]:
    image = decode_image(data, limit)
    assert image.mode == "RGB"
    return np.asarray(image)


def png(width: int, height: int, depth: int, colour: int, body: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def tiff(values: np.ndarray[Any, Any], bits: int, photometric: int, sample_format: int = 1) -> bytes:
    """A little-endian gray TIFF of one uncompressed strip."""
    height, width = values.shape
    body = values.tobytes() if bits != 12 else twelve_bit(values)
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1), (278, height)]
    tags += [(279, len(body)), (339, sample_format)]
    directory = struct.pack("<H", len(tags))
    directory += b"".join(struct.pack("<HHII", tag, 4 if value > 65535 else 3, 1, value) for tag, value in tags)
    return b"II*\x00" + struct.pack("<I", 8 + len(body)) + body + directory + bytes(4)


def twelve_bit(values: np.ndarray[Any, Any]) -> bytes:
    pairs = values.reshape(-1, 2).astype(np.uint32)
    whole = (pairs[:, 0] << 12) | pairs[:, 1]
    return np.stack([whole >> 16, (whole >> 8) & 255, whole & 255], 1).astype(np.uint8).tobytes()


LOSSLESS: dict[str, Callable[[Image.Image], bytes]] = {
    "png": lambda image: saved(image, "PNG"),
    "webp": lambda image: saved(image, "WEBP", lossless=True),
    "bmp": lambda image: saved(image, "BMP"),
    "tiff": lambda image: saved(image, "TIFF"),
    "tiff-lzw": lambda image: saved(image, "TIFF", compression="tiff_lzw"),
    "tiff-big": lambda image: saved(image, "TIFF", big_tiff=True),
}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless(kind: str) -> None:
    """A lossless RGB file decodes to exactly the pixels it was made from."""
    assert np.array_equal(pixels(LOSSLESS[kind](Image.fromarray(NOISE))), NOISE)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 100, "subsampling": 0}])
def test_jpeg(options: dict[str, Any]) -> None:
    """A JPEG decodes to what Pillow gives for it."""
    data = saved(Image.fromarray(SMOOTH), "JPEG", **options)
    assert np.array_equal(pixels(data), np.asarray(Image.open(BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation(kind: str, orientation: int) -> None:
    """A picture with an EXIF orientation comes out as its stored pixels turned by hand."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    plain = saved(Image.fromarray(SMOOTH), kind, **options)
    turned = saved(Image.fromarray(SMOOTH), kind, exif=exif, **options)
    assert np.array_equal(pixels(turned), UPRIGHT[orientation](pixels(plain)))


@pytest.mark.parametrize("orientation", [0, 9, 600])
def test_orientation_out_of_range(orientation: int) -> None:
    """An orientation that does not exist is ignored."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(pixels(saved(Image.fromarray(NOISE), "PNG", exif=exif)), NOISE)


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
    plain = saved(Image.fromarray(SMOOTH), "JPEG")
    assert np.array_equal(pixels(saved(Image.fromarray(SMOOTH), "JPEG", exif=exif)), pixels(plain))


GRAY16 = {
    "png": (saved(Image.fromarray(RAMP), "PNG"), RAMP8),
    "tiff": (saved(Image.fromarray(RAMP), "TIFF"), RAMP8),
    "tiff-lzw": (saved(Image.fromarray(RAMP), "TIFF", compression="tiff_lzw"), RAMP8),
    "tiff-by-hand": (tiff(RAMP, 16, 1), RAMP8),
    "tiff-white-is-zero": (tiff(RAMP, 16, 0), 255 - RAMP8),
    "tiff-12-bit": (tiff(RAMP >> 4, 12, 1), np.floor((RAMP >> 4) / 4095 * 255 + 0.5).astype(np.uint8)),
}


@pytest.mark.parametrize("kind", GRAY16)
def test_gray16(kind: str) -> None:
    """A deep gray picture is scaled so that its full scale becomes 255, never clipped."""
    data, expected = GRAY16[kind]
    assert np.array_equal(pixels(data), np.repeat(expected[..., None], 3, -1))


@pytest.mark.parametrize(("colour", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_deep_colour(colour: int, channels: int) -> None:
    """A PNG of 16 bits a channel comes out within one step of its scaled values, alpha dropped."""
    values = np.random.default_rng(3).integers(0, 65536, (5, 7, channels), dtype=np.uint16)
    rows = b"".join(b"\x00" + row.astype(">u2").tobytes() for row in values)
    expected = values[..., :3] if channels > 2 else np.repeat(values[..., :1], 3, -1)
    assert np.abs(pixels(png(7, 5, 16, colour, rows)) - np.round(expected / 257)).max() <= 1


def palette() -> Image.Image:
    image = Image.frombytes("P", (9, 6), bytes(n % 4 for n in range(54)))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 200, 100, 0])
    return image


COLOURS = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90], [200, 100, 0]], np.uint8)[np.arange(54).reshape(6, 9) % 4]
PALETTES = {
    "png": saved(palette(), "PNG"),
    "png-one-transparent": saved(palette(), "PNG", transparency=2),
    "png-transparencies": saved(palette(), "PNG", transparency=b"\x00\x80\xff\x10"),
    "gif": saved(palette(), "GIF"),
    "gif-transparent": saved(palette(), "GIF", transparency=1),
    "bmp": saved(palette(), "BMP"),
    "tiff": saved(palette(), "TIFF"),
}


@pytest.mark.parametrize("kind", PALETTES)
def test_palette(kind: str) -> None:
    """A palette picture has its palette's colours, whichever of them are transparent."""
    assert np.array_equal(pixels(PALETTES[kind]), COLOURS)


GRAY = NOISE[..., 0]
ALPHA = NOISE[..., 1]
GRAYS = {
    "L png": saved(Image.fromarray(GRAY), "PNG"),
    "L tiff": saved(Image.fromarray(GRAY), "TIFF"),
    "LA png": saved(Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(ALPHA)]), "PNG"),
    "LA tiff": saved(Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(ALPHA)]), "TIFF"),
    "L png, one transparent": saved(Image.fromarray(GRAY), "PNG", transparency=int(GRAY[0, 0])),
}


@pytest.mark.parametrize("kind", GRAYS)
def test_gray(kind: str) -> None:
    """A gray picture, with alpha or without, has three equal channels."""
    assert np.array_equal(pixels(GRAYS[kind]), np.repeat(GRAY[..., None], 3, -1))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_alpha_dropped(kind: str) -> None:
    """Alpha is dropped and the colours under it stay as they are."""
    image = Image.fromarray(np.concatenate([NOISE, ALPHA[..., None]], -1))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert np.array_equal(pixels(saved(image, kind, **options)), NOISE)


def test_bilevel() -> None:
    """A picture of one bit a pixel is black and white."""
    data = saved(Image.fromarray(GRAY > 127), "PNG")
    assert np.array_equal(pixels(data), np.repeat(np.where(GRAY > 127, 255, 0)[..., None], 3, -1))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind: str) -> None:
    """CMYK, which Adobe's JPEG stores inverted, comes out in its colours."""
    ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    assert np.abs(pixels(saved(ink, kind)).astype(int) - [0, 255, 255]).max() <= 3


def test_ycbcr() -> None:
    """An uncompressed YCbCr TIFF comes out in its colours."""
    data = saved(Image.fromarray(SMOOTH).convert("YCbCr"), "TIFF")
    assert np.abs(pixels(data).astype(int) - SMOOTH).max() <= 3


def test_lab() -> None:
    """A CIELAB TIFF comes out in its colours."""
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    image = ImageCms.profileToProfile(Image.new("RGB", (4, 4), (200, 60, 90)), srgb, lab, outputMode="LAB")
    assert image is not None
    assert np.abs(pixels(saved(image, "TIFF")).astype(int) - [200, 60, 90]).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG", "MPO"])
def test_first_frame(kind: str) -> None:
    """Of an animation, or of several pages, the first one counts."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.abs(pixels(data).astype(int) - [255, 0, 0]).max() <= 1


def test_one_pixel() -> None:
    """A picture of a single pixel is a picture."""
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        assert pixels(saved(Image.new("RGB", (1, 1)), kind)).shape == (1, 1, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("kept", [0.02, 0.3, 0.7])
def test_truncated(kind: str, kept: float) -> None:
    """A picture cut short is refused, with the formats to send."""
    whole = saved(Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)), kind)
    with pytest.raises(InputError) as caught:
        decode_image(whole[: int(len(whole) * kept)], LIMIT)
    assert "JPEG, PNG, WebP, GIF, BMP or TIFF" in caught.value.hint


FOREIGN = {
    "nothing": b"",
    "text": b"hello",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "eps": saved(Image.fromarray(NOISE), "EPS"),
    "pdf": saved(Image.fromarray(NOISE), "PDF"),
    "psd": b"8BPS\x00\x01" + bytes(100),
    "ico": saved(Image.fromarray(NOISE), "ICO"),
    "ppm": saved(Image.fromarray(NOISE), "PPM"),
    "pickle": pickle.dumps([1, 2]),
    "riff": b"RIFF\x00\x00\x00\x00WAVEfmt ",
    "jpeg start": b"\xff\xd8\xff",
    "bmp start": b"BM",
    "tiff start": b"II*\x00",
    "webp start": b"RIFF\x00\x00\x00\x00WEBP",
    "empty png": png(0, 0, 8, 2, b""),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign(kind: str) -> None:
    """What is not one of the six formats is refused, with the formats to send."""
    with pytest.raises(InputError) as caught:
        decode_image(FOREIGN[kind], LIMIT)
    assert "JPEG, PNG, WebP, GIF, BMP or TIFF" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        saved(Image.fromarray(NOISE[..., 0].astype(np.float32)), "TIFF"),
        saved(Image.fromarray(NOISE[..., 0].astype(np.int32)), "TIFF"),
        tiff(NOISE[..., 0].astype(np.int16), 16, 1, 2),
    ],
    ids=["float", "int32", "int16"],
)
def test_no_scale(data: bytes) -> None:
    """Pixels without a fixed full scale are refused."""
    with pytest.raises(InputError, match="float, signed or 32-bit"):
        decode_image(data, LIMIT)


def claimed(kind: str, side: int, mark: bytes, offset: int, layout: str) -> bytes:
    """A small file whose header, at ``offset`` from ``mark``, claims a square of ``side`` pixels."""
    small = bytearray(saved(Image.new("RGB", (8, 8)), kind))
    struct.pack_into(layout, small, small.index(mark) + offset, side, side)
    return bytes(small)


def claimed_webp(side: int) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    small = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    start = small.index(b"VP8X") + 12
    return small[:start] + (side - 1).to_bytes(3, "little") * 2 + small[start + 6 :]


BOMBS = {
    "png": (png(30000, 30000, 8, 2, b""), "900000000"),
    "png, small": (png(1000, 1001, 1, 0, b""), "1001000"),
    "gif": (claimed("GIF", 60000, b"GIF8", 6, "<HH"), "3600000000"),
    "gif, large frame": (claimed("GIF", 10000, b",\x00\x00\x00\x00\x08", 5, "<HH"), ""),
    "gif, larger frame": (claimed("GIF", 60000, b",\x00\x00\x00\x00\x08", 5, "<HH"), ""),
    "bmp": (claimed("BMP", 30000, b"BM", 18, "<ii"), "900000000"),
    "jpeg": (claimed("JPEG", 30000, b"\xff\xc0", 5, ">HH"), "900000000"),
    "webp": (claimed_webp(10000), "100000000"),
    "webp, larger": (claimed_webp(16000), ""),
    "tiff": (
        tiff(np.zeros((1, 70000), np.uint8), 8, 1).replace(
            struct.pack("<HHII", 257, 3, 1, 1), struct.pack("<HHII", 257, 3, 1, 60000)
        ),
        "4200000000",
    ),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_too_many_pixels(kind: str) -> None:
    """A header that claims too many pixels is refused with figure and limit, whatever follows it."""
    data, figure = BOMBS[kind]
    with pytest.raises(TooLargeError) as caught:
        decode_image(data, LIMIT)
    assert figure in caught.value.detail
    assert f"the limit is {LIMIT}" in caught.value.detail


def test_exactly_the_limit() -> None:
    """A picture of exactly as many pixels as allowed passes; one more does not."""
    data = saved(Image.fromarray(NOISE), "PNG")
    assert pixels(data, 54).shape == (6, 9, 3)
    with pytest.raises(TooLargeError, match=r"54 pixels.*limit is 53"):
        decode_image(data, 53)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "GIF", "WEBP"])
def test_own_limit_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit above Pillow's own threshold neither its warning nor its error stands in the way."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert pixels(saved(Image.fromarray(NOISE), kind)).shape == (6, 9, 3)


def refusal(data: bytes) -> str:
    """What the decoder says of ``data``; nothing where it decodes."""
    try:
        assert decode_image(data, LIMIT).mode == "RGB"
    except (InputError, TooLargeError) as error:
        return error.detail
    return ""


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_damaged(kind: str) -> None:
    """Whatever bytes of a file are changed, it decodes or is refused in the tree's own errors and plain words."""
    chance = random.Random(kind)
    whole = saved(Image.fromarray(SMOOTH), kind)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        assert not any(mark in refusal(bytes(data)) for mark in ("0x", "/", "object", "\\"))


def test_threads() -> None:
    """Many threads decoding at once each get their own picture."""
    files = [saved(Image.new("RGB", (16, 16), (shade, 0, 255 - shade)), "PNG") for shade in range(0, 256, 8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(pixels, files * 4))
    assert [int(each[0, 0, 0]) for each in found] == list(range(0, 256, 8)) * 4
