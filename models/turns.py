"""Turns of models that load in this process and its hosts: they are built concurrently, and measured one at a time.

Measured times decide how rows are scheduled, and two models measured at once would slow each other down. Building may
last as long as a download, or a compilation: other models do not wait for it.

Only module construction is serial within a process: torch has one generator and one default dtype for all threads.
Libraries have global state, too: while transformers constructs a module it replaces functions of torch, and of two
overlapping constructions the second would restore the first one's replacements, for good.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, RLock

import torch

TURN_TIMEOUT_S = 30.0  # the model that is being measured may hang
BUILD_WAIT_S = 2.0  # most models are built in less, at full CPU load


class Turns:
    """The builds and the measurement in progress; any thread may call the methods."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._builds: dict[object, float] = {}  # start times
        self._measuring = False

    @contextmanager
    def build(self) -> Iterator[None]:
        """Build a model inside, without waiting; no measurement starts in its first ``BUILD_WAIT_S``."""
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
        """Measure a model inside, after a bounded wait for other measurements and recently started builds."""
        deadline = time.monotonic() + TURN_TIMEOUT_S
        with self._changed:
            while (wait := self._estimate_wait()) > 0 and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(wait, left))
            has_turn = not self._measuring
            self._measuring = True
        try:
            yield
        finally:
            if has_turn:  # else the turn is another's to give back
                with self._changed:
                    self._measuring = False
                    self._changed.notify_all()

    def _estimate_wait(self) -> float:
        """Estimated seconds until a turn may begin; 0 if it may now."""
        if self._measuring:
            return TURN_TIMEOUT_S
        youngest = max(self._builds.values(), default=0.0)
        return max(youngest + BUILD_WAIT_S - time.monotonic(), 0.0) if self._builds else 0.0


_TURNS = Turns()
_CONSTRUCTION = RLock()
_DRAWS = RLock()
_DEFAULT_DTYPE = torch.get_default_dtype()  # of the process: constructions and forwards change it for a while
build_beside = _TURNS.build
take_turn = _TURNS.measure


@contextmanager
def draw_alone() -> Iterator[None]:
    """Run a model inside while no other thread constructs one, which would set the generator to a state that recurs.

    Waits at most ``TURN_TIMEOUT_S``: a model that runs may hang.
    """
    is_alone = _DRAWS.acquire(timeout=TURN_TIMEOUT_S)
    try:
        yield
    finally:
        if is_alone:
            _DRAWS.release()


@contextmanager
def construct_alone(seed: int | None) -> Iterator[None]:
    """Construct a module inside, while no other thread of this process does.

    The generator is seeded with ``seed``, if given. Its state and the default dtype are restored afterwards.
    Both are global: a forward in another thread that draws random numbers meanwhile draws from the same
    generator.
    """
    # Do not initialise CUDA.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with _CONSTRUCTION, draw_alone(), torch.random.fork_rng(devices):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(_DEFAULT_DTYPE)


def has_default_dtype() -> bool:
    """Whether the process's default dtype is its own, which no construction or forward has changed for a while."""
    return torch.get_default_dtype() is _DEFAULT_DTYPE


def restore_default_dtype() -> None:
    """Set the process's default dtype back if a forward has changed it, unless a module is being constructed."""
    if not has_default_dtype() and _CONSTRUCTION.acquire(blocking=False):
        try:
            torch.set_default_dtype(_DEFAULT_DTYPE)
        finally:
            _CONSTRUCTION.release()
