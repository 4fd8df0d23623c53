"""Which item a worker decodes: in memory that the server can look at once the worker is dead."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

NUMBER = struct.Struct("=q")
NOTHING = -1


class Progress:
    """A number that two processes see; whoever has one made or received its ``descriptor`` closes it."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, NUMBER.size)

    @contextmanager
    def decoding(self, number: int) -> Iterator[None]:
        """Say which item it is until the block ends."""
        NUMBER.pack_into(self._memory, 0, number)
        try:
            yield
        finally:
            NUMBER.pack_into(self._memory, 0, NOTHING)

    @property
    def number(self) -> int:
        """The item that is being decoded, or was when the process ended; -1 where none is."""
        found: int = NUMBER.unpack_from(self._memory)[0]
        return found


def create_progress() -> tuple[Progress, int]:
    """A number that is nothing yet, and the descriptor of its memory, which is the caller's to close."""
    descriptor = os.memfd_create("layertap", os.MFD_CLOEXEC)
    os.write(descriptor, NUMBER.pack(NOTHING))
    return Progress(descriptor), descriptor
