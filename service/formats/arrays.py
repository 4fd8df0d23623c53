"""Arrays as every format takes them: little-endian, in C order, each by a name of its own."""

from __future__ import annotations

import numpy as np

from layertap.models.errors import escape
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features


def to_little_endian(array: Array) -> Array:
    """The array in the byte order and memory order of every format; itself where it is so already."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def name_arrays(features: Features) -> dict[str, Array]:
    """Results and scales together, as ``KEY`` and ``KEY.scale``; NotAcceptableError where two have the same name."""
    scales = {f"{key}.scale": scale for key, scale in features.scales.items()}
    for name in scales.keys() & features.arrays.keys():
        hint = "give one of them another name with `as`, or use application/json"
        raise NotAcceptableError(f"{escape(name)} is a result's name and also that of another's scale", hint=hint)
    return {**features.arrays, **scales}
