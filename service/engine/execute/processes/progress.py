"""State that a worker and the server share through mapped memory.

From the worker, readable even after its death: the item being decoded, and since when. From the
server: whether rows wait for the model.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, c_bool, c_double, c_int64, sizeof

NOTHING = -1


class Progress(Structure):
    """The shared state, as plain numbers.

    ``item``: the number of the item being decoded, also when the process ended; -1 if there is none; ``since``: when it
    began, on the clock of ``time.monotonic``, which all processes share. ``taken``: how many messages the worker has
    received. ``hooks``: ours that are on the model after its last batch: 0. ``rows_wait``: whether rows of the model
    wait that are in no batch yet.
    """

    item: int
    since: float
    taken: int
    hooks: int
    rows_wait: bool
    _fields_ = (
        ("item", c_int64),
        ("since", c_double),
        ("taken", c_int64),
        ("hooks", c_int64),
        ("rows_wait", c_bool),
    )

    @contextmanager
    def decoding(self, number: int) -> Iterator[None]:
        """Note the item that the block decodes."""
        self.since, self.item = time.monotonic(), number
        try:
            yield
        finally:
            self.item = NOTHING


def map_progress(descriptor: int) -> Progress:
    """The progress in the memory of a descriptor, which the caller closes."""
    return Progress.from_buffer(mmap.mmap(descriptor, sizeof(Progress)))


def create_progress() -> tuple[Progress, int]:
    """A progress without an item, and the descriptor of its memory, which the caller closes."""
    descriptor = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, bytes(Progress(NOTHING)))
        return map_progress(descriptor), descriptor
    except BaseException:
        os.close(descriptor)
        raise
