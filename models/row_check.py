"""Checks while serving: rows that shared a forward are compared with one that ran alone, before they are answered."""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from layertap.models.capture.reduction import ReducedTensor
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.lru_cache import LRUCache
from layertap.models.selection.plan import Capture

FIRST = 3  # shared forwards of a kind that are checked whatever the interval
MOST_ROWS = 4  # of a request that are compared in these; later one
MAX_KINDS = 1024
STEP = {"int8": 1.5 / 127, "float16": 2e-3}  # of the largest value: what a reply's dtype adds to the kernels' rounding


@dataclass(frozen=True)
class CrossingRows:
    """Rows of a model were found to affect each other while it served.

    ``since``: when, in seconds since 1970; ``shared_answers``: how many answers of shared forwards went before.
    """

    since: float
    shared_answers: int


class RowCheck:
    """Which shared forwards of one model are checked, in one process; ``found``: rows turned out to cross."""

    def __init__(self) -> None:
        self.found = False
        self._counts = LRUCache[Hashable, int](MAX_KINDS)

    def choose_rows(self, kind: Hashable, rows: int, every: int) -> Sequence[int]:
        """Which rows a forward of a kind compares: some in the first ones, then one in each ``every``; 0: none."""
        if not every:
            return ()
        count = (self._counts.get(kind) or 0) + 1
        self._counts.put(kind, count)
        if count <= FIRST:
            return range(min(rows, MOST_ROWS))
        return () if count % every else (count % rows,)


def select_row(results: Mapping[Capture, ReducedTensor], row: int) -> dict[Capture, Tensor]:
    """A row's part of each result, as floating numbers where it is int8 with a scale."""
    return {capture: _select(reduced, capture, row) for capture, reduced in results.items()}


def has_same_row(one: Mapping[Capture, Tensor], other: Mapping[Capture, Tensor], tolerance: float) -> bool:
    """Whether a row is the same twice, but for a share of each tensor's largest number: kernels round differently."""
    return all(
        _is_same(value, other[capture], max(tolerance, STEP.get(capture.dtype, 0.0))) for capture, value in one.items()
    )


def _select(reduced: ReducedTensor, capture: Capture, row: int) -> Tensor:
    values = reduced.values
    if reduced.scale is not None:
        values = values.float() * reduced.scale.reshape(-1, *[1] * (values.ndim - 1))
    if capture.info.row_axis is None:
        return values
    return RowTensor(values, capture.reduced_info).select((row, row + 1)).value


def _is_same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    if not one.is_floating_point():
        return False
    largest = torch.where(one.isfinite(), one.abs(), 0.0).amax()
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * max(float(largest), 1e-6), equal_nan=True)


def read_note(folder: Path | None, identity: str) -> CrossingRows | None:
    """What an earlier server noted of a model; None if it noted nothing that can be read."""
    try:
        return CrossingRows(**json.loads(_locate(folder, identity).read_text())) if folder is not None else None
    except (OSError, TypeError, ValueError):
        return None


def write_note(folder: Path, identity: str, shared_answers: int) -> CrossingRows:
    """Note for later starts that rows of a model cross."""
    note = CrossingRows(time.time(), shared_answers)
    with suppress(OSError):  # a read-only folder: the next server finds out by itself
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _locate(folder, identity).write_text(json.dumps(asdict(note)))
    return note


def _locate(folder: Path, identity: str) -> Path:
    return folder / f"{identity}.crosses"
