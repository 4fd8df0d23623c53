"""The bytes of inputs: made once, before the first request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image

BAD_BYTES = 2048
GRAIN = 4  # pixels between two random ones: noise in each pixel would make a JPEG larger than photographs are
QUALITY = 90


class Body(NamedTuple):
    """Bytes and what they are declared as."""

    content: bytes
    media_type: str


def jpeg(width: int, height: int, seed: int) -> Body:
    """A picture of random blotches."""
    coarse = (-(-height // GRAIN), -(-width // GRAIN), 3)
    pixels = np.random.default_rng(seed).integers(0, 256, coarse, dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=QUALITY)
    return Body(stream.getvalue(), "image/jpeg")


def npy(rows: int, shape: Sequence[int], seed: int) -> Body:
    """Rows of normally distributed float32."""
    stream = BytesIO()
    np.save(stream, np.random.default_rng(seed).standard_normal((rows, *shape), np.float32))
    return Body(stream.getvalue(), "application/x-npy")


def bad(seed: int) -> Body:
    """Random bytes, declared as a picture."""
    return Body(np.random.default_rng(seed).bytes(BAD_BYTES), "image/jpeg")


def multipart(pictures: Sequence[Body]) -> Body:
    """Parts named ``images``; a single one is its own body."""
    if len(pictures) == 1:
        return pictures[0]
    boundary = hashlib.sha256(b"".join(each.content for each in pictures)).hexdigest()
    head = '--{}\r\nContent-Disposition: form-data; name="images"; filename="{}"\r\nContent-Type: {}\r\n\r\n'
    content = b"".join(
        head.format(boundary, number, each.media_type).encode() + each.content + b"\r\n"
        for number, each in enumerate(pictures)
    )
    return Body(content + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}")
