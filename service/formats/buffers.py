"""An encoded reply: buffers that follow each other, those of arrays being their own memory, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from layertap.models.errors import escape
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features
from layertap.service.pictures.overlay import SentPicture
from layertap.service.types import TILES

Buffer = bytes | memoryview
Buffers = list[Buffer]
Encoding = Literal["list", "base64"]


@dataclass(frozen=True)
class EncodeOptions:
    """What a request says of the reply's form: each format looks at what concerns it.

    ``encoding`` is for JSON, ``tiles`` for pictures, and so are ``sent``: what the rows are pictures of, row by row,
    None for a row that was sent as an array; empty where that is not known.
    """

    encoding: Encoding = "list"
    tiles: int = TILES
    sent: Sequence[SentPicture | None] = ()


def view_bytes(array: Array) -> memoryview:
    """The bytes of an array that is in C order; they keep it in memory."""
    return array.reshape(-1).view(np.uint8).data


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
