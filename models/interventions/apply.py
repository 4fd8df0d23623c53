"""An operation applied to the named part of one request's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.interventions.operations import OPERATIONS
from layertap.models.selection.hook_points import Operation


def apply_operation(rows: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    """A request's rows of a tensor after an operation, in memory of their own; differentiable.

    The first of them is row ``row_offset`` of its request: noise is drawn row by row, from the seed and the row's
    number, so that it does not depend on how rows are batched. Tokens that only pad a row stay as they are.
    """
    if not rows.is_padded:
        change = OPERATIONS[operation.op].change

        def change_rows(part: Tensor) -> Tensor:
            return change(replace(rows, value=part), operation, row_offset)

        axes = []
        for letter, indices in operation.indices_by_axis.items():
            size = rows.info.size(letter)
            axes.append((rows.info.axis(letter), [index + size if index < 0 else index for index in indices]))
        return _change_part(rows.value, axes, change_rows)
    changed = []
    for number, tokens in enumerate(rows.list_own_tokens()):
        row, info = rows.select((number, number + 1)), rows.info.with_length(len(tokens[0][1]))

        def change_row(part: Tensor, info: TensorInfo = info, number: int = number) -> Tensor:
            return apply_operation(RowTensor(part, info), operation, row_offset + number)

        changed.append(_change_part(row.value, tokens, change_row))
    return rows.concat(changed)


def compute_part_shape(info: TensorInfo, operation: Operation) -> tuple[int, ...]:
    """The shape of the part of one row that an operation changes: what ``replace`` takes; no axis for a single row."""
    shape = info.index_select(operation.indices_by_axis).shape
    return tuple(size for axis, size in enumerate(shape) if axis != info.row_axis or info.entries_per_row > 1)


def _change_part(
    value: Tensor, axes: Sequence[tuple[int, Sequence[int] | Tensor]], change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Change what lies at some indices of some axes."""
    if not axes:
        return change(value)
    (axis, indices), *rest = axes
    index = torch.as_tensor(indices, device=value.device)
    return value.index_copy(axis, index, _change_part(value.index_select(axis, index), rest, change))
