"""Modules are constructed from a seed one at a time: torch has one generator and one default dtype for all threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

import torch

_DTYPE = torch.get_default_dtype()


class _Constructions:
    """Those of this process: one from a seed alone, others beside each other, as whatever they draw is replaced."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._seeded = 0
        self._others = 0

    @contextmanager
    def join(self, *, seeded: bool) -> Iterator[None]:
        """Wait until this one may begin, and let others wait until it ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._seeded and not (seeded and self._others))
            self._count(seeded, 1)
        try:
            yield
        finally:
            with self._changed:
                self._count(seeded, -1)
                self._changed.notify_all()

    def _count(self, seeded: bool, step: int) -> None:
        self._seeded += step * seeded
        self._others += step * (not seeded)


_CONSTRUCTIONS = _Constructions()


@contextmanager
def constructing(seed: int | None) -> Iterator[None]:
    """Construct a module inside: random numbers start at ``seed``, without one where the process's are.

    They and the default dtype are afterwards what they were before. With a seed no other thread of this process
    constructs at the same time; without one it is not to matter what is drawn. Not to be nested.
    """
    # Where CUDA is not in use it stays so.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with _CONSTRUCTIONS.join(seeded=seed is not None), torch.random.fork_rng(devices):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(_DTYPE)
