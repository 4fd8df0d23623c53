"""Threads on the cores of a simulated processor: where more want to run than there are cores, all run slower."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

ROUNDING_S = 1e-12


@dataclass(eq=False)
class Computation:
    """What a thread computes: the seconds that are left of it while its cores are its own, and what follows its end."""

    seconds: float
    cores: int
    on_end: Callable[[], None]


class Processor:
    """Some cores, shared evenly."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._wanted_cores = 0
        self._running: list[Computation] = []

    @property
    def speed(self) -> float:
        """How quick everything is that runs: 1 where nothing has to share a core."""
        return min(1.0, self._cores / max(self._wanted_cores, 1))

    @property
    def seconds_to_next_end(self) -> float:
        """Until something ends; infinite where nothing runs."""
        return min((work.seconds for work in self._running), default=math.inf) / self.speed

    def run(self, seconds: float, on_end: Callable[[], None], cores: int = 1) -> None:
        """Begin to compute something."""
        self._running.append(Computation(seconds, cores, on_end))
        self._wanted_cores += cores

    def advance(self, seconds: float) -> None:
        """Let time pass, no longer than until the next end, and call what follows."""
        computed = seconds * self.speed
        for work in self._running:
            work.seconds -= computed
        ended = [work for work in self._running if work.seconds <= ROUNDING_S]
        self._running = [work for work in self._running if work.seconds > ROUNDING_S]
        self._wanted_cores -= sum(work.cores for work in ended)
        for work in ended:
            work.on_end()
