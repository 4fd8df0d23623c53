"""State that a worker and the server share through mapped memory.

The worker, also once it is dead: which item it decoded, and since when, and what had gone wrong in its batch. The
server: whether rows wait for the model.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Array, Structure, c_bool, c_double, c_int64, sizeof
from dataclasses import astuple, fields

from layertap.service.engine.batch import BatchFailures

NOTHING = -1


class Progress(Structure):
    """What two processes see, as plain numbers.

    ``item``: the number of the one that is being decoded, or was when the process ended, -1 where none is; ``since``
    when, on the clock of ``time.monotonic``, which all processes share. ``taken``: how many messages the worker has
    taken. ``hooks`` of ours that were on the model after its last batch: 0. ``rows_wait``: whether rows of the model
    are in no batch yet, as the server said last.
    """

    item: int
    since: float
    taken: int
    hooks: int
    rows_wait: bool
    _failures: Array[c_int64]  # 0 for no number
    _fields_ = (
        ("item", c_int64),
        ("since", c_double),
        ("taken", c_int64),
        ("hooks", c_int64),
        ("rows_wait", c_bool),
        ("_failures", c_int64 * len(fields(BatchFailures))),
    )

    @contextmanager
    def decoding(self, number: int) -> Iterator[None]:
        """Say which item is decoded until the block ends."""
        self.since, self.item = time.monotonic(), number
        try:
            yield
        finally:
            self.item = NOTHING

    @property
    def failures(self) -> BatchFailures:
        """What has gone wrong in the batch that runs, or ran last."""
        out_of_memory, memory_splits, error_splits, too_many_rows = self._failures
        return BatchFailures(out_of_memory, memory_splits, error_splits, too_many_rows or None)

    def note_failures(self, failures: BatchFailures) -> None:
        """Say what has gone wrong in the batch that runs."""
        self._failures[:] = [count or 0 for count in astuple(failures)]


def map_progress(descriptor: int) -> Progress:
    """One in the memory of a descriptor, which the caller closes."""
    return Progress.from_buffer(mmap.mmap(descriptor, sizeof(Progress)))


def create_progress() -> tuple[Progress, int]:
    """One that is of no item yet, and the descriptor of its memory, which is the caller's to close."""
    descriptor = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, bytes(Progress(NOTHING)))
        return map_progress(descriptor), descriptor
    except BaseException:
        os.close(descriptor)
        raise
