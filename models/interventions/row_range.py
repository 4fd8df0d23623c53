"""The rows of one request that an operation changes, and the tensors that it can make for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from layertap.models.selection.hook_points import TensorData


@dataclass(frozen=True)
class RowRange:
    """Which rows of a request a tensor holds: ``count`` of them from ``first`` on, along ``axis``."""

    axis: int
    first: int
    count: int

    def repeat(self, data: TensorData, like: Tensor) -> Tensor:
        """A tensor from outside, which is one row's, for each row."""
        row = _to_tensor(data).to(like.device, like.dtype)
        if row.ndim < like.ndim:
            row = row.unsqueeze(self.axis)
        return torch.cat([row] * self.count, dim=self.axis)

    def fill(self, like: Tensor, value: float) -> Tensor:
        """One number everywhere."""
        return torch.full_like(like, value)

    def draw_noise(self, like: Tensor, seed: int) -> Tensor:
        """Standard normal numbers, by the seed and each row's own number in its request."""
        shape = list(like.shape)
        shape[self.axis] = shape[self.axis] // self.count
        rows = [_draw_row(shape, seed + self.first + number) for number in range(self.count)]
        noise = torch.cat(rows, dim=self.axis) if prod(shape) else like.new_zeros(like.shape)
        return noise.to(like.device, like.dtype)


def _draw_row(shape: list[int], seed: int) -> Tensor:
    """On the CPU, so that every device gets the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _to_tensor(data: TensorData) -> Tensor:
    return torch.from_numpy(np.frombuffer(data.data, "<f4").reshape(data.shape).astype(np.float32, copy=True))
