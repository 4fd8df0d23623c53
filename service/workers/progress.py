"""Which item a worker decodes, and since when: in memory that the server can look at once the worker is dead."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

RECORD = struct.Struct("=qd")  # the item, and seconds on the clock of time.monotonic, which all processes share
NOTHING = (-1, 0.0)


class Progress:
    """What two processes see; whoever has made or received its ``descriptor`` closes it."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, RECORD.size)

    @contextmanager
    def decoding(self, number: int) -> Iterator[None]:
        """Say which item it is until the block ends."""
        RECORD.pack_into(self._memory, 0, number, time.monotonic())
        try:
            yield
        finally:
            RECORD.pack_into(self._memory, 0, *NOTHING)

    @property
    def item(self) -> tuple[int, float]:
        """The item that is being decoded, or was when the process ended, -1 where none is, and since when."""
        number, since = RECORD.unpack_from(self._memory)
        return number, since


def create_progress() -> tuple[Progress, int]:
    """One that is of no item yet, and the descriptor of its memory, which is the caller's to close."""
    descriptor = os.memfd_create("layertap", os.MFD_CLOEXEC)
    os.write(descriptor, RECORD.pack(*NOTHING))
    return Progress(descriptor), descriptor
