"""The pictures of the examples, out of scikit-learn. ``python examples/pictures.py`` writes ``digit*.png``."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image
from sklearn.model_selection import train_test_split

SIDE = 32  # pixels: what the model takes, and so what the raw pixels are compared at
HELD_OUT = 0.25
SEED = 0

Vectors = NDArray[np.float32]
Labels = NDArray[np.str_]


@dataclass(frozen=True)
class Pictures:
    """Encoded pictures and what is on each of them."""

    encoded: tuple[bytes, ...]
    labels: Labels


def digits() -> tuple[Pictures, Pictures]:
    """The 1,797 digits as PNG, 8 x 8 pixels; the second part is what ``models/digits/train.py`` held out."""
    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return split([encoded(each, "PNG") for each in pixels], data.target.astype(str))


def photos() -> tuple[Pictures, Pictures]:
    """Pieces of two photographs as JPEG, ``SIDE`` pixels square; none overlap; each has its photograph as label."""
    pieces = [(name, piece) for name in ("china", "flower") for piece in cut(load_sample_image(f"{name}.jpg"))]
    return split([encoded(piece, "JPEG") for _, piece in pieces], np.array([name for name, _ in pieces]))


def collected() -> tuple[Pictures, Pictures]:
    """A gallery and queries: digits and pieces of photographs, each in one of them only."""
    gallery, queries = (
        Pictures(one.encoded + other.encoded, np.concatenate([one.labels, other.labels]))
        for one, other in zip(digits(), photos(), strict=True)
    )
    return gallery, queries


def cut(photo: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """All whole squares of ``SIDE`` pixels."""
    height, width, _ = photo.shape
    for top in range(0, height - SIDE + 1, SIDE):
        for left in range(0, width - SIDE + 1, SIDE):
            yield photo[top : top + SIDE, left : left + SIDE]


def encoded(pixels: NDArray[np.uint8], format: str) -> bytes:  # noqa: A002
    """A picture as the bytes of a file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format, quality=90)
    return stream.getvalue()


def split(pictures: list[bytes], labels: Labels) -> tuple[Pictures, Pictures]:
    """All but a quarter, and that quarter, stratified by label; the same on every call."""
    rows = train_test_split(range(len(labels)), test_size=HELD_OUT, stratify=labels, random_state=SEED)
    gallery, queries = (Pictures(tuple(pictures[row] for row in part), labels[part]) for part in rows)
    return gallery, queries


def raw(pictures: Pictures) -> Vectors:
    """The pixels as unit vectors, all in the size and the colours in which the model gets them."""
    images = [Image.open(io.BytesIO(each)).convert("RGB") for each in pictures.encoded]
    pixels = np.stack([np.asarray(each.resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for each in images])
    vectors = pixels.reshape(len(images), -1).astype(np.float32)
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def main() -> None:
    """Write the first two digits that the model has never been trained on."""
    _, held_out = digits()
    for name, picture, label in zip(("digit.png", "digit-0.png"), held_out.encoded, held_out.labels, strict=False):
        Path(__file__).with_name(name).write_bytes(picture)
        print(f"{name}: a {label}")


if __name__ == "__main__":
    main()
