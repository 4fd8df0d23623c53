"""Sketch: a tensor's numbers in a few, to compare those of two forwards that are never in memory at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from layertap.models.devices.transfer import to_plain, view_bytes

BINS = 16
WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)
MAX_NUMBERS = 2**16  # looked at
MASK_VALUE = 1e30  # larger numbers, infinities and NaN are marks of what to leave out
TOLERANCE_INTEGER = 1e-6
TOLERANCE_FLOAT32 = 5e-3  # rounding makes 1e-6, or 4e-4 where softmax amplifies it
TOLERANCE_HALF = 0.1  # half precision: enough to tell a row from its neighbour


@dataclass(frozen=True)
class Sketch:
    """A tensor in a few numbers: random projections of its parts, its norm, and a sum of all of its bits.

    ``masked`` counts the numbers that are left out: marks of masked entries, infinities and NaN.
    """

    bins: tuple[float, ...]
    norm: float
    tolerance: float
    bits: int = 0
    masked: int = 0

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Sketch:
        """The sketch of a tensor of any dtype; what marks a masked entry counts as zero."""
        plain = to_plain(tensor)
        real = torch.view_as_real(plain) if plain.is_complex() else plain
        # Of a large tensor a number in every so many: as telling, and a survey stays a few forwards long.
        values = real.flatten()[:: 1 + real.numel() // MAX_NUMBERS].to(torch.float32)
        is_number = values.abs() < MASK_VALUE
        values = torch.where(is_number, values, 0.0)
        weights = _make_weights(values.device)[: values.numel()]
        parts = functional.pad(values * weights, (0, -values.numel() % BINS)).view(-1, BINS).sum(0)
        norm = float(values.norm(dtype=torch.float64))
        masked = values.numel() - int(is_number.sum())
        return cls(tuple(parts.tolist()), norm, _get_tolerance(real.dtype), _sum_bits(real), masked)

    def matches(self, other: Sketch) -> bool:
        """Whether both are of the same tensor, but for rounding."""
        limit = other.tolerance * max(other.norm, 1e-6) / BINS**0.5
        return self.masked == other.masked and all(
            abs(a - b) <= limit for a, b in zip(self.bins, other.bins, strict=True)
        )


NO_SKETCH = Sketch((), 0.0, 0.0, masked=-1)  # of numbers that nobody looked at: matches no tensor's


def _sum_bits(tensor: Tensor) -> int:
    """A sum of a tensor's memory, in integers as wide as fit."""
    memory = view_bytes(tensor)
    if memory.storage_offset() % WIDTHS[0].itemsize:  # a wider view must begin at a multiple of its width
        memory = memory.clone()
    width = next(dtype for dtype in WIDTHS if memory.numel() % dtype.itemsize == 0)
    return int(memory.view(width).sum(dtype=torch.int64))


@lru_cache
def _make_weights(device: torch.device) -> Tensor:
    """As many numbers as are looked at, as good as random, and everywhere the same."""
    weights = torch.arange(1, MAX_NUMBERS + 1, device=device, dtype=torch.float32)  # from 1: that of 0 would be 0
    return weights.mul_(12.9898).sin_().mul_(43758.5453).frac_()


def _get_tolerance(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return TOLERANCE_INTEGER
    return TOLERANCE_FLOAT32 if dtype.itemsize >= 4 else TOLERANCE_HALF
