"""Tensors compared without being kept: a few numbers each, alike where the tensors are the same but for rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from layertap.models.plain_tensor import to_plain

BINS = 16
MAX_NUMBERS = 2**16  # looked at
MASK_VALUE = 1e30  # larger numbers, infinities and NaN are marks of what to leave out
TOLERANCE_INTEGER = 1e-6
TOLERANCE_FLOAT32 = 5e-3  # rounding makes 1e-6, or 4e-4 where softmax amplifies it
TOLERANCE_HALF = 0.1  # half precision: enough to tell a row from its neighbour


@dataclass(frozen=True)
class Sketch:
    """A tensor in a few numbers: random projections of its parts, and its norm."""

    bins: tuple[float, ...]
    norm: float
    tolerance: float

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Sketch:
        """The sketch of a tensor of any dtype; what marks a masked entry counts as zero."""
        plain = to_plain(tensor)
        real = torch.view_as_real(plain) if plain.is_complex() else plain
        # Of a large tensor a number in every so many: as telling, and a survey stays a few forwards long.
        values = real.flatten()[:: 1 + real.numel() // MAX_NUMBERS].to(torch.float32)
        values = torch.where(values.abs() < MASK_VALUE, values, 0.0)
        weights = torch.arange(values.numel(), device=values.device, dtype=torch.float32)
        weights = weights.mul_(12.9898).sin_().mul_(43758.5453).frac_()  # as good as random, and everywhere the same
        parts = functional.pad(values * weights, (0, -values.numel() % BINS)).view(-1, BINS).sum(0)
        return cls(tuple(parts.tolist()), float(values.norm(dtype=torch.float64)), _get_tolerance(real.dtype))

    def matches(self, other: Sketch) -> bool:
        """Whether both are of the same tensor, but for rounding."""
        limit = other.tolerance * max(other.norm, 1e-6) / BINS**0.5
        return all(abs(a - b) <= limit for a, b in zip(self.bins, other.bins, strict=True))


def _get_tolerance(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return TOLERANCE_INTEGER
    return TOLERANCE_FLOAT32 if dtype.itemsize >= 4 else TOLERANCE_HALF
