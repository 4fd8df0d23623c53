"""Shorter vectors, as models trained for it (Matryoshka) mean them: the first numbers, scaled to length 1 again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layertap.models.errors import RequestError
from layertap.models.fingerprint import digest_dimensions
from layertap.service.features import Features


def check_dimensions(dimensions: int, columns: int) -> None:
    """RequestError where vectors have fewer numbers."""
    if dimensions > columns:
        raise RequestError(
            f"'dimensions' is {dimensions}, and the embedding has {columns}",
            hint=f"leave it out, or ask for at most {columns}",
        )


def shorten(features: Features, dimensions: int) -> Features:
    """Features whose only result is (N, dimensions) float32, each row of length 1, or all zeros.

    A fingerprint of its own where that is fewer than the result had.
    """
    ((key, vectors),) = features.arrays.items()
    if dimensions == vectors.shape[1]:
        return features
    shorter = vectors[:, :dimensions]
    lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
    shorter = shorter / np.where(lengths == 0, np.float32(1), lengths)
    return replace(features, arrays={key: shorter}, fingerprint=digest_dimensions(features.fingerprint, dimensions))
