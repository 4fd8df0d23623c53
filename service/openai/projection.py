"""Shorter vectors: a fixed projection that keeps angles about as they are."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from layertap.models.errors import RequestError, TooLargeError
from layertap.models.fingerprint import digest_projection
from layertap.service.features import Features

MAX_SIGNS = 2**23  # of one projection: as many bytes
MAX_CACHED = 4


def check_dimensions(dimensions: int, columns: int) -> None:
    """RequestError where vectors of so many numbers can't be made that long, TooLargeError where it takes too much."""
    if dimensions > columns:
        raise RequestError(
            f"'dimensions' is {dimensions}, and the embedding has {columns}",
            hint=f"leave it out, or ask for at most {columns}",
        )
    if dimensions < columns and dimensions * columns > MAX_SIGNS:
        most = MAX_SIGNS // columns
        raise TooLargeError(
            f"a projection from {columns} to {dimensions} dimensions is over the limit",
            hint=f"ask for at most {most}, or for a layer with fewer channels" if most else "name another layer",
        )


def shorten(features: Features, dimensions: int) -> Features:
    """Features whose only result has vectors of so many numbers, where that is fewer with another fingerprint."""
    ((key, vectors),) = features.arrays.items()
    if dimensions == vectors.shape[1]:
        return features
    fingerprint = digest_projection(features.fingerprint, dimensions)
    return replace(features, arrays={key: project(vectors, dimensions)}, fingerprint=fingerprint)


def project(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Rows of length 1 as shorter rows of length 1: (N, columns) float32 to (N, dimensions) float32, the caller's own.

    A random projection by signs (Achlioptas, "Database-friendly random projections", 2003): the cosine of two vectors
    changes by about 1 / sqrt(dimensions). The signs are the same on every machine and for ever: SHAKE-128 makes them.
    """
    # In float64: what remains of the order of additions is cut off with the last bits.
    shorter = vectors.astype(np.float64) @ _make_signs(vectors.shape[1], dimensions).astype(np.float64)
    lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    unit: NDArray[np.float32] = (shorter / lengths).astype(np.float32)
    return unit


@lru_cache(maxsize=MAX_CACHED)
def _make_signs(columns: int, dimensions: int) -> NDArray[np.int8]:
    """-1 and 1, (columns, dimensions)."""
    count = columns * dimensions
    data = hashlib.shake_128(f"layertap projection {columns} {dimensions}".encode()).digest(-(-count // 8))
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count)
    return (bits.astype(np.int8) * 2 - 1).reshape(columns, dimensions)
