"""An encoded reply: buffers that follow each other, those of arrays being their own memory, without a copy."""

from __future__ import annotations

import numpy as np

from layertap.models.errors import escape
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features

Buffer = bytes | memoryview
Buffers = list[Buffer]


def view_bytes(array: Array) -> memoryview:
    """The bytes of an array that is in C order; they keep it in memory."""
    return array.reshape(-1).view(np.uint8).data


class BufferFile:
    """A file to be written whose content stays in the buffers that were written, none of them copied.

    Where something is written at a place where something was before, it has the same length and replaces it.
    """

    closed = False

    def __init__(self) -> None:
        self._buffers: dict[int, Buffer] = {}  # by their places
        self._place = 0

    @property
    def buffers(self) -> Buffers:
        """What was written, in the order of places."""
        return list(self._buffers.values())

    def write(self, data: Buffer) -> int:
        """Keep the bytes of a buffer, which must not change any more."""
        data = data if isinstance(data, bytes) else memoryview(data)
        size = len(data)
        if size:
            self._buffers[self._place] = data
            self._place += size
        return size

    def tell(self) -> int:
        """Where the next buffer goes."""
        return self._place

    def seek(self, place: int) -> int:
        """Go to a place, counted from the beginning."""
        self._place = place
        return place

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is to be closed."""


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
