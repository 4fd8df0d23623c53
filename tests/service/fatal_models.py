"""Models that can bring a process down. Each class is a ``python:`` factory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

from torch import Tensor, nn

from tests.service.nets_http import Log

LIMIT = 1000  # the survey's noise is far below
KILLS = range(1, 10)


class Doomed(nn.Module):
    """A row's first number, if ``WAYS`` has it, says what breaks for good."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.broken = Log()

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[:, 0].amax())
        if number in WAYS:
            self.broken.append(WAYS[number])
        for breaks in self.broken[-1:]:
            breaks()
        return self.linear(x)


class Killed(nn.Module):
    """Its process is killed as often as a row's first number is above the limit; a file has a byte for each forward."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        times = int(x[:, 0].amax()) - LIMIT
        if times in KILLS:
            with Path(self.path).open("ab", buffering=0) as file:
                file.write(b".")
                if file.tell() <= times:
                    os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x)


class Refused(nn.Module):
    """Does not load: its forward raises. ``made`` knows the modules that are still in memory."""

    made: ClassVar[WeakSet[Refused]] = WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.made.add(self)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("never")


class Unreadable(nn.Module):
    """Holds what no fingerprint can read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        nn.init.ones_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.numbers = (number for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Unhurried(nn.Module):
    """Takes a while for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(ROW_S * len(x))
        return self.linear(x)


ROW_S = 0.02


def _model() -> None:
    raise RuntimeError("/secret/path")


def _exit() -> None:
    raise SystemExit(0)


def _abort() -> None:
    os._exit(3)


WAYS: dict[int, Callable[[], None]] = {LIMIT + 1: _model, LIMIT + 2: _exit, LIMIT + 3: _abort}
