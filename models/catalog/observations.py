"""What one forward shows of a model's calls and tensors, as a survey writes it down."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from layertap.models.catalog.layout import UNKNOWN
from layertap.models.hooks.attention import Sinks
from layertap.models.hooks.tensor_tree import Path, to_plain

Boundary = Literal["input", "output", "functions"]  # of a call


@dataclass
class TensorObservation:
    """A tensor as one forward showed it; ``sketch`` is of the part that belongs to the row that ran alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sketch: Sketch
    row_axis: int | None
    crosses_rows: bool
    layout: str | None = None


@dataclass
class AttentionObservation:
    """Attention as one forward showed it: the weights, and the tensor that tells where their rows are.

    The weights' last keys are ``sinks``, in the shape too.
    """

    weights: TensorObservation
    evidence: TensorObservation
    source: str
    sinks: Sinks

    def select(self, *, of_sinks: bool = False) -> TensorObservation:
        """The weights of keys, or those of sinks."""
        *outer, keys = self.weights.shape
        return replace(self.weights, shape=(*outer, self.sinks.count if of_sinks else keys - self.sinks.count))


@dataclass
class CallObservation:
    """One call of a module, which began and ended at ``start`` and ``end``, counted from 1.

    The tensors without plain memory are in ``inputs_refused`` and ``outputs_refused``, by path and kind. Its attention
    is partial where some of its weights do not stand as (heads, queries, keys).
    """

    start: int
    end: int = -1
    input: dict[Path, TensorObservation] = field(default_factory=dict)
    output: dict[Path, TensorObservation] = field(default_factory=dict)
    inputs_refused: tuple[tuple[Path, str], ...] = ()
    outputs_refused: tuple[tuple[Path, str], ...] = ()
    attention: list[AttentionObservation] = field(default_factory=list)
    has_partial_attention: bool = False
    functions: dict[Path, TensorObservation] = field(default_factory=dict)

    def at(self, boundary: Boundary) -> dict[Path, TensorObservation]:
        """The tensors that it took or returned, or that the functions did that it called."""
        return {"input": self.input, "output": self.output, "functions": self.functions}[boundary]


@dataclass
class TensorHistory:
    """Every observation of one tensor: what a module's type tells about its layout holds for all of them."""

    reference: weakref.ref[Tensor]
    shape: torch.Size  # an in-place squeeze makes the same object another tensor
    certain: bool = False
    layout: str | None = None
    observations: list[TensorObservation] = field(default_factory=list)

    def settle(self, layout: str | None) -> None:
        """A module's type tells the layout, that it is unknown, or nothing; the first layout is believed."""
        if layout is None or (self.certain and self.layout is not None):
            return
        self.certain, self.layout = True, None if layout == UNKNOWN else layout
        for observation in self.observations:
            observation.layout = self.layout

    def add(self, observation: TensorObservation, guess: str | None) -> None:
        """The tensor is observed again; only the first guess counts, where nothing is certain."""
        if not self.certain and not self.observations:
            self.layout = guess
        observation.layout = self.layout
        self.observations.append(observation)


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
