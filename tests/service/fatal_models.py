"""Models that can bring a process down. Each class is a ``python:`` factory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

LIMIT = 1000  # the survey's noise is far below


class Doomed(nn.Module):
    """A row's first number, from ``LIMIT`` on, says what breaks for good: ``WAYS`` by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.broken: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        mark = int(x[:, 0].amax())
        if mark >= LIMIT:
            self.broken = list(WAYS.values())[mark - LIMIT]
        self.broken()
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


ROW_S = 0.05


def _device() -> None:
    raise torch.AcceleratorError("CUDA error: secret")


def _model() -> None:
    raise RuntimeError("secret")


def _exit() -> None:
    raise SystemExit(0)


WAYS: dict[str, Callable[[], None]] = {"device": _device, "model": _model, "exit": _exit}


def mark(way: str) -> float:
    """The number that breaks things in a way."""
    return LIMIT + float(list(WAYS).index(way))
