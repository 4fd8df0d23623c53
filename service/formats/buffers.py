"""An encoded reply: a sequence of buffers; those of arrays are views, not copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from layertap.models.errors import escape
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features
from layertap.service.formats.sparse import SparseRows
from layertap.service.pictures.overlay import SentPicture
from layertap.service.types import TILES

Buffer = bytes | memoryview
Buffers = list[Buffer]
Encoding = Literal["list", "base64", "sparse"]
Coding = Literal["bytes", "list", "base64", "sparse"]  # of a result: the array's own bytes, or text
SMALL = 2**16  # bytes that are copied in less time than another call of the system takes


@dataclass(frozen=True)
class EncodeOptions:
    """A request's options for the reply; each format uses its own."""

    encoding: Encoding = "list"  # of JSON; "sparse": of all formats that hold several arrays
    tiles: int = TILES  # of each result in a drawing
    max_numbers: int | None = None  # in lists of JSON whose lengths are not known before; None: any
    originals: Sequence[SentPicture | None] = ()  # of a drawing, by row: None for an array; (): unknown


def view_bytes(array: Array) -> memoryview:
    """The bytes of an array in C order; the view keeps the array alive."""
    return array.reshape(-1).view(np.uint8).data


def to_little_endian(array: Array) -> Array:
    """The array in little-endian and C order, as all formats need it; unchanged if it already is."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def name_arrays(features: Features, encoding: Encoding = "list") -> dict[str, Array]:
    """Results and scales together, as ``KEY`` and ``KEY.scale``; sparse ones as ``SparseRows.name_arrays``.

    NotAcceptableError if two have the same name, or one can't be sparse.
    """
    scales = {f"{key}.scale": scale for key, scale in features.scales.items()}
    parts = [features.arrays, scales]
    if encoding == "sparse":
        parts = [SparseRows.from_array(key, array).name_arrays(key) for key, array in features.arrays.items()]
        parts.append(scales)
    named = {name: array for part in parts for name, array in part.items()}
    if len(named) < sum(map(len, parts)):
        name = next(name for name in named if sum(name in part for part in parts) > 1)
        hint = "give one of them another name with `as`, or use application/json"
        raise NotAcceptableError(f"{escape(name)} is a result's name and also that of a part of another", hint=hint)
    return named
