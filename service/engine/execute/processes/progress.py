"""State that a worker and the server share through mapped memory.

From the worker, readable even after its death: the item being decoded, and since when. From the
server: whether rows wait for the model.
"""

from __future__ import annotations

import mmap
import os
from ctypes import Structure, c_bool, c_double, c_int64, sizeof

NO_ITEM = -1


class Progress(Structure):
    """The shared state, as plain numbers.

    ``item``: the number of the item being decoded, also when the process ended; -1 if there is none; ``since``: when it
    began, on the clock of ``time.monotonic``, which all processes share. ``taken``: how many messages the worker has
    received. ``hooks``: ours that were on the model when they were last counted, after a message: 0. ``rows_wait``:
    whether rows of the model wait that are in no batch yet.
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


def map_progress(descriptor: int) -> Progress:
    """The progress in the memory of a descriptor, which the caller closes."""
    return Progress.from_buffer(mmap.mmap(descriptor, sizeof(Progress)))


def create_progress() -> tuple[Progress, int]:
    """A progress without an item, and the descriptor of its memory, which the caller closes."""
    descriptor = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, bytes(Progress(NO_ITEM)))
        return map_progress(descriptor), descriptor
    except BaseException:
        os.close(descriptor)
        raise
