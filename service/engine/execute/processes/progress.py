"""What a worker and the server tell each other without a message, in memory that both can look at any time.

The worker, also once it is dead: which item it decoded, and since when, and what had gone wrong in its batch. The
server: whether rows wait for the model.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from layertap.service.engine.batch import BatchFailures

DECODING = struct.Struct("=qd")  # the item, and seconds on the clock of time.monotonic, which all processes share
NOTHING = (-1, 0.0)
COUNTS = struct.Struct("=qqqqq")  # the failures of a batch; of rows that were too many 0 where none were; hooks
TAKEN = struct.Struct("=q")
TAKEN_AT = DECODING.size + COUNTS.size
ROWS_WAIT = struct.Struct("=q")  # 1 or 0
ROWS_WAIT_AT = TAKEN_AT + TAKEN.size
SIZE = ROWS_WAIT_AT + ROWS_WAIT.size


class Progress:
    """What two processes see; whoever has created or received its ``descriptor`` closes it."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)

    def close(self) -> None:
        """Let go of the memory; nobody looks at it any more."""
        self._memory.close()

    @contextmanager
    def decoding(self, number: int) -> Iterator[None]:
        """Say which item is decoded until the block ends."""
        DECODING.pack_into(self._memory, 0, number, time.monotonic())
        try:
            yield
        finally:
            DECODING.pack_into(self._memory, 0, *NOTHING)

    @property
    def item(self) -> tuple[int, float]:
        """The item that is being decoded, or was when the process ended, -1 where none is, and since when."""
        number, since = DECODING.unpack_from(self._memory)
        return number, since

    @property
    def taken(self) -> int:
        """How many messages the worker has taken."""
        taken: int = TAKEN.unpack_from(self._memory, TAKEN_AT)[0]
        return taken

    def note_taken(self) -> None:
        """Say that the worker has taken one more message."""
        TAKEN.pack_into(self._memory, TAKEN_AT, self.taken + 1)

    def note_failures(self, failures: BatchFailures) -> None:
        """Say what has gone wrong in the batch that runs."""
        counts = failures.out_of_memory, failures.memory_splits, failures.error_splits, failures.too_many_rows or 0
        COUNTS.pack_into(self._memory, DECODING.size, *counts, self.hooks)

    @property
    def failures(self) -> BatchFailures:
        """What has gone wrong in the batch that runs, or ran last."""
        out_of_memory, memory_splits, error_splits, too_many_rows, _ = COUNTS.unpack_from(self._memory, DECODING.size)
        return BatchFailures(out_of_memory, memory_splits, error_splits, too_many_rows or None)

    @property
    def hooks(self) -> int:
        """Hooks of ours that were on the model after its last batch: 0."""
        hooks: int = COUNTS.unpack_from(self._memory, DECODING.size)[-1]
        return hooks

    @hooks.setter
    def hooks(self, count: int) -> None:
        values = COUNTS.unpack_from(self._memory, DECODING.size)
        COUNTS.pack_into(self._memory, DECODING.size, *values[:-1], count)

    @property
    def rows_wait(self) -> bool:
        """Whether rows of the model are in no batch yet, as the server said last."""
        return bool(*ROWS_WAIT.unpack_from(self._memory, ROWS_WAIT_AT))

    @rows_wait.setter
    def rows_wait(self, value: bool) -> None:
        ROWS_WAIT.pack_into(self._memory, ROWS_WAIT_AT, value)


def create_progress() -> tuple[Progress, int]:
    """One that is of no item yet, and the descriptor of its memory, which is the caller's to close."""
    descriptor = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, DECODING.pack(*NOTHING) + bytes(SIZE - DECODING.size))
        return Progress(descriptor), descriptor
    except BaseException:
        os.close(descriptor)
        raise
