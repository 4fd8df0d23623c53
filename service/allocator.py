"""What a serving process asks of the allocators: the C library's, and torch's of accelerators."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from layertap.models.devices import transfer
from layertap.models.devices.devices import count_cores

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8  # parameters of glibc's mallopt(3)
MIB = 2**20
MALLOC_PARAMETERS = {
    MMAP_THRESHOLD: 32 * MIB,
    TRIM_THRESHOLD: 512 * MIB,
    TOP_PAD: 16 * MIB,
    # Threads come and go with models, and each takes an arena. glibc has up to 8 a core, and each keeps pages with few
    # blocks in use: tens of MiB after some hundred models.
    ARENA_MAX: max(count_cores(), 2),
}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")  # where the kernel has them


def release_memory() -> None:
    """Release cached memory to the system, for other processes or other uses in this one."""
    transfer.release_memory()  # what else looks at a device, as "device: auto" does, takes that for memory in use
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def keep_large_blocks() -> None:
    """Have memory of activations used again instead of given back: getting it anew costs a fault for each page.

    A forward frees and takes the same few large blocks over and over. Another C library than glibc is left alone. Large
    tensors get huge pages, in which addresses are found sooner; torch reads its setting at its first tensor.
    """
    if not sys.platform.startswith("linux"):
        return
    if HUGE_PAGES.exists():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in MALLOC_PARAMETERS.items():
            mallopt(parameter, value)
