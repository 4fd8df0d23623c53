"""Turns of models that load in this process and its hosts: they are built and measured beside each other.

Measured times decide how rows are scheduled, and two models measured at once would slow each other down. So a
measurement waits for what began a short time ago: most models are built and measured by then. It does not wait for a
model that takes long to build, to download or to measure.

Only module construction is serial within a process: torch has one generator and one default dtype for all threads.
Libraries have global state, too: while transformers constructs a module it replaces functions of torch, and of two
overlapping constructions the second would restore the first one's replacements, for good.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition, RLock

import torch

TURN_TIMEOUT_S = 30.0  # in which others may begin all the time; the model that runs may hang
HEAD_START_S = 2.0  # most models are built in less, at full CPU load


class Turns:
    """The builds and measurements in progress; any thread may call the methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = Condition()
        self._begun: dict[object, float] = {}  # when each began

    @contextmanager
    def build(self) -> Iterator[None]:
        """Build a model inside, without waiting; no measurement starts in its first ``HEAD_START_S``."""
        build = object()
        with self._changed:
            self._begun[build] = self._clock()
        try:
            yield
        finally:
            with self._changed:
                del self._begun[build]
                self._changed.notify_all()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure a model inside, after a bounded wait for recently started builds and measurements."""
        deadline = self._clock() + TURN_TIMEOUT_S
        with ExitStack() as stack:
            with self._changed:
                while (wait := min(deadline, self._find_end()) - self._clock()) > 0:
                    self._changed.wait(wait)
                stack.enter_context(self.build())
            yield

    def _find_end(self) -> float:
        """When the head start of everything in progress ends."""
        return max(self._begun.values(), default=-math.inf) + HEAD_START_S


_TURNS = Turns()
_CONSTRUCTION = RLock()
_DRAWS = RLock()
_DEFAULT_DTYPE = torch.get_default_dtype()  # of the process: constructions and forwards change it for a while
build_beside = _TURNS.build
take_turn = _TURNS.measure


@contextmanager
def block_construction() -> Iterator[None]:
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
    kind = torch.accelerator.current_accelerator() or torch.device("cuda")
    module = torch.get_device_module(kind)
    # An accelerator that is not in use yet stays so: after its initialisation no fork could use it.
    devices = range(module.device_count() if getattr(module, "is_initialized", module.is_available)() else 0)
    with _CONSTRUCTION, block_construction(), torch.random.fork_rng(devices, device_type=kind.type):
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
