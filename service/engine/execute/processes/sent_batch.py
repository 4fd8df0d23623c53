"""A batch as it goes to a worker, and what comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from layertap.models.errors import LayertapError
from layertap.service.engine.execute.forward_batch import ForwardBatch, ForwardSlice, ForwardSpec, Results, SliceResult
from layertap.service.engine.execute.processes.channel import LargeBytes
from layertap.service.engine.execute.processes.messages import ExtendBatch, RunBatch, SentResult, SentSlice, SentSpec

MAX_SPECS = 64  # a batch with more has a larger table
Key = tuple[int, int, int, int]


class SpecTable:
    """The places of the specs used most recently; for one thread at a time."""

    def __init__(self) -> None:
        self._places: OrderedDict[Key, tuple[int, ForwardSpec]] = OrderedDict()

    def take_places(self, specs: Iterable[ForwardSpec]) -> tuple[list[int], dict[int, SentSpec]]:
        """The places of a batch's specs, and by place those that the worker does not know yet."""
        specs = list(specs)
        for spec in specs:  # what the batch has stays, whatever else has to go
            if _make_key(spec) in self._places:
                self._places.move_to_end(_make_key(spec))
        size = max(MAX_SPECS, len(specs))
        new: dict[int, SentSpec] = {}
        for spec in specs:
            key = _make_key(spec)
            if key not in self._places:
                place = len(self._places) if len(self._places) < size else self._places.popitem(last=False)[1][0]
                self._places[key] = place, spec
                new[place] = SentSpec(spec, tuple(spec.plan.captures))
        return [self._places[_make_key(spec)][0] for spec in specs], new


def _make_key(spec: ForwardSpec) -> Key:
    """What tells specs apart: plans are used again, and what an entry keeps has an id that nothing else has."""
    return id(spec.plan), id(spec.verified_by), id(spec.resumption), id(spec.compiled)


def make_run_batch(batch: ForwardBatch, specs: SpecTable) -> RunBatch:
    """A batch for a worker that knows these specs."""
    slices, new = _make_sent_slices(batch.slices, specs)
    may_grow = any(each.encoded for each in batch.slices) and not batch.unsplittable
    return RunBatch(slices, new, batch.threads, batch.threads_alone, batch.padded_rows, batch.unsplittable, may_grow)


def make_extension(slices: Sequence[ForwardSlice], threads: int, specs: SpecTable) -> ExtendBatch:
    """What joins a batch, which has so many threads then, for a worker that knows these specs."""
    return ExtendBatch(*_make_sent_slices(slices, specs), threads)


def _make_sent_slices(
    slices: Sequence[ForwardSlice], specs: SpecTable
) -> tuple[tuple[SentSlice, ...], dict[int, SentSpec]]:
    """Slices as a worker gets them, and those of their specs that it does not know yet."""
    places, new = specs.take_places(each.spec for each in slices)
    return tuple(_make_sent(each, place) for each, place in zip(slices, places, strict=True)), new


def _make_sent(each: ForwardSlice, spec: int) -> SentSlice:
    encoded = tuple(LargeBytes(picture.data) for picture in each.encoded)
    return SentSlice(each.place, each.start, each.stop, each.inputs, spec, encoded, each.first_row)


def restore_result(sent: SentResult, forward_slice: ForwardSlice) -> SliceResult:
    """What became of rows."""
    results: Results | LayertapError | RuntimeError
    if isinstance(sent.results, Exception):
        results = sent.results
    else:
        found = dict(zip(forward_slice.spec.plan.captures, sent.results, strict=True))
        results = forward_slice.keep(sent.start, sent.stop, found)
    return SliceResult(sent.place, sent.start, sent.stop, results, sent.rows, sent.forward, sent.copy, sent.decode)
