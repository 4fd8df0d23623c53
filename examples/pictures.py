"""The pictures of the examples, out of scikit-learn.

``python examples/pictures.py out/pictures`` writes ``gallery/`` and ``queries/``, files called ``LABEL-NUMBER``;
without a folder, the two digits that are kept beside this file.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image
from sklearn.model_selection import train_test_split

SIDE = 32  # pixels: what the model takes
HELD_OUT = 0.25
SEED = 0
KEPT = ("digit.png", "digit-0.png")

Picture = tuple[str, bytes]  # its name, and its file


def make_digits() -> tuple[list[Picture], list[Picture]]:
    """The 1,797 digits as PNG, 8 x 8 pixels; the second part is what ``bench/digits.py`` held out."""
    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return split([encode(each, "PNG") for each in pixels], [str(label) for label in data.target], ".png")


def make_photos() -> tuple[list[Picture], list[Picture]]:
    """Pieces of two photographs as JPEG, ``SIDE`` pixels square; none overlap; each has its photograph as label."""
    pieces = [(name, piece) for name in ("china", "flower") for piece in cut(load_sample_image(f"{name}.jpg"))]
    return split([encode(piece, "JPEG") for _, piece in pieces], [name for name, _ in pieces], ".jpg")


def cut(photo: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """All whole squares of ``SIDE`` pixels."""
    height, width, _ = photo.shape
    for top in range(0, height - SIDE + 1, SIDE):
        for left in range(0, width - SIDE + 1, SIDE):
            yield photo[top : top + SIDE, left : left + SIDE]


def encode(pixels: NDArray[np.uint8], format: str) -> bytes:  # noqa: A002
    """A picture as the bytes of a file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format, quality=90)
    return stream.getvalue()


def split(files: list[bytes], labels: list[str], suffix: str) -> tuple[list[Picture], list[Picture]]:
    """All but a quarter, and that quarter, stratified by label; the same on every call."""
    rows = train_test_split(range(len(labels)), test_size=HELD_OUT, stratify=labels, random_state=SEED)
    gallery, queries = ([(f"{labels[row]}-{row:04}{suffix}", files[row]) for row in part] for part in rows)
    return gallery, queries


def write(folder: Path) -> None:
    """A gallery and queries, of digits and pieces of photographs, each picture in one of them only."""
    parts = zip(make_digits(), make_photos(), strict=True)
    for name, (digits, photos) in zip(("gallery", "queries"), parts, strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, content in [*digits, *photos]:
            (folder / name / file).write_bytes(content)
        print(f"{folder / name}: {len(digits)} digits and {len(photos)} photos")


def main() -> None:
    """Write what the command line says."""
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
        return
    _, held_out = make_digits()
    for name, (label, content) in zip(KEPT, held_out, strict=False):
        Path(__file__).with_name(name).write_bytes(content)
        print(f"{name}: a {label.partition('-')[0]}")


if __name__ == "__main__":
    main()
