"""An operation applied to the named part of one request's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.padding import find_own_positions, is_padded
from layertap.models.catalog.row_view import count_rows, select_rows
from layertap.models.interventions.operations import OPERATIONS
from layertap.models.interventions.row_range import RowRange
from layertap.models.selection.hook_points import AXES, Operation


def apply_operation(
    value: Tensor, info: TensorInfo, operation: Operation, first: int, token_mask: Tensor | None = None
) -> Tensor:
    """A request's rows of a tensor after an operation, in memory of their own; differentiable.

    ``value`` is the part of a tensor that holds them, the first of them being row ``first`` of its request: noise is
    drawn row by row, from the seed and the row's number, so that it does not depend on how rows are batched.
    ``token_mask`` (rows, tokens) is False where a token only pads its row: nothing is changed there.
    """
    if token_mask is None or not is_padded(info, token_mask):
        rows = RowRange(info.row_axis or 0, first, count_rows(value, info))
        change = OPERATIONS[operation.op].change
        indices = list(find_indices(info, operation))
        return _change_part(value, indices, lambda part: change(part, operation, rows))
    changed = []
    for place, positions in enumerate(find_own_positions(info, token_mask)):
        row_info = info.with_length(len(positions[0][1]))
        apply = partial(apply_operation, info=row_info, operation=operation, first=first + place)
        changed.append(_change_part(select_rows(value, info, (place, place + 1)), positions, apply))
    return torch.cat(changed, dim=info.row_axis or 0)


def compute_part_shape(info: TensorInfo, operation: Operation) -> tuple[int, ...]:
    """The shape of the part of one row that an operation changes: what ``replace`` takes; no axis for a single row."""
    shape = list(info.shape)
    for axis, indices in find_indices(info, operation):
        shape[axis] = len(indices)
    return tuple(size for axis, size in enumerate(shape) if axis != info.row_axis or info.entries_per_row > 1)


def find_indices(info: TensorInfo, operation: Operation) -> Iterator[tuple[int, Sequence[int]]]:
    """The axes that are narrowed, and to which indices: those below 0 count from the end."""
    top, left, bottom, right = operation.region or (0, 0, 0, 0)
    ranges = {"H": range(top, bottom), "W": range(left, right)} if operation.region is not None else {}
    named = {AXES[option]: indices for option, indices in operation.indices.items()}
    for letter, indices in (named | ranges).items():
        axis = (info.layout or "").index(letter)
        yield axis, [index + info.shape[axis] if index < 0 else index for index in indices]


def _change_part(
    value: Tensor, axes: Sequence[tuple[int, Sequence[int] | Tensor]], change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Change what lies at some indices of some axes."""
    if not axes:
        return change(value)
    (axis, indices), *rest = axes
    index = torch.as_tensor(indices, device=value.device)
    return value.index_copy(axis, index, _change_part(value.index_select(axis, index), rest, change))
