"""What one forward shows of a model's calls and tensors: what a catalog says of each, and a sketch of its numbers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from layertap.models.catalog.axes import Axes
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.devices.plain_tensors import to_plain, view_bytes
from layertap.models.hooks.attention import Sinks
from layertap.models.hooks.tensor_tree import Path
from layertap.models.points import Site

Shape = tuple[int, ...]
Address = tuple[nn.Module, int, str]  # of a call: a module, the number of its call, and the function, if it is of one
Place = tuple[Address, Site, Path]  # of a tensor


@dataclass
class Observation:
    """A tensor as one forward showed it; its shape is that of one row.

    ``sketch`` is of the part that belongs to the row that ran alone; ``axes`` are those of ``info``, empty where they
    were not followed. ``value`` is the number of a tensor for as long as nothing writes to it.
    """

    info: TensorInfo
    sketch: Sketch
    axes: Axes = ()
    value: int = -1


@dataclass
class AttentionObservation:
    """Weights as one forward showed them, those of ``sinks`` last, and the tensor that tells where their rows are."""

    info: TensorInfo
    evidence: Observation
    sinks: Sinks


@dataclass(eq=False)
class CallObservation:
    """One call of a module, which began and ended at ``start`` and ``end``, counted from 1.

    ``refused`` has the tensors without plain memory, by path and kind. ``attention`` is written down when the call
    ends; it is partial where some of its weights do not stand as (heads, queries, keys). ``functions`` has the calls of
    functions by name and number. ``is_view``: some of what it returned lies in the memory of what it took, to which it
    does not write.
    """

    address: Address
    start: float
    end: float = -1
    tensors: dict[Site, dict[Path, Observation]] = field(default_factory=lambda: defaultdict(dict))
    refused: dict[Site, tuple[tuple[Path, str], ...]] = field(default_factory=dict)
    attention: list[AttentionObservation] = field(default_factory=list)
    has_partial_attention: bool = False
    functions: dict[str, CallObservation] = field(default_factory=dict)
    is_view: bool = False

    def contains(self, other: CallObservation) -> bool:
        """Whether the other call is a part of this one."""
        return self.start < other.start and other.end < self.end

    def reads(self, value: int) -> bool:
        """Whether the call computes from a value: it neither returns it unchanged nor only reads its size."""
        function = self.address[2]
        asks = function and (not self.tensors["output"] or "_like#" in function or function.startswith("new_"))
        return not asks and not any(each.value == value for each in self.tensors["output"].values())

    def describe_tensors(self) -> tuple[set[Path], set[Path], int]:
        """For what kind of value it was called, what it returned, and how often it attended."""
        return set(self.tensors["input"]), set(self.tensors["output"]), len(self.attention)


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
        is_near = all(abs(a - b) <= limit for a, b in zip(self.bins, other.bins, strict=True))
        return is_near and self.masked == other.masked


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
