"""Several requests in one forward: which rows are whose, and what each gets of what the hooks took."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from layertap.models.capture.reduction import ReducedTensor
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.devices import transfer
from layertap.models.interventions.resolve import ResolvedIntervention, ResolvedObjective
from layertap.models.selection.plan import Capture

EXACT = frozenset({"none", "cls", "flatten"})  # not max: which of two zeros or NaNs it gives hangs on their places
Span = tuple[int, int]  # rows from one up to, not including, the other


@dataclass(frozen=True)
class RequestSlice:
    """One request's part of a forward: rows ``start`` to ``stop``, what it wants of them, what it changes there.

    ``goal`` is what it differentiates, where it wants gradients; ``first`` is its first row's number in the request.
    """

    start: int
    stop: int
    captures: frozenset[Capture]
    interventions: tuple[ResolvedIntervention, ...] = ()
    objective: ResolvedObjective | None = None
    first: int = 0

    @property
    def span(self) -> Span:
        """Its rows."""
        return self.start, self.stop


def find_spans(shares: Iterable[RequestSlice], rows: int) -> dict[Capture, tuple[Span, ...]]:
    """The rows that each capture is wanted for.

    Neighbours that want the same are taken in one piece where that makes no other bits: sums and powers of several rows
    are rounded otherwise than those of one, and an answer must not hang on its neighbours. What does not belong to
    single rows (``row_axis`` None, ``mixed``) is taken whole.
    """
    found: dict[Capture, list[Span]] = {}
    for share in sorted(shares, key=lambda share: share.start):
        for capture in share.captures:
            spans = found.setdefault(capture, [])
            if not _by_row(capture):
                spans[:] = [(0, rows)]
            elif spans and spans[-1][1] == share.start and _is_exact(capture):
                spans[-1] = (spans[-1][0], share.stop)
            else:
                spans.append((share.start, share.stop))
    return {capture: tuple(spans) for capture, spans in found.items()}


def select_span_rows(value: Tensor, leaf: TensorInfo, span: Span, rows: int) -> Tensor:
    """The part of a tensor that belongs to a span of a forward's rows; a view."""
    return value if span == (0, rows) else select_rows(value, leaf, span)


def select_rows(value: Tensor, leaf: TensorInfo, span: Span) -> Tensor:
    """So many rows of a tensor that a catalogue knows; a view, all of it where it is the same for all rows."""
    if leaf.row_axis is None:
        return value
    return value.narrow(leaf.row_axis, span[0] * leaf.entries_per_row, (span[1] - span[0]) * leaf.entries_per_row)


@dataclass(frozen=True)
class BatchActivations:
    """What the hooks of one forward took: each capture reduced, span by span."""

    pieces: Mapping[tuple[Capture, Span], ReducedTensor]

    @cached_property
    def _by_capture(self) -> Mapping[Capture, Sequence[tuple[Span, ReducedTensor]]]:
        found: dict[Capture, list[tuple[Span, ReducedTensor]]] = {}
        for (capture, span), reduced in sorted(self.pieces.items(), key=lambda item: item[0][1]):
            found.setdefault(capture, []).append((span, reduced))
        return found

    def select(self, share: RequestSlice) -> dict[Capture, ReducedTensor]:
        """One request's results; they may be views of memory that neighbours share, and nobody writes to it."""
        found = {}
        for capture in share.captures:
            spans = self._by_capture[capture]
            at = bisect_right(spans, share.start, key=lambda each: each[0][0]) - 1 if _by_row(capture) else 0
            found[capture] = _cut(spans[at][1], capture, spans[at][0], share)
        return found

    def to_host(self) -> BatchActivations:
        """The same in the host's memory: from another device all of it comes in one copy."""
        tensors = [part for reduced in self.pieces.values() for part in (reduced.values, reduced.scale)]
        host = iter(copy_packed([tensor for tensor in tensors if tensor is not None]))
        return BatchActivations(
            {
                key: ReducedTensor(next(host), next(host) if reduced.scale is not None else None)
                for key, reduced in self.pieces.items()
            }
        )


ALIGNMENT = 16  # bytes: any dtype may begin at a multiple of it


def copy_packed(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors of one device as tensors of the host: one copy for all of them, none where they are there already."""
    if not tensors or tensors[0].device.type == "cpu":
        return tensors
    return unpack(transfer.to_host(pack(tensors)), tensors)


def pack(tensors: list[Tensor]) -> Tensor:
    """The bytes of all tensors in one, each begun at a multiple of ``ALIGNMENT``."""
    parts = []
    for tensor in tensors:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        parts += [flat, flat.new_empty(-len(flat) % ALIGNMENT)]
    return torch.cat(parts)


def unpack(data: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """The inverse of ``packed``: views of its bytes in the shapes and dtypes of the tensors given."""
    found, at = [], 0
    for tensor in like:
        found.append(data[at : at + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape))
        at += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return found


def join_parts(capture: Capture, parts: list[ReducedTensor]) -> ReducedTensor:
    """A request's rows from several forwards as those of one; what is the same for all rows is there once."""
    if len(parts) == 1 or capture.leaf.row_axis is None:
        return parts[0]
    values = torch.cat([part.values for part in parts], dim=capture.rows_axis)
    scales = [scale for part in parts if (scale := part.scale) is not None]
    return ReducedTensor(values, torch.cat(scales) if scales else None)


def _is_exact(capture: Capture) -> bool:
    """Whether a result's numbers are the captured ones, and none is made of several."""
    how = capture.reduction
    return how.pool in EXACT and not how.normalize and how.stats is None


def _by_row(capture: Capture) -> bool:
    return capture.leaf.row_axis is not None and not capture.leaf.mixed


def _cut(reduced: ReducedTensor, capture: Capture, span: Span, share: RequestSlice) -> ReducedTensor:
    if not _by_row(capture) or span == (share.start, share.stop):
        return reduced
    each = 1 if capture.reduction.is_by_row else capture.unpadded.entries_per_row
    start, length = (share.start - span[0]) * each, (share.stop - share.start) * each
    values = reduced.values.narrow(capture.rows_axis, start, length).contiguous()
    scale = reduced.scale.narrow(0, start, length) if reduced.scale is not None else None
    return replace(reduced, values=values, scale=scale)
