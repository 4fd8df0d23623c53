"""How a value in flight is changed: a function and a row of a table for each operation.

A function gets the part of one request's rows that is to change, and the number of the first of them in the request; it
gives the part changed, in memory of its own; differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

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
    "replace": OperationSpec(_replace, needs=(("value", "tensor"),)),
    "noise": OperationSpec(_noise, needs=(("std",),), optional=("seed",), by_row=True),
}
