"""What of a tensor is a text's own: texts are padded to few lengths, and what is padded counts nowhere.

The mask says it: ``token_mask`` (rows, tokens), on the host, is False where a token only pads its row. It travels with
the rows of a batch; whatever is made of all positions, or changed at them, goes through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_view import select_rows


def is_padded(info: TensorInfo, token_mask: Tensor | None) -> bool:
    """Whether a tensor has positions that only pad its rows."""
    return token_mask is not None and bool(info.token_axes) and not bool(token_mask.all())


def strip_padding(value: Tensor, info: TensorInfo, token_mask: Tensor) -> Iterator[tuple[Tensor, TensorInfo]]:
    """Row by row what belongs to it, as it would be without padding; differentiable."""
    for place, axes in enumerate(find_own_positions(info, token_mask)):
        row = select_rows(value, info, (place, place + 1))
        for axis, positions in axes:
            row = row.index_select(axis, positions.to(value.device))
        yield row, replace(info, shape=tuple(row.shape))


def find_own_positions(info: TensorInfo, token_mask: Tensor) -> Iterator[list[tuple[int, Tensor]]]:
    """For each row the axes that have tokens, and which places along them are the row's own."""
    # What is the same for all rows belongs to all of them.
    for tokens in token_mask if info.row_axis is not None else token_mask.any(0, keepdim=True):
        yield [(axis, tokens.nonzero().flatten()) for axis in info.token_axes]


def truncate(value: Tensor, info: TensorInfo, length: int, token_mask: Tensor) -> tuple[Tensor, TensorInfo]:
    """So many tokens of each row, 0 where one of them only pads it."""
    for axis in info.token_axes:
        value = _narrow(value, info, axis, length)
    if info.row_axis is not None:
        for axis in info.token_axes:
            value = _zero_padding(value, info.row_axis, axis, ~token_mask[:, :length])
    return value, info.with_length(length)


def move_padding_last(value: Tensor, info: TensorInfo, letters: str, token_mask: Tensor) -> Tensor:
    """The same with each row's own tokens before what only pads it, along the axes of these letters in the layout."""
    axes = [axis for axis, letter in enumerate(info.layout or "") if letter in letters and axis in info.token_axes]
    if not axes:
        return value
    padding = ~(token_mask if info.row_axis is not None else token_mask.any(0, keepdim=True))
    order = padding.int().argsort(dim=1, stable=True)
    if bool((order.diff(dim=1) == 1).all()):
        return value
    rows = []
    for place, positions in enumerate(order):
        row = select_rows(value, info, (place, place + 1))
        for axis in axes:
            row = row.index_select(axis, positions.to(value.device))
        rows.append(row)
    return torch.cat(rows, dim=info.row_axis or 0)


def _narrow(value: Tensor, info: TensorInfo, axis: int, length: int) -> Tensor:
    if axis != info.row_axis:
        return value.narrow(axis, 0, length)
    unfolded = value.reshape(*value.shape[:axis], -1, info.entries_per_row, *value.shape[axis + 1 :])
    return unfolded.narrow(axis + 1, 0, length).flatten(axis, axis + 1)


def _zero_padding(value: Tensor, row_axis: int, axis: int, padding: Tensor) -> Tensor:
    if not bool(padding.any()):
        return value
    shape = [1] * value.ndim
    if axis == row_axis:  # tokens are folded into the rows
        shape[axis] = padding.numel()
    else:
        padding = padding if row_axis < axis else padding.T
        shape[row_axis], shape[axis] = value.shape[row_axis], value.shape[axis]
    return value.masked_fill(padding.reshape(shape).to(value.device), 0)
