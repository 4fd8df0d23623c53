"""How good vectors are for searching: ``python examples/retrieval/evaluate.py GALLERY.parquet QUERIES.parquet``.

Both are what ``layertap bulk`` wrote, of pictures called ``LABEL-NUMBER``. Prints recall@1 and the mean average
precision, and the same for raw pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table
from vectors import RefusedError, VectorFile, Vectors, normalize

SIDE = 32  # pixels: the size at which the model gets them

Labels = NDArray[np.str_]


def read_labels(keys: list[str]) -> Labels:
    """What is on each picture: its file's name up to the dash."""
    return np.array([Path(key).name.partition("-")[0] for key in keys])


def read_pixels(file: VectorFile, keys: list[str]) -> Vectors:
    """The pictures themselves as unit vectors: RGB, all of one size."""
    paths = [path for path in map(file.find_picture, keys) if path is not None]
    images = [Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR) for path in paths]
    return normalize(np.stack([np.asarray(image).reshape(-1) for image in images]))


def measure(gallery: Vectors, labels: Labels, queries: Vectors, wanted: Labels) -> tuple[float, float]:
    """Recall@1 and the mean average precision, both from 0 to 1, of ranking a gallery by cosine.

    Recall@1 is the share of queries whose nearest picture has the right label. A query's average precision is the
    mean over all pictures with its label: of the share of right ones among those that rank as high or higher.
    """
    right = labels[np.argsort(-(queries @ gallery.T), axis=1, kind="stable")] == wanted[:, None]
    precision = np.cumsum(right, axis=1) / np.arange(1, len(labels) + 1)
    average = (precision * right).sum(axis=1) / right.sum(axis=1)
    return float(right[:, 0].mean()), float(average.mean())


def compare(gallery: VectorFile, queries: VectorFile) -> None:
    """Print how the vectors of two files do, and how pixels do."""
    if gallery.fingerprint != queries.fingerprint:
        queries.refuse(f"has fingerprint {queries.fingerprint}, and {gallery.path} has {gallery.fingerprint}")
    known, asked = gallery.read(), queries.read()
    pixels = read_pixels(gallery, known.keys), read_pixels(queries, asked.keys)
    labels, wanted = read_labels(known.keys), read_labels(asked.keys)
    columns = ("", "gallery", "queries", "recall@1", "of pixels", "mAP", "of pixels")
    table = Table(*columns, title=f"{gallery.column} of {gallery.model}, {known.vectors.shape[1]} numbers")
    for name, is_of in GROUPS.items():
        among, of = is_of(labels), is_of(wanted)
        vectors, raw = (
            measure(one[among], labels[among], other[of], wanted[of])
            for one, other in ((known.vectors, asked.vectors), pixels)
        )
        figures = [f"{value:.4f}" for pair in zip(vectors, raw, strict=True) for value in pair]
        table.add_row(name, str(among.sum()), str(of.sum()), *figures)
    Console().print(table)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="How good vectors are for searching.")
    parser.add_argument("gallery", type=Path)
    parser.add_argument("queries", type=Path)
    parser.add_argument("--column", help="the layer, where the files have several")
    chosen = parser.parse_args()
    try:
        compare(*(VectorFile.open(path, chosen.column) for path in (chosen.gallery, chosen.queries)))
    except RefusedError as error:
        raise SystemExit(f"refused: {error}") from None


GROUPS: dict[str, Callable[[Labels], NDArray[np.bool_]]] = {
    "digits": np.char.isdigit,
    "photos": lambda labels: ~np.char.isdigit(labels),
    "all": lambda labels: np.ones(len(labels), bool),
}

if __name__ == "__main__":
    main()
