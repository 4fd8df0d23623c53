"""What a worker and the server tell each other without a message, in memory that both can look at any time.

The worker: which item it decodes, and since when, for when it is dead. The server: whether rows wait for the model.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

RECORD = struct.Struct("=qd")  # the item, and seconds on the clock of time.monotonic, which all processes share
NOTHING = (-1, 0.0)
ROWS_WAIT = struct.Struct("=q")  # behind the record: 1 or 0
CLOSED = (TypeError, ValueError)  # what struct says of memory that is closed


class Progress:
    """What two processes see; whoever has made or received its ``descriptor`` closes it."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, RECORD.size + ROWS_WAIT.size)

    def close(self) -> None:
        """Let go of the memory, and of a descriptor that goes with it; nobody looks at it any more."""
        self._memory.close()

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
        """The item that is being decoded, or was when the process ended, -1 where none is, and since when.

        None is either once this is closed, which another thread than the one that asks may do.
        """
        try:
            number, since = RECORD.unpack_from(self._memory)
        except CLOSED:
            return NOTHING
        return number, since

    @property
    def rows_wait(self) -> bool:
        """Whether rows of the model are in no batch yet, as the server said last."""
        return bool(*ROWS_WAIT.unpack_from(self._memory, RECORD.size))

    @rows_wait.setter
    def rows_wait(self, value: bool) -> None:
        with suppress(*CLOSED):
            ROWS_WAIT.pack_into(self._memory, RECORD.size, value)


def create_progress() -> tuple[Progress, int]:
    """One that is of no item yet, and the descriptor of its memory, which is the caller's to close."""
    descriptor = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, RECORD.pack(*NOTHING) + ROWS_WAIT.pack(0))
        return Progress(descriptor), descriptor
    except BaseException:
        os.close(descriptor)
        raise
