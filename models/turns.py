"""Turns of models that load in this process and its hosts: they are built side by side, and measured one at a time.

What a forward takes decides how rows are scheduled: two models that are measured at once would take each other's time
for their own. Building may last as long as a download, or a compiler: others do not wait for that.

Only modules themselves are constructed one at a time in a process: torch has one generator and one default dtype for
all threads. So have libraries: while transformers constructs a module it replaces functions of torch by its own, and of
two that overlap the second would restore those of the first, for good.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, RLock

import torch

TURN_TIMEOUT_S = 30.0  # a model that is measured before may hang
BUILD_WAIT_S = 2.0  # most models are built in less, and take whole cores for it


class Turns:
    """Who builds and who measures now; any thread may ask."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._builds: dict[object, float] = {}  # since when
        self._measuring = False

    @contextmanager
    def build(self) -> Iterator[None]:
        """Build a model, without waiting; others measure nothing in its first ``BUILD_WAIT_S``."""
        build = object()
        with self._changed:
            self._builds[build] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del self._builds[build]
                self._changed.notify_all()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure a model: wait for others that do, and for young builds, but not long."""
        deadline = time.monotonic() + TURN_TIMEOUT_S
        with self._changed:
            while (wait := self._estimate_wait()) > 0 and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(wait, left))
            has_turn = not self._measuring
            self._measuring = True
        try:
            yield
        finally:
            if has_turn:  # else the one that has it gives it back
                with self._changed:
                    self._measuring = False
                    self._changed.notify_all()

    def _estimate_wait(self) -> float:
        """Estimated seconds until a turn may begin; 0 where it may now."""
        if self._measuring:
            return TURN_TIMEOUT_S
        youngest = max(self._builds.values(), default=0.0)
        return max(youngest + BUILD_WAIT_S - time.monotonic(), 0.0) if self._builds else 0.0


_TURNS = Turns()
_CONSTRUCTION = RLock()
build_beside = _TURNS.build
take_turn = _TURNS.measure


@contextmanager
def construct_alone(seed: int | None) -> Iterator[None]:
    """Construct a module inside; no other thread of this process does at the same time.

    Random numbers start at ``seed``, without one where the process's are. They and the default dtype are afterwards
    what they were before. Meanwhile they are the process's: a forward in another thread that draws random numbers
    draws from the same generator.
    """
    # Where CUDA is not in use it stays so.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with _CONSTRUCTION, torch.random.fork_rng(devices):
        dtype = torch.get_default_dtype()
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
