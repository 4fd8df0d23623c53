"""An encoded reply: buffers that follow each other, those of arrays being their own memory, without a copy."""

from __future__ import annotations

import numpy as np

from layertap.service.features import Array

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
