"""A batch as it goes to a worker, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

from layertap.models.errors import LayertapError
from layertap.service.engine.forward_batch import ForwardBatch, ForwardSlice, Results, SliceResult
from layertap.service.workers.channel import LargeBytes
from layertap.service.workers.messages import ExtendBatch, RunBatch, SentResult, SentSlice, SentSpec
from layertap.service.workers.spec_table import SpecTable


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
