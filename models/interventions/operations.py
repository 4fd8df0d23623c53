"""How a value in flight is changed: a function and a row of a table for each operation.

A function gets the part of one request's rows that is to change, and the number of the first of them in the request; it
gives the part changed, in memory of its own; differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.selection.hook_points import Op, Operation, TensorData


@dataclass(frozen=True)
class OperationSpec:
    """An operation and its parameters, fields of ``Operation``: one or more of each group, and optional ones.

    ``by_row``: each row gets something of its own.
    """

    change: Callable[[RowTensor, Operation, int], Tensor]
    needs: tuple[tuple[str, ...], ...] = ()
    optional: tuple[str, ...] = ()
    by_row: bool = False

    @property
    def allowed(self) -> frozenset[str]:
        """All parameters that it takes."""
        return frozenset(name for group in (*self.needs, self.optional) for name in group)


def _zero(part: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    return _fill(part, 0.0)


def _scale(part: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    if operation.tensor is not None:
        return part.value * _repeat(part, operation.tensor)
    return part.value * (1.0 if operation.by is None else operation.by)


def _add(part: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    if operation.tensor is not None:
        return part.value + _repeat(part, operation.tensor)
    return part.value + (operation.value or 0.0)


def _clamp(part: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    return part.value.clamp(operation.min, operation.max)


def _replace(part: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    if operation.tensor is not None:
        return _repeat(part, operation.tensor)
    return _fill(part, operation.value or 0.0)


def _noise(part: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    """Standard normal numbers by the seed and each row's own number, drawn on the CPU: every device gets the same."""
    shape = part.select((0, 1)).value.shape
    numbers = range(row_offset, row_offset + part.rows) if prod(shape) else ()
    seeds = ((operation.seed or 0) + number for number in numbers)
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    noise = part.concat(rows).to(part.value) if rows else part.value
    return part.value + noise * (1.0 if operation.std is None else operation.std)


def _fill(part: RowTensor, value: float) -> Tensor:
    return torch.full_like(part.value, value)


def _repeat(part: RowTensor, data: TensorData) -> Tensor:
    """A tensor from outside, which is one row's or broadcasts to that, for each row."""
    numbers = np.frombuffer(data.data, "<f4").reshape(data.shape).astype(np.float32, copy=True)
    row, axis = torch.from_numpy(numbers).to(part.value), part.info.row_axis
    if axis is None or part.info.entries_per_row > 1:
        return part.concat([row.broadcast_to(part.select((0, 1)).value.shape).contiguous()] * part.rows)
    shape = part.value.shape[:axis] + part.value.shape[axis + 1 :]
    return part.concat([row.broadcast_to(shape).unsqueeze(axis)] * part.rows)


OPERATIONS: Mapping[Op, OperationSpec] = {
    "zero": OperationSpec(_zero),
    "scale": OperationSpec(_scale, needs=(("by", "tensor"),)),
    "add": OperationSpec(_add, needs=(("value", "tensor"),)),
    "clamp": OperationSpec(_clamp, needs=(("min", "max"),)),
    "relu": OperationSpec(lambda part, operation, row_offset: part.value.relu()),
    "square": OperationSpec(lambda part, operation, row_offset: part.value.square()),
    "tanh": OperationSpec(lambda part, operation, row_offset: part.value.tanh()),
    "replace": OperationSpec(_replace, needs=(("value", "tensor"),)),
    "noise": OperationSpec(_noise, needs=(("std",),), optional=("seed",), by_row=True),
}


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
