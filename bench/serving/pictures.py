"""The pictures that every measurement uses: scikit-learn's two samples, 640×427, as JPEG of quality 95."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

QUALITY = 95


def written(folder: Path) -> list[Path]:
    """Both pictures as files in a folder."""
    from sklearn.datasets import load_sample_images  # takes seconds, and whoever has the files needs no such import

    samples = load_sample_images()
    paths = [folder / Path(name).name for name in samples.filenames]
    for path, pixels in zip(paths, samples.images, strict=True):
        Image.fromarray(pixels).save(path, "JPEG", quality=QUALITY)
    return paths
