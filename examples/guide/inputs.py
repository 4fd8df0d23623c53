"""The pictures that the guide looks at, out of scikit-learn: ``python examples/guide/inputs.py FOLDER``.

``flower.png`` is a square of a photograph by dany13, ``four.png`` four handwritten digits as one picture, and
``digits/`` a hundred single ones that no network was trained on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image
from sklearn.model_selection import train_test_split

FOUR = (3, 0, 6, 4)  # from left to right, from top to bottom
HELD_OUT, SEED = 0.25, 0  # as bench/digits.py has them
MANY = 100
LEFT, TOP, SIDE = 130, 20, 400  # of the flower


def load_held_out() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Digits (N, 8, 8) that no network was trained on, and which each is."""
    data = load_digits()
    rows = range(len(data.target))
    _, held_out = train_test_split(rows, test_size=HELD_OUT, stratify=data.target, random_state=SEED)
    return np.rint(data.images[held_out] * (255 / 16)).astype(np.uint8), data.target[held_out]


def main() -> None:
    """Write them into the folder that the command line names."""
    folder = Path(sys.argv[1])
    (folder / "digits").mkdir(parents=True, exist_ok=True)
    pixels, labels = load_held_out()
    for number, (each, label) in enumerate(zip(pixels[:MANY], labels, strict=False)):
        Image.fromarray(each).save(folder / "digits" / f"{number:02}-{label}.png")
    four = [pixels[np.flatnonzero(labels == digit)[0]] for digit in FOUR]
    square = Image.fromarray(np.block([four[:2], four[2:]]))
    square.resize((256, 256), Image.Resampling.BICUBIC).convert("RGB").save(folder / "four.png")
    flower = Image.fromarray(load_sample_image("flower.jpg")).crop((LEFT, TOP, LEFT + SIDE, TOP + SIDE))
    flower.resize((256, 256), Image.Resampling.LANCZOS).save(folder / "flower.png")


if __name__ == "__main__":
    main()
