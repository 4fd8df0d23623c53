"""Models of single steps. Each class is a ``python:`` factory."""

from __future__ import annotations

from torch import Tensor, nn


class Passing(nn.Module):
    """Gives what it takes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


class Logarithm(nn.Module):
    """Of 0 it is infinite, of numbers below it is none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()
