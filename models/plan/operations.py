"""Operations that change activations: a function and an entry of a table for each.

A function takes the values to change, the operation and its operand, a tensor or a number, and returns new values in
new memory. It is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.errors import InputError, SelectorError
from layertap.models.plan.projections import project, to_tensor
from layertap.models.plan.requested import Op, Operation, TensorData
from layertap.models.points import AXES


@dataclass(frozen=True)
class OperationSpec:
    """An operation and its parameters, which are fields of ``Operation``.

    ``change`` takes values, the operation, and its operand, or the field ``number`` where it has none.
    """

    change: Callable[[Tensor, Operation, Any], Tensor]
    number: str = ""
    needs: tuple[str, ...] = ()  # at least one of them, and exactly one if "tensor" is among them
    optional: tuple[str, ...] = ()
    by_row: bool = False  # each row gets its own operand: noise


def _replace(value: Tensor, operation: Operation, operand: Tensor | float) -> Tensor:
    return operand if isinstance(operand, Tensor) else torch.full_like(value, operand)


def _add_noise(value: Tensor, operation: Operation, operand: Tensor | None) -> Tensor:
    return value if operand is None else value + operand * (operation.std or 0.0)


ANY_VALUE = ("value", "tensor", "from", "project")
OPERATIONS: Mapping[Op, OperationSpec] = {
    "zero": OperationSpec(lambda value, operation, operand: torch.zeros_like(value)),
    "scale": OperationSpec(lambda value, operation, operand: value * operand, "by", ("by", "tensor", "from")),
    "add": OperationSpec(lambda value, operation, operand: value + operand, "value", ANY_VALUE),
    "clamp": OperationSpec(lambda value, each, operand: value.clamp(each.min, each.max), needs=("min", "max")),
    "relu": OperationSpec(lambda value, operation, operand: value.relu()),
    "square": OperationSpec(lambda value, operation, operand: value.square()),
    "tanh": OperationSpec(lambda value, operation, operand: value.tanh()),
    "replace": OperationSpec(_replace, "value", ANY_VALUE),
    "noise": OperationSpec(_add_noise, needs=("std",), optional=("seed",), by_row=True),
}


def _change(value: Tensor, operation: Operation, operand: Tensor | None) -> Tensor:
    spec = OPERATIONS[operation.op]
    return spec.change(value, operation, vars(operation)[spec.number] if operand is None and spec.number else operand)


def apply_operation(rows: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    """A request's rows of a tensor after an operation, in new memory; differentiable.

    The first one is row ``row_offset`` of its request: noise is drawn row by row, from the seed and the row's number,
    so that it does not depend on how rows are batched. With ``each`` the row's number selects the entry that is
    changed. Padding is not changed.
    """
    if not rows.is_padded:
        change = _change_each if operation.each else _change_rows

        def change_part(part: Tensor) -> Tensor:
            return change(replace(rows, value=part), operation, row_offset)

        axes = []
        for letter, indices in operation.indices_by_axis.items():
            axis = rows.info.axis(letter)
            size = rows.value.shape[axis]  # of texts it may be less than was planned
            axes.append((axis, [index + size if index < 0 else index for index in indices]))
        return _change_part(rows.value, axes, change_part)
    changed = []
    for number, tokens in enumerate(rows.list_own_tokens()):
        row, info = rows.select((number, number + 1)), rows.info.with_length(len(tokens[0][1]))

        def change_row(part: Tensor, info: TensorInfo = info, number: int = number) -> Tensor:
            return apply_operation(RowTensor(part, info), operation, row_offset + number)

        changed.append(_change_part(row.value, tokens, change_row))
    return rows.concat(changed)


def compute_part_shape(info: TensorInfo, operation: Operation) -> tuple[int, ...]:
    """The shape of one row's part that an operation changes, which ``replace`` takes; without an axis for one row."""
    shape = info.index_select(operation.indices_by_axis).shape
    return tuple(size for axis, size in enumerate(shape) if axis != info.row_axis or info.entries_per_row > 1)


def count_entries(info: TensorInfo, operation: Operation) -> tuple[int, ...]:
    """How many entries are changed one at a time along each axis of ``each``, in a tensor of one row."""
    part = info.index_select(operation.indices_by_axis)
    return tuple(part.size(AXES[option]) for option in operation.each or ())


