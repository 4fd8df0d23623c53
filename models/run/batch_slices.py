"""Several requests in one forward: the rows of each, and its share of what the hooks captured."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.models.catalog.row_tensor import RowTensor, Span
from layertap.models.devices import transfer
from layertap.models.plan.plan import Capture, ResolvedIntervention, ResolvedObjective
from layertap.models.plan.poolings import POOLINGS
from layertap.models.run.reduction import Reduced, ReducedArray, ReducedTensor

Array = NDArray[Any]


@dataclass(frozen=True)
class RequestSlice:
    """One request's part of a forward: rows ``start`` to ``stop``."""

    start: int
    stop: int
    captures: frozenset[Capture]
    interventions: tuple[ResolvedIntervention, ...] = ()
    objective: ResolvedObjective | None = None  # differentiated for gradients
    row_offset: int = 0  # the number of its first row in the request
    calls: tuple[tuple[tuple[str, int, str], int], ...] = ()  # the forward must make these, and runs to its end

    @property
    def span(self) -> Span:
        """Its rows."""
        return self.start, self.stop


def find_spans(slices: Iterable[RequestSlice], row_count: int) -> dict[Capture, tuple[Span, ...]]:
    """The rows that each capture is wanted for; of tensors whose rows can't be separated all.

    Adjacent requests with the same capture share a span if that does not change bits: sums and powers of several rows
    are rounded differently from those of one, and an answer must not depend on its neighbours.
    """
    spans_by_capture: dict[Capture, list[Span]] = {}
    for each in sorted(slices, key=lambda each: each.start):
        for capture in each.captures:
            spans = spans_by_capture.setdefault(capture, [])
            if not _has_rows(capture):
                spans[:] = [(0, row_count)]
            elif spans and spans[-1][1] == each.start and _is_exact(capture):
                spans[-1] = (spans[-1][0], each.stop)
            else:
                spans.append(each.span)
    return {capture: tuple(spans) for capture, spans in spans_by_capture.items()}


@dataclass(frozen=True)
class BatchActivations:
    """What the hooks of one forward captured: each capture reduced, span by span."""

    pieces: Mapping[tuple[Capture, Span], ReducedTensor]

    @cached_property
    def _by_capture(self) -> Mapping[Capture, Sequence[tuple[Span, ReducedTensor]]]:
        pieces: dict[Capture, list[tuple[Span, ReducedTensor]]] = {}
        for (capture, span), reduced in sorted(self.pieces.items(), key=lambda item: item[0][1]):
            pieces.setdefault(capture, []).append((span, reduced))
        return pieces

    def select(self, request_slice: RequestSlice) -> dict[Capture, ReducedTensor]:
        """One request's results; they may be views of memory that neighbours share: read-only."""
        start = request_slice.start
        results = {}
        for capture in request_slice.captures:
            pieces = self._by_capture[capture]
            index = bisect_right(pieces, start, key=lambda piece: piece[0][0]) - 1 if _has_rows(capture) else 0
            span, reduced = pieces[index]
            results[capture] = _select_reduced(reduced, capture, span, request_slice.span)
        return results

    def to_host(self) -> BatchActivations:
        """The same in the host's memory: from another device all of it comes in one copy."""
        host = iter(transfer.copy_packed([part for reduced in self.pieces.values() for part in reduced.parts]))
        return BatchActivations(
            {key: Reduced(*islice(host, len(reduced.parts))) for key, reduced in self.pieces.items()}
        )


def _is_exact(capture: Capture) -> bool:
    """Whether a result's numbers are the captured ones, and none is made of several."""
    reduction = capture.reduction
    # Not max: which of two zeros or NaNs it gives depends on their positions.
    makes = reduction.project, reduction.stats, reduction.metric
    combines = reduction.normalize or any(each is not None for each in makes)
    return not combines and not POOLINGS[reduction.pool].combines


def _has_rows(capture: Capture) -> bool:
    return capture.info.row_axis is not None and not capture.info.crosses_rows


def _select_reduced(reduced: ReducedTensor, capture: Capture, span: Span, wanted: Span) -> ReducedTensor:
    """Some rows of a span's result."""
    if not _has_rows(capture) or span == wanted:
        return reduced
    part = wanted[0] - span[0], wanted[1] - span[0]
    values = RowTensor(reduced.values, capture.reduced_info).select(part).value.contiguous()
    if reduced.scale is None:
        return Reduced(values)
    entries = capture.reduced_info.entries_per_row
    return Reduced(values, reduced.scale[part[0] * entries : part[1] * entries])


class JoinedRows:
    """Results as if all ``row_count`` rows had been in one forward: each part is copied into the whole as it arrives.

    Results that wait for other parts are thus in memory once, and keep no other request's rows alive. Threads may add
    parts of different rows concurrently.
    """

    def __init__(self, row_count: int) -> None:
        self._row_count = row_count
        self._whole: dict[Capture, ReducedArray] = {}
        self._lock = threading.Lock()

    def add(self, start: int, stop: int, part: Mapping[Capture, ReducedArray]) -> dict[Capture, ReducedArray]:
        """Add rows ``start`` to ``stop``; returns the whole, in which rows not added yet are uninitialised.

        A part of all rows is the whole. Arrays that are the same for all rows come from the first part. A part may be
        added again.
        """
        if (count := stop - start) == self._row_count:
            return dict(part)
        for capture, reduced in part.items():
            if capture.info.row_axis is None:
                with self._lock:
                    self._whole.setdefault(capture, Reduced(*map(np.copy, reduced.parts)))
                continue
            axes = capture.reduced_info.row_axis or 0, 0  # of the values and of their scale
            with self._lock:
                if capture not in self._whole:
                    empty = [self._allocate(*each, count) for each in zip(reduced.parts, axes, strict=False)]
                    self._whole[capture] = Reduced(*empty)
            for whole, rows, axis in zip(self._whole[capture].parts, reduced.parts, axes, strict=False):
                entries = rows.shape[axis] // count
                whole[(slice(None),) * axis + (slice(start * entries, stop * entries),)] = rows
        return self._whole

    def _allocate(self, rows: Array, axis: int, count: int) -> Array:
        shape = list(rows.shape)
        shape[axis] = shape[axis] // count * self._row_count
        return np.empty(shape, rows.dtype)
