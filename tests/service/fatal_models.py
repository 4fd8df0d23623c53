"""Models that can bring a process down. Each class is a ``python:`` factory."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor, nn

from tests.service.nets_http import Log

LIMIT = 1000  # the survey's noise is far below


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
        out: Tensor = self.linear(x)
        return out


class Unreadable(nn.Module):
    """Holds what no fingerprint can read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        nn.init.ones_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.numbers = (number for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Unhurried(nn.Module):
    """Takes a while for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(ROW_S * len(x))
        out: Tensor = self.linear(x)
        return out


ROW_S = 0.02


def _model() -> None:
    raise RuntimeError("/secret/path")


def _exit() -> None:
    raise SystemExit(0)


WAYS: dict[int, Callable[[], None]] = {LIMIT + 1: _model, LIMIT + 2: _exit}
