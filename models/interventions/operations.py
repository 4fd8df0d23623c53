"""How a value in flight is changed: a function and a row of a table for each operation; needs no torch.

A function gets the part of one request's rows that is to change, and gives it changed, in memory of its own;
differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from layertap.models.selection.hook_points import Operation

if TYPE_CHECKING:
    from torch import Tensor

    from layertap.models.interventions.row_range import RowRange


@dataclass(frozen=True)
class OperationSpec:
    """An operation and its parameters, fields of ``Operation``: one or more of each group, and optional ones.

    ``by_row``: each row gets something of its own.
    """

    change: Callable[[Tensor, Operation, RowRange], Tensor]
    needs: tuple[tuple[str, ...], ...] = ()
    optional: tuple[str, ...] = ()
    by_row: bool = False

    @property
    def allowed(self) -> frozenset[str]:
        """All parameters that it takes."""
        return frozenset(name for group in (*self.needs, self.optional) for name in group)


def _zero(part: Tensor, operation: Operation, rows: RowRange) -> Tensor:
    return rows.fill(part, 0.0)


def _scale(part: Tensor, operation: Operation, rows: RowRange) -> Tensor:
    return part * (1.0 if operation.by is None else operation.by)


def _add(part: Tensor, operation: Operation, rows: RowRange) -> Tensor:
    if operation.tensor is not None:
        return part + rows.repeat(operation.tensor, part)
    return part + (operation.value or 0.0)


def _clamp(part: Tensor, operation: Operation, rows: RowRange) -> Tensor:
    return part.clamp(operation.min, operation.max)


def _replace(part: Tensor, operation: Operation, rows: RowRange) -> Tensor:
    if operation.tensor is not None:
        return rows.repeat(operation.tensor, part)
    return rows.fill(part, operation.value or 0.0)


def _noise(part: Tensor, operation: Operation, rows: RowRange) -> Tensor:
    return part + rows.draw_noise(part, operation.seed or 0) * (1.0 if operation.std is None else operation.std)


OPERATIONS = {
    "zero": OperationSpec(_zero),
    "scale": OperationSpec(_scale, needs=(("by",),)),
    "add": OperationSpec(_add, needs=(("value", "tensor"),)),
    "clamp": OperationSpec(_clamp, needs=(("min", "max"),)),
    "replace": OperationSpec(_replace, needs=(("value", "tensor"),)),
    "noise": OperationSpec(_noise, needs=(("std",),), optional=("seed",), by_row=True),
}

if TYPE_CHECKING:
    Op = str
else:
    Op = Literal[tuple(OPERATIONS)]
