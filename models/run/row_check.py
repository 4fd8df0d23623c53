"""Checks while serving: rows that shared a forward are compared with one that ran alone, before they are answered."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter
from torch import Tensor

from layertap.models.catalog.row_tensor import RowTensor, is_near
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.plan import Capture
from layertap.models.run.fingerprint import get_proven_part
from layertap.models.run.reduction import ReducedTensor

T = TypeVar("T")
log = logging.getLogger("layertap")
FIRST = 3  # shared forwards of a kind that are checked whatever the interval
MOST_ROWS = 4  # that are compared in each of them; in a later one a single row
MAX_KINDS = 1024
MOST_DOUBTS, SHARE = 3, 0.05  # more doubts than these, in number and as a share of what was compared, are no rounding
STEP = {"int8": 1.5 / 127, "float16": 2e-3}  # of the largest value: what a reply's dtype adds to the kernels' rounding


@dataclass(frozen=True)
class CrossingRows:
    """Rows of a model were found to affect each other while it served.

    ``since``: when, in seconds since 1970; ``shared_answers``: how many answers of shared forwards went before.
    """

    since: float
    shared_answers: int


NOTE = TypeAdapter(CrossingRows)


class RowCheck:
    """Which shared forwards of one model are checked, in one process; ``found``: rows turned out to cross."""

    def __init__(self) -> None:
        self.found = False
        self._counts = LRUCache[Hashable, int](MAX_KINDS)
        self._compared = self._doubts = 0

    def choose(self, kind: Hashable, rows: Sequence[T], every: int) -> Sequence[T]:
        """Which rows of a kind's next shared forward are compared: some of the first, one of one in ``every``."""
        count = (self._counts.get(kind) or 0) + 1
        self._counts.put(kind, count)
        if count <= FIRST:
            return rows[:: -(-len(rows) // MOST_ROWS)]
        return () if count % every else (rows[count % len(rows)],)

    def note(self, *, differs: bool, is_rounding: bool) -> None:
        """Note a comparison; ``is_rounding``: as many copies of the row as there were rows give the shared answer.

        A number on the border of a choice goes the other way among other numbers of rows, seldom: what does so often
        is a rule of the model's.
        """
        self._compared += 1
        self._doubts += differs and is_rounding
        often = self._doubts >= max(MOST_DOUBTS, SHARE * self._compared)
        self.found |= differs and (often or not is_rounding)


def select_row(results: Mapping[Capture, ReducedTensor], row: int) -> dict[Capture, Tensor]:
    """A row's part of each result, as floating numbers where it is int8 with a scale."""
    selected = {}
    for capture, reduced in results.items():
        values = reduced.values
        if reduced.scale is not None:
            values = values.float() * reduced.scale.reshape(-1, *[1] * (values.ndim - 1))
        if capture.info.row_axis is not None:
            values = RowTensor(values, capture.reduced_info).select((row, row + 1)).value
        selected[capture] = values
    return selected


def has_same_row(one: Mapping[Capture, Tensor], other: Mapping[Capture, Tensor], tolerance: float) -> bool:
    """Whether a row is the same twice, but for a share of each tensor's largest number: kernels round differently."""
    return all(
        is_near(value, other[capture], max(tolerance, STEP.get(capture.dtype, 0.0))) for capture, value in one.items()
    )


def read_note(folder: Path | None, identity: str) -> CrossingRows | None:
    """What an earlier server noted of a model; None if it noted nothing that can be read."""
    path = _locate(folder, identity) if folder is not None else None
    try:
        return NOTE.validate_json(path.read_bytes()) if path is not None and path.is_file() else None
    except (OSError, ValueError) as error:
        log.info("a note on crossing rows is not used", extra={"fields": {"reason": type(error).__name__}})
        return None


def write_note(folder: Path, identity: str, shared_answers: int) -> CrossingRows:
    """Note for later starts that rows of a model cross."""
    note, path = CrossingRows(time.time(), shared_answers), _locate(folder, identity)
    with suppress(OSError):  # a read-only folder: the next server finds out by itself
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(NOTE.dump_json(note))
        part.replace(path)
    return note


def _locate(folder: Path, identity: str) -> Path:
    return folder / f"{get_proven_part(identity)}.json"
