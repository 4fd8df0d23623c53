"""Several requests in one forward: the rows of each, and its share of what the hooks captured."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.models.catalog.row_tensor import Span
from layertap.models.devices import transfer
from layertap.models.plan.plan import Capture, ResolvedIntervention, ResolvedObjective
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

    @property
    def depends_on_length(self) -> bool:
        """Whether it needs as many tokens as its plan was made for, padding included."""
        infos = [each.info for each in (*self.captures, *self.interventions)]
        infos += [self.objective.info] if self.objective is not None else []
        folded = any(info.merges_tokens or info.row_axis in info.token_axes for info in infos)
        return folded or bool(self.calls) or any(each.info.token_axes and each.length is None for each in self.captures)


@dataclass(frozen=True)
class BatchActivations:
    """What the hooks of one forward captured: each capture reduced for the rows of each request by themselves.

    Hooks never reduce rows of two requests together: sums and powers of several rows are rounded differently from those
    of one, and an answer must not depend on its neighbours. A graph reduces its whole batch, which is then cut.
    """

    pieces: Mapping[tuple[Capture, Span | None], ReducedTensor]  # None: all rows, which can't be separated

    def select(self, request_slice: RequestSlice) -> dict[Capture, ReducedTensor]:
        """One request's results; those of all rows are shared with its neighbours: read-only."""
        return {capture: self.pieces[capture, find_span(capture, request_slice)] for capture in request_slice.captures}

    def to_host(self) -> BatchActivations:
        """The same in the host's memory: from another device all of it comes in one copy."""
        host = iter(transfer.copy_packed([part for reduced in self.pieces.values() for part in reduced.parts]))
        return BatchActivations(
            {key: Reduced(*islice(host, len(reduced.parts))) for key, reduced in self.pieces.items()}
        )


def find_span(capture: Capture, request_slice: RequestSlice) -> Span | None:
    """The rows that a request wants a capture for; None for all of the forward, if they can't be separated."""
    has_rows = capture.info.row_axis is not None and not capture.info.crosses_rows
    return request_slice.span if has_rows else None


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