def _change_rows(part: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    """Change a whole part."""
    operand: Tensor | None = None
    if operation.tensor is not None:
        operand = _repeat(part, operation.tensor)
    elif operation.project is not None:
        operand = project(part, operation.project).value.to(part.value.dtype)
    elif OPERATIONS[operation.op].by_row and part.select((0, 1)).value.numel():
        shape = part.select((0, 1)).value.shape
        numbers = range(row_offset, row_offset + part.rows) if operation.row is None else (operation.row,)
        drawn = [_draw(shape, operation, number) for number in numbers]
        operand = part.concat(drawn * (part.rows // len(drawn))).to(part.value)
    return _change(part.value, operation, operand)


def _change_each(part: RowTensor, operation: Operation, row_offset: int) -> Tensor:
    """Change one entry in each row, along one or several axes; the row's number selects the entry.

    All rows change in one step, so that the cost does not depend on the number of entries. Several entries of the row
    axis that belong to one row change together.
    """
    info, device = part.info, part.value.device
    if info.row_axis is None or not part.value.numel():
        raise ValueError("entries are changed one by one in tensors of single rows")
    row_axis, of_each = info.row_axis, [info.axis(AXES[option]) for option in operation.each or ()]
    axes = [row_axis, *(axis + (axis > row_axis) for axis in of_each)]  # behind the rows are the entries of each
    front = list(range(len(axes)))
    changed = part.value.clone()

    def view_entries(value: Tensor) -> Tensor:
        return torch.unflatten(value, row_axis, (part.rows, -1)).movedim(axes, front)

    view = view_entries(changed)
    numbers = torch.arange(row_offset, row_offset + part.rows, device=device)
    entries = torch.unravel_index(numbers, view.shape[1 : len(axes)])
    index = (torch.arange(part.rows, device=device), *entries)
    chosen, operand = view[index], None
    if operation.tensor is not None:
        row = _read_row(part, operation.tensor)
        rows = (row if info.entries_per_row > 1 else row.unsqueeze(row_axis)).unsqueeze(row_axis).movedim(axes, front)
        operand = rows[torch.zeros_like(numbers), *entries]
    elif operation.project is not None:
        operand = view_entries(project(part, operation.project).value.to(part.value.dtype))[index]
    elif OPERATIONS[operation.op].by_row:
        operand = _draw(chosen.shape[1:], operation, operation.row or 0).to(chosen).expand_as(chosen)
    view[index] = _change(chosen, operation, operand)
    return changed


def estimate_effects(rows: RowTensor, gradient: RowTensor, operation: Operation) -> Tensor:
    """What an operation adds to an objective, to first order: its gradient times what it adds to a row's values.

    (*sizes) of the axes of ``each``, summed over all others (attribution patching, Nanda 2023).
    """
    added = apply_operation(rows, replace(operation, each=None), 0) - rows.value
    effects = replace(rows, value=added * gradient.value).index_select(operation.indices_by_axis)
    axes = [rows.info.axis(AXES[option]) for option in operation.each or ()]
    return effects.double().movedim(axes, list(range(len(axes)))).flatten(len(axes)).sum(-1)


def _draw(shape: Sequence[int], operation: Operation, number: int) -> Tensor:
    """Standard normal numbers from the seed and a row's number, drawn on the CPU, so that devices get the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed((operation.seed or 0) + number))


def _repeat(part: RowTensor, data: TensorData) -> Tensor:
    """Repeat a request's tensor for each row, in new memory."""
    axis = part.info.row_axis
    row = _read_row(part, data)
    if axis is not None and part.info.entries_per_row == 1:
        row = row.unsqueeze(axis)
    return part.concat([row.contiguous()] * part.rows)


def _read_row(part: RowTensor, data: TensorData) -> Tensor:
    """A request's tensor, broadcast to the shape of one row, without the row axis if rows are single entries."""
    row, axis = to_tensor(data, part.value), part.info.row_axis
    if axis is None or part.info.entries_per_row > 1:
        return row.broadcast_to(part.select((0, 1)).value.shape)
    return row.broadcast_to(part.value.shape[:axis] + part.value.shape[axis + 1 :])


def _change_part(
    value: Tensor, axes: Sequence[tuple[int, Sequence[int] | Tensor]], change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Change the values at some indices of some axes."""
    if not axes:
        return change(value)
    (axis, indices), *rest = axes
    index = torch.as_tensor(indices, device=value.device)
    return value.index_copy(axis, index, _change_part(value.index_select(axis, index), rest, change))


def take_part(row: RowTensor, operation: Operation, changed: TensorInfo) -> TensorData:
    """The part of a row of another input that an operation inserts into a row that has the shape of ``changed``.

    SelectorError if the two parts' shapes differ, as for texts of different lengths.
    """
    if row.token_mask is not None and row.info.token_axes:
        (row,) = row.strip()
    try:
        part = row.index_select(operation.indices_by_axis)
    except InputError as error:
        hint = "name indices that both inputs have"
        raise SelectorError(f"of the input in 'from': {error.detail}", hint=hint) from None
    if row.info.entries_per_row == 1 and row.info.row_axis is not None:
        part = part.squeeze(row.info.row_axis)
    wanted = compute_part_shape(changed, operation)
    if tuple(part.shape) != wanted:
        detail = f"what is taken of the input in 'from' has shape {list(part.shape)}, and {list(wanted)} is changed"
        raise SelectorError(detail, hint="name the tokens that are changed, or send texts of one length")
    return TensorData(tuple(part.shape), part.float().contiguous().numpy().astype("<f4").tobytes())
