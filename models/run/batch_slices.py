"""Several requests in one forward: the rows of each, and its share of what the hooks captured."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from layertap.models.catalog.row_tensor import RowTensor, Span
from layertap.models.devices import transfer
from layertap.models.plan.plan import Capture, ResolvedIntervention, ResolvedObjective
from layertap.models.plan.poolings import POOLINGS
from layertap.models.run.reduction import ReducedArray, ReducedTensor


@dataclass(frozen=True)
class RequestSlice:
    """One request's part of a forward: rows ``start`` to ``stop``, its captures and its interventions.

    ``objective`` is what it differentiates, where it wants gradients; ``row_offset`` is its first row's number in the
    request. ``calls``: those that its forward must make, if others are possible; it then runs to its end.
    """

    start: int
    stop: int
    captures: frozenset[Capture]
    interventions: tuple[ResolvedIntervention, ...] = ()
    objective: ResolvedObjective | None = None
    row_offset: int = 0
    calls: tuple[tuple[tuple[str, int, str], int], ...] = ()

    @property
    def span(self) -> Span:
        """Its rows."""
        return self.start, self.stop


def find_spans(slices: Iterable[RequestSlice], row_count: int) -> dict[Capture, tuple[Span, ...]]:
    """The rows that each capture is wanted for.

    Adjacent requests with the same capture share a span if that does not change bits: sums and powers of several rows
    are rounded differently from those of one, and an answer must not depend on its neighbours. Tensors that do not
    divide into rows (``row_axis`` None, ``crosses_rows``) are taken whole.
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
        """One request's results; they may be views of memory that neighbours share, and nobody writes to it."""
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
            {key: ReducedTensor(*islice(host, len(reduced.parts))) for key, reduced in self.pieces.items()}
        )


def _is_exact(capture: Capture) -> bool:
    """Whether a result's numbers are the captured ones, and none is made of several."""
    reduction = capture.reduction
    # Not max: which of two zeros or NaNs it gives depends on their places.
    makes = reduction.project, reduction.stats, reduction.metric
    combines = reduction.normalize or any(each is not None for each in makes)
    return not combines and not POOLINGS[reduction.pool].combines


def _has_rows(capture: Capture) -> bool:
    return capture.info.row_axis is not None and not capture.info.crosses_rows


def _select_reduced(reduced: ReducedTensor, capture: Capture, span: Span, wanted: Span) -> ReducedTensor:
    """Some rows of what was reduced for a span of them."""
    if not _has_rows(capture) or span == wanted:
        return reduced
    part = wanted[0] - span[0], wanted[1] - span[0]
    values = RowTensor(reduced.values, capture.reduced_info).select(part).value.contiguous()
    if reduced.scale is None:
        return ReducedTensor(values)
    entries = capture.reduced_info.entries_per_row
    return ReducedTensor(values, reduced.scale[part[0] * entries : part[1] * entries])


class JoinedRows:
    """Results as if all rows had been in one forward: each part is copied into the whole as it arrives.

    Results that wait for other parts are thus in memory once, and keep no other request's rows alive. Threads may add
    parts of different rows concurrently.
    """

    def __init__(self, row_count: int) -> None:
        """The whole has ``row_count`` rows; its memory is allocated when the first part arrives."""
        self._row_count = row_count
        self._whole: dict[Capture, ReducedArray] = {}
        self._lock = threading.Lock()

    def add(self, start: int, stop: int, part: Mapping[Capture, ReducedArray]) -> dict[Capture, ReducedArray]:
        """Add rows ``start`` to ``stop``; returns the whole, in which rows not added yet are uninitialised.

        A part of all rows is the whole. Arrays that are the same for all rows come from the first part. A part may be
        added again.
        """
        if stop - start == self._row_count:
            return dict(part)
        with self._lock:
            for capture, reduced in part.items():
                if capture not in self._whole:
                    self._whole[capture] = _make_whole(capture, reduced, stop - start, self._row_count)
        for capture, reduced in part.items():
            if capture.info.row_axis is not None:
                axes = _list_row_axes(capture)
                for whole, rows, axis in zip(self._whole[capture].parts, reduced.parts, axes, strict=False):
                    entries = rows.shape[axis] // (stop - start)
                    chosen = slice(start * entries, start * entries + rows.shape[axis])
                    whole[(slice(None),) * axis + (chosen,)] = rows
        return self._whole


def _make_whole(capture: Capture, part: ReducedArray, part_count: int, row_count: int) -> ReducedArray:
    """Room for so many rows, of which a part has ``part_count``; what all rows share is copied."""
    if capture.info.row_axis is None:
        return ReducedArray(*map(np.copy, part.parts))
    whole = []
    for array, axis in zip(part.parts, _list_row_axes(capture), strict=False):
        shape = list(array.shape)
        shape[axis] = shape[axis] // part_count * row_count
        whole.append(np.empty(shape, array.dtype))
    return ReducedArray(*whole)


def _list_row_axes(capture: Capture) -> tuple[int, int]:
    """The axes that hold the rows in a result's values and in its scale."""
    return capture.reduced_info.row_axis or 0, 0
