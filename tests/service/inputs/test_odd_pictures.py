"""Pictures that are odd but good, sent to a running server: what reaches the model are the pixels they should have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from layertap.service.config.configuration import Configuration
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.inputs.test_images import NOISE, encode, make_png, oriented
from tests.service.support import UPRIGHT, Array, arrays_of, raw

SIZE = (9, 6)
DEEP = np.random.default_rng(3).integers(0, 65536, (6, 9, 4), dtype=np.uint16)
COLOURS = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90], [200, 100, 0]], np.uint8)
INDICES = np.arange(54).reshape(6, 9) % 4
FRAMES = [Image.new("RGB", SIZE, colour) for colour in ("red", "blue", "lime")]
RED = np.broadcast_to(np.array([255, 0, 0], np.uint8), (6, 9, 3))
CYAN = np.broadcast_to(np.array([0, 255, 255], np.uint8), (6, 9, 3))
# Where each of Adam7's passes begins, and how far its pixels are from each other: row, column.
ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
PLAIN = PreprocessSpec(resize=None, crop=None, mean=(0, 0, 0), std=(1, 1, 1))


def rows(values: Array) -> bytes:
    """Rows of a PNG, none of them filtered; a picture of no columns has none."""
    return b"".join(b"\0" + row.tobytes() for row in values) if values.size else b""


def adam7(values: Array) -> bytes:
    return b"".join(rows(values[row::down, column::right]) for row, column, down, right in ADAM7)


def palette(kind: str, **options: Any) -> bytes:
    image = Image.frombytes("P", SIZE, INDICES.astype(np.uint8).tobytes())
    image.putpalette(COLOURS.ravel().tolist())
    return encode(image, kind, **options)


def turned(kind: str, orientation: int, **options: Any) -> bytes:
    return encode(Image.fromarray(NOISE), kind, exif=oriented(orientation), **options)


def animated(kind: str, **options: Any) -> bytes:
    return encode(FRAMES[0], kind, save_all=True, append_images=FRAMES[1:], **options)


def gray(values: Array) -> Array:
    return np.repeat(values[..., None], 3, -1)


RGBA = Image.fromarray(np.concatenate([NOISE, NOISE[..., 1:2]], -1))
BROKEN = b"Exif\0\0II*\0\xff\xff\xff\xff"
ONE = Image.new("RGB", (1, 1), (1, 2, 3))

# The file, its pixels, and how far from them a lossy one may be.
ODD: dict[str, tuple[bytes, Array, int]] = {
    "CMYK jpeg": (encode(Image.new("CMYK", SIZE, (255, 0, 0, 0)), "JPEG"), CYAN, 3),
    "16-bit gray png": (make_png(*SIZE, 16, 0, rows(DEEP[..., 0].astype(">u2"))), gray(DEEP[..., 0] / 257), 1),
    "16-bit colour png": (make_png(*SIZE, 16, 2, rows(DEEP[..., :3].astype(">u2"))), DEEP[..., :3] / 257, 1),
    "16-bit png with alpha": (make_png(*SIZE, 16, 6, rows(DEEP.astype(">u2"))), DEEP[..., :3] / 257, 1),
    "palette png": (palette("PNG"), COLOURS[INDICES], 0),
    "palette png with alpha": (palette("PNG", transparency=b"\0\x80\xff\x10"), COLOURS[INDICES], 0),
    "palette gif with a transparent colour": (palette("GIF", transparency=1), COLOURS[INDICES], 0),
    "webp with alpha": (encode(RGBA, "WEBP", lossless=True, exact=True), NOISE, 0),
    "png with alpha": (encode(RGBA, "PNG"), NOISE, 0),
    "Adam7 colour png": (make_png(*SIZE, 8, 2, adam7(NOISE), interlaced=1), NOISE, 0),
    **{
        f"{kind} of orientation {turn}": (turned(kind, turn, **options), UPRIGHT.get(turn, UPRIGHT[1])(NOISE), 0)
        for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}))
        for turn in (3, 6, 0, 600)
    },
    "png with a broken EXIF block": (encode(Image.fromarray(NOISE), "PNG", exif=BROKEN), NOISE, 0),
    "animated gif": (animated("GIF"), RED, 0),
    "animated png": (animated("PNG"), RED, 0),
    "animated webp": (animated("WEBP", lossless=True), RED, 0),
    "jpeg of three pictures": (animated("MPO"), RED, 1),
    **{
        f"1 by 1 {kind}": (encode(ONE, kind), np.array([[[1, 2, 3]]]), 3 * (kind == "JPEG"))
        for kind in ("PNG", "JPEG", "GIF", "BMP")
    },
}


@pytest.fixture(scope="module")
def pixels(serve: Serve) -> Iterator[Live]:
    """A server of a model that takes pictures of any size as they are."""
    inputs = (InputSpec("x", (3, 6, 9)),)
    spec = ModelSpec("plain", "python:tests.nets:Chain", weights="random:0", inputs=inputs, preprocess=PLAIN)
    with serve(Configuration((spec,), "plain")) as live:
        yield live


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize("name", ODD)
def test_pixels(pixels: Live, name: str) -> None:
    """An odd picture is answered, and its pixels are right."""
    data, expected, apart = ODD[name]
    reply = pixels.client.post("/extract", **raw(data, "image/x", layers="conv:input", format="npz"))
    (found,) = arrays_of(reply).values()
    assert found.shape == (1, 3, *expected.shape[:2])
    assert np.abs(found[0].transpose(1, 2, 0) * 255 - expected).max() <= apart + 1e-3
