"""Encoded pictures, written as cameras and programs write them."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pillow_heif
from PIL import Image

from layertap.service.inputs.images import decode_image

LIMIT = 1_000_000

NOISE = np.random.default_rng(7).integers(0, 256, (6, 9, 3), dtype=np.uint8)

SMOOTH = np.stack(np.meshgrid(np.arange(0, 240, 5), np.arange(0, 160, 5), indexing="xy") * 2, -1)[..., :3].astype("u1")


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = BytesIO()
    if kind == "HEIF":  # its plugin is registered nowhere
        exif = options.pop("exif", None)
        pillow_heif.from_pillow(image).save(stream, **options, **({"exif": exif.tobytes()} if exif else {}))
    else:
        image.save(stream, kind, **options)
    return stream.getvalue()


def decode_pixels(data: bytes, limit: int = LIMIT) -> np.ndarray[Any, Any]:
    image = decode_image(data, limit)
    assert image.mode == "RGB"
    return np.asarray(image)


def make_png(width: int, height: int, depth: int, colour: int, body: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")
