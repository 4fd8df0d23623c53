"""A tensor with its TensorInfo and token mask: all arithmetic of rows, tokens and positions.

Padding never counts in pooling, statistics or edits, which all go through here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import InputError
from layertap.models.points import AXES

Span = tuple[int, int]  # rows from one up to, not including, the other
Position = tuple[int, ...]
POSITION_AXES = {1: "T", 2: "HW"}  # of how many numbers a position is, and the axes that they are along


@dataclass(frozen=True)
class RowTensor:
    """A tensor and what its catalog says of it; every method is differentiable, and gives views where it can.

    ``token_mask`` (rows, tokens), on the host, is False where a token only pads its row; None if nothing is padded.
    """

    value: Tensor
    info: TensorInfo
    token_mask: Tensor | None = None

    @classmethod
    def from_hook(cls, value: Tensor, info: TensorInfo, token_mask: Tensor | None = None) -> RowTensor:
        """A tensor as a hook sees it, with the axis of a single row that a model squeezed, and ``info``'s of heads."""
        axis = info.axis("A") - len(info.shape) + 1 if info.heads_unfolded else 0
        if axis and value.shape[axis:][:1] == (info.size("A") * info.size("C"),):
            value = torch.unflatten(value, axis, (info.size("A"), -1))
        return cls(value.unsqueeze(0) if value.ndim + 1 == len(info.shape) else value, info, token_mask)

    @property
    def rows(self) -> int:
        """How many rows it holds; 1 if it is the same for all rows."""
        axis, entries = self.info.row_axis, self.info.entries_per_row
        return self.value.shape[axis] // entries if axis is not None and entries else 1

    @property
    def is_padded(self) -> bool:
        """Whether it has tokens that only pad their row."""
        return self.token_mask is not None and bool(self.info.token_axes) and not bool(self.token_mask.all())

    def select(self, span: Span) -> RowTensor:
        """Some rows; all of it where it is the same for all rows."""
        start, stop = span
        mask = None if self.token_mask is None else self.token_mask[start:stop]
        if self.info.row_axis is None:
            return RowTensor(self.value, self.info, mask)
        entries = self.info.entries_per_row
        value = self.value.narrow(self.info.row_axis, start * entries, (stop - start) * entries)
        return RowTensor(value, self.info, mask)

    def replace_rows(self, span: Span, replacement: Tensor) -> Tensor:
        """The tensor with the rows of a span replaced."""
        axis, (start, stop) = self.info.row_axis, (each * self.info.entries_per_row for each in span)
        if axis is None or replacement.shape == self.value.shape:
            return replacement
        after = self.value.narrow(axis, stop, self.value.shape[axis] - stop)
        return torch.cat([self.value.narrow(axis, 0, start), replacement, after], dim=axis)

    def index_select(self, indices_by_axis: Mapping[str, Sequence[int]]) -> Tensor:
        """Indices selected along axes, by layout letter; negatives count from the end. InputError: out of range."""
        value = self.value
        for letter, indices in indices_by_axis.items():
            axis = self.info.axis(letter)
            size = value.shape[axis]
            if not all(-size <= index < size for index in indices):
                entries = next((option for option, each in AXES.items() if each == letter), "entries")
                raise InputError(f"an input has {size} {entries}, and not all that are named")
            index = torch.tensor([index % size for index in indices], device=value.device)
            value = value.index_select(axis, index)
        return value

    def strip(self, length: int | None = None) -> Iterator[RowTensor]:
        """Each row without its padding, cut to ``length`` tokens."""
        for number, axes in enumerate(self.list_own_tokens(length)):
            row = self.select((number, number + 1)).value
            for axis, tokens in axes:
                row = row.index_select(axis, tokens.to(row.device))
            yield RowTensor(row, replace(self.info, shape=tuple(row.shape)))

    def list_own_tokens(self, length: int | None = None) -> Iterator[list[tuple[int, Tensor]]]:
        """For each row, its token axes with the indices of those of the first ``length`` tokens that are not padding.

        A tensor that is the same for all rows has the tokens of any of them.
        """
        if self.token_mask is None:
            raise ValueError("nothing tells which tokens are a row's own")
        mask = self.token_mask if self.info.row_axis is not None else self.token_mask.any(0, keepdim=True)
        for tokens in mask[:, :length]:
            yield [(axis, tokens.nonzero().flatten()) for axis in self.info.token_axes]

    def concat(self, rows: Sequence[Tensor]) -> Tensor:
        """Rows, each as ``select`` gives it, as one tensor again."""
        return rows[0] if self.info.row_axis is None else torch.cat(list(rows), dim=self.info.row_axis)

    def group(self) -> Tensor:
        """As (N, entries per row, …)."""
        axis = self.info.row_axis
        first = self.value.unsqueeze(0) if axis is None else self.value.movedim(axis, 0)
        return first.reshape(self.rows, self.info.entries_per_row, *first.shape[1:])

    def positions(self, skip: int = 0, along: str = "C") -> Tensor:
        """As (N, channels, positions): pixels or tokens in order, without the first ``skip``; ``along`` another axis.

        Contiguous: a sum along another axis than the innermost is rounded by how many rows there are beside it.
        """
        letters = (self.info.layout or "").replace("N", "")
        if along not in letters:
            return self.group().flatten(1).unsqueeze(1)
        return self.group().movedim(letters.index(along) + 2, 1).flatten(2)[:, :, skip:].contiguous()

    def at(self, position: Position | None) -> RowTensor:
        """The values at a token or a pixel, without the axes of the position.

        A tensor with no other axis, (rows · classes,), becomes (rows, classes).
        """
        value = self.value
        axes = find_position_axes(self.info, position) if position is not None else None
        for axis, index in sorted(zip(axes or (), position or (), strict=True), reverse=True):
            value = value.select(axis, index)
        value = value.reshape(self.rows, -1) if value.ndim == 1 else value
        return RowTensor(value, describe_position(self.info, position))


