"""What changes a value in flight: an operation on the named part of one request's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.padding import find_own_positions, is_padded, select_row
from layertap.models.selection.hook_points import Operation, TensorData


def apply_operation(rows: Tensor, leaf: TensorInfo, how: Operation, first: int, real: Tensor | None = None) -> Tensor:
    """A request's rows of a tensor after an operation, in memory of their own; differentiable.

    ``rows`` is the part of a leaf's tensor that holds them, the first of them being row ``first`` of its request: noise
    is drawn row by row, from the seed and the row's number, so that it does not hang on how rows are batched.
    ``real`` (rows, tokens) is False where a token only pads its row: nothing is changed there.
    """
    if real is None or not is_padded(leaf, real):
        where = RowRange(leaf.row_axis or 0, first, count_rows(rows, leaf))
        return _change_part(rows, list(_find_indices(leaf, how)), lambda part: OPERATIONS[how.op](part, how, where))
    done = []
    for place, positions in enumerate(find_own_positions(leaf, real)):
        own = leaf.with_length(len(positions[0][1]))
        change = partial(apply_operation, leaf=own, how=how, first=first + place)
        done.append(_change_part(select_row(rows, leaf, place), positions, change))
    return torch.cat(done, dim=leaf.row_axis or 0)


def _change_part(
    value: Tensor, chosen: Sequence[tuple[int, Sequence[int] | Tensor]], change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Change what lies at chosen indices of chosen axes."""
    if not chosen:
        return change(value)
    (axis, indices), *rest = chosen
    index = torch.as_tensor(indices, device=value.device)
    return value.index_copy(axis, index, _change_part(value.index_select(axis, index), rest, change))


def _find_indices(leaf: TensorInfo, how: Operation) -> Iterator[tuple[int, Sequence[int]]]:
    """Axes of a leaf that are narrowed, and to which indices."""
    top, left, bottom, right = how.region or (0, 0, 0, 0)
    ranges = {"H": range(top, bottom), "W": range(left, right)} if how.region is not None else {}
    for letter, indices in ({"C": how.channels, "T": how.tokens} | ranges).items():
        if indices is not None:
            yield (leaf.layout or "").index(letter), indices


def compute_part_shape(leaf: TensorInfo, how: Operation) -> tuple[int, ...]:
    """The shape of the part of one row that an operation changes: what ``replace`` takes; no axis for a single row."""
    shape = list(leaf.shape)
    for axis, indices in _find_indices(leaf, how):
        shape[axis] = len(indices)
    return tuple(size for axis, size in enumerate(shape) if axis != leaf.row_axis or leaf.entries_per_row > 1)


def count_rows(rows: Tensor, leaf: TensorInfo) -> int:
    """How many rows a tensor of a leaf holds."""
    return 1 if leaf.row_axis is None else rows.shape[leaf.row_axis] // leaf.entries_per_row


def to_tensor(values: TensorData) -> Tensor:
    """A tensor from outside as one of the host's own."""
    return torch.from_numpy(np.frombuffer(values.data, "<f4").reshape(values.shape).astype(np.float32, copy=True))


@dataclass(frozen=True)
class RowRange:
    """Which rows of a request a tensor holds: ``count`` of them from ``first`` on, along ``axis``."""

    axis: int
    first: int
    count: int

    def repeat(self, row: Tensor, like: Tensor) -> Tensor:
        """One row's part, for each row."""
        row = row.to(like.device, like.dtype)
        if row.ndim < like.ndim:
            row = row.unsqueeze(self.axis)
        return torch.cat([row] * self.count, dim=self.axis)


def _zero(part: Tensor, how: Operation, rows: RowRange) -> Tensor:
    return torch.zeros_like(part)


def _scale(part: Tensor, how: Operation, rows: RowRange) -> Tensor:
    return part * (1.0 if how.by is None else how.by)


def _add(part: Tensor, how: Operation, rows: RowRange) -> Tensor:
    if how.tensor is not None:
        return part + rows.repeat(to_tensor(how.tensor), part)
    return part + (how.value or 0.0)


def _clamp(part: Tensor, how: Operation, rows: RowRange) -> Tensor:
    return part.clamp(how.min, how.max)


def _replace(part: Tensor, how: Operation, rows: RowRange) -> Tensor:
    if how.tensor is not None:
        return rows.repeat(to_tensor(how.tensor), part)
    return torch.full_like(part, how.value or 0.0)


def _noise(part: Tensor, how: Operation, rows: RowRange) -> Tensor:
    shape = list(part.shape)
    shape[rows.axis] = shape[rows.axis] // rows.count
    drawn = [_draw_noise(shape, (how.seed or 0) + rows.first + number) for number in range(rows.count)]
    noise = torch.cat(drawn, dim=rows.axis) if prod(shape) else part.new_zeros(part.shape)
    return part + noise.to(part.device, part.dtype) * (1.0 if how.std is None else how.std)


def _draw_noise(shape: list[int], seed: int) -> Tensor:
    """Standard normal numbers; on the CPU, so that every device gets the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


OPERATIONS: dict[str, Callable[[Tensor, Operation, RowRange], Tensor]] = {
    "zero": _zero,
    "scale": _scale,
    "add": _add,
    "clamp": _clamp,
    "replace": _replace,
    "noise": _noise,
}
