"""A request's results whose rows come from several forwards."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from layertap.models.capture.reduction import ReducedTensor, clone_reduced
from layertap.models.selection.plan import Capture


class JoinedRows:
    """Results as if all rows had been in one forward: each part is copied to its place as it comes.

    So what waits for other parts is in memory once, and keeps no other request's rows there. Threads may add parts of
    different rows at once.
    """

    def __init__(self, rows: int) -> None:
        """Room for so many rows; it is taken when the first part comes."""
        self._rows = rows
        self._whole: dict[Capture, ReducedTensor] = {}
        self._lock = threading.Lock()

    def add(self, start: int, stop: int, part: Mapping[Capture, ReducedTensor]) -> dict[Capture, ReducedTensor]:
        """Take rows ``start`` to ``stop``; the whole, in which rows that are not added yet have any numbers.

        A part of all rows is the whole. What is the same for all rows is that of the first part. A part that is added
        again replaces itself.
        """
        if stop - start == self._rows:
            return dict(part)
        with self._lock:
            for capture, reduced in part.items():
                if capture not in self._whole:
                    self._whole[capture] = _make_whole(capture, reduced, stop - start, self._rows)
        for capture, reduced in part.items():
            if capture.info.row_axis is not None:
                whole, share = self._whole[capture], (start, stop - start)
                _copy_rows(whole.values, reduced.values, capture.rows_axis, share)
                if whole.scale is not None and reduced.scale is not None:
                    _copy_rows(whole.scale, reduced.scale, 0, share)
        return self._whole


def _make_whole(capture: Capture, part: ReducedTensor, count: int, rows: int) -> ReducedTensor:
    """Room for so many rows, of which a part has some; what all rows share is copied."""
    if capture.info.row_axis is None:
        return clone_reduced(part)
    scale = part.scale
    return ReducedTensor(
        _make_room(part.values, capture.rows_axis, count, rows),
        None if scale is None else _make_room(scale, 0, count, rows),
    )


def _make_room(part: Tensor, axis: int, count: int, rows: int) -> Tensor:
    """For each row the axis has as many entries as it has of those of a part."""
    shape = list(part.shape)
    shape[axis] = shape[axis] // count * rows
    return torch.empty(shape, dtype=part.dtype, device=part.device)


def _copy_rows(whole: Tensor, part: Tensor, axis: int, share: tuple[int, int]) -> None:
    start, count = share
    entries = part.shape[axis] // count
    whole.narrow(axis, start * entries, count * entries).copy_(part)