def to_floating(value: Tensor) -> Tensor:
    """The same in float32, or float64 if it is that."""
    return value if value.is_floating_point() and value.dtype.itemsize == 8 else value.float()


def is_near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two tensors are the same, floating ones but for a share of the largest number of the first."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    one = to_floating(one)
    other = other.to(one.dtype)
    if torch.equal(one, other):
        return True
    largest = torch.where(one.isfinite(), one.abs(), 0.0).amax()
    return torch.allclose(other, one, rtol=0.0, atol=tolerance * max(float(largest), 1e-6), equal_nan=True)


def find_position_axes(info: TensorInfo, position: Position) -> tuple[int, ...] | None:
    """The axes of a tensor along which a position is; None if it has none of them."""
    layout, letters = info.layout or "", POSITION_AXES[len(position)]
    axes = tuple(layout.find(letter) for letter in letters)
    return None if -1 in axes or info.row_axis in axes else axes


def describe_position(info: TensorInfo, position: Position | None) -> TensorInfo:
    """The description of ``RowTensor.at``'s result."""
    axes = find_position_axes(info, position) if position is not None else None
    if not axes:
        is_flat = len(info.shape) == 1 and info.row_axis == 0
        tokens = tuple(1 for _ in info.token_axes)
        return replace(info, shape=(1, *info.shape), layout="NC", token_axes=tokens) if is_flat else info
    kept = [axis for axis in range(len(info.shape)) if axis not in axes]
    described = replace(
        info,
        shape=tuple(info.shape[axis] for axis in kept),
        layout="".join((info.layout or "")[axis] for axis in kept),
        row_axis=kept.index(info.row_axis) if info.row_axis is not None else None,
        token_axes=tuple(kept.index(axis) for axis in info.token_axes if axis in kept),
    )
    return describe_position(described, None)
