"""The rows of a tensor: which part of it belongs to which row, as its catalogue says; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layertap.models.catalog.catalog import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

Span = tuple[int, int]  # rows from one up to, not including, the other


@dataclass(frozen=True)
class RowView:
    """A tensor as (N, entries per row, …); ``channel`` is the axis of channels, None where there is none."""

    values: Tensor
    channel: int | None

    def positions(self, skip: int) -> Tensor:
        """As (N, channels, positions): pixels or tokens in order, without the first ``skip``.

        Contiguous: a sum along another axis than the innermost is rounded by how many rows there are beside it.
        """
        if self.channel is None:
            return self.values.flatten(1).unsqueeze(1)
        return self.values.movedim(self.channel, 1).flatten(2)[:, :, skip:].contiguous()


def move_rows_first(value: Tensor, info: TensorInfo) -> RowView:
    """A tensor with its rows first, what belongs to one of them beside each other; a view where memory allows it."""
    axis = info.row_axis or 0
    first = value.movedim(axis, 0)
    values = first.reshape(first.shape[0] // info.entries_per_row, info.entries_per_row, *first.shape[1:])
    letters = (info.layout or "").replace("N", "")
    return RowView(values, letters.index("C") + 2 if "C" in letters else None)


def select_rows(value: Tensor, info: TensorInfo, span: Span) -> Tensor:
    """So many rows of a tensor; a view, all of it where it is the same for all rows."""
    if info.row_axis is None:
        return value
    return value.narrow(info.row_axis, span[0] * info.entries_per_row, (span[1] - span[0]) * info.entries_per_row)


def count_rows(value: Tensor, info: TensorInfo) -> int:
    """How many rows a tensor holds; 1 where it is the same for all rows."""
    return 1 if info.row_axis is None else value.shape[info.row_axis] // info.entries_per_row


def to_floating(value: Tensor) -> Tensor:
    """The same in float32, in float64 where it is that."""
    return value if value.is_floating_point() and value.dtype.itemsize == 8 else value.float()
