"""Rows: for each input of a model a tensor with the rows on axis 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from layertap.models.devices import transfer
from layertap.models.errors import LayertapError
from layertap.models.spec import Shapes
from layertap.service.inputs.items import LocalItem

Rows = Mapping[str, Tensor]
Attempt = Rows | LayertapError  # what was made of an item, or why nothing was
Fetched = LocalItem | LayertapError  # an input, or why it can't be had from where it is
Items = Sequence[tuple[int, Fetched]]  # with their places in the request


def count_rows(attempts: Sequence[Attempt]) -> int:
    """How many rows were made of an item."""
    return sum(len(next(iter(rows.values()))) for rows in attempts if not isinstance(rows, LayertapError))


def get_row_shapes(rows: Rows) -> Shapes:
    """The shape of one row, input by input."""
    return tuple(tuple(value.shape[1:]) for value in rows.values())


def join_rows(parts: Sequence[Rows]) -> dict[str, Tensor]:
    """All rows of a request; their shapes agree."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: transfer.join_rows([part[name] for part in parts]) for name in parts[0]}
