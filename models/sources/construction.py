"""Modules are constructed one at a time in a process: torch has one generator and one default dtype for all threads.

So have libraries: while transformers constructs a module it puts functions of its own in the place of torch's, and of
two that overlap the second would restore those of the first, for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_LOCK = RLock()


@contextmanager
def construct_alone(seed: int | None) -> Iterator[None]:
    """Construct a module inside; no other thread of this process does at the same time.

    Random numbers start at ``seed``, without one where the process's are. They and the default dtype are afterwards
    what they were before. Meanwhile they are the process's: a forward in another thread that draws random numbers
    draws from the same generator.
    """
    # Where CUDA is not in use it stays so.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with _LOCK, torch.random.fork_rng(devices):
        dtype = torch.get_default_dtype()
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
