"""A request from its first picture that waits to be decoded to its answer, as the scheduler sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from layertap.models.errors import LayertapError, RequestError, TooLargeError
from layertap.service.engine.execute.forward_batch import Interval, Results, SliceResult
from layertap.service.engine.request import Job
from layertap.service.engine.rows.rows import ItemAttempts
from layertap.service.engine.schedule.batch import Batch, DecodeTask, QueuedRequest, RowSlice
from layertap.service.timings import Span

if TYPE_CHECKING:
    from layertap.service.engine.models.model_handle import ModelHandle


NEVER: Interval = (0.0, 0.0)  # of a forward that failed


@dataclass(eq=False)
class InFlight:
    """What is decoded, waits for its forward, or runs; made on the event loop.

    ``answer`` belongs to the event loop, all else to the scheduler, under its lock. ``jobs`` are there once the rows
    are, by what the batcher sees of each; ``started``: a batch with some of them has begun. ``missing`` counts rows
    without results, ``parts`` are the others' by their first row; ``batch_rows`` how many shared each forward.
    """

    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    submitted: float = field(default_factory=time.perf_counter)
    decoded: float | None = None
    jobs: dict[QueuedRequest, Job] = field(default_factory=dict)
    started: bool = False
    missing: int = 0
    results: dict[QueuedRequest, Results] = field(default_factory=dict)
    decodes: list[Interval] = field(default_factory=list)
    forwards: list[Interval] = field(default_factory=list)
    copies: list[Interval] = field(default_factory=list)
    batch_rows: dict[Interval, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add_job(self, job: Job) -> None:
        """Wait for the results of a job, too."""
        self.jobs[job.queued] = job
        self.missing += job.rows

    def add(
        self, queued: QueuedRequest, batch: Batch, result: SliceResult
    ) -> list[Results] | LayertapError | RuntimeError | None:
        """Keep what became of some rows; the answer where that is it: an error, or each job's results."""
        self.forwards.append(result.forward)
        self.batch_rows[result.forward] = result.rows
        self.copies.append(result.copy)
        if result.decode != NEVER:
            self.decodes.append(result.decode)
        self.notes["fill"] = f"{result.rows}/{batch.key.max_rows}"
        self.notes["depth"] = f"{batch.depth:.4g}"
        if isinstance(result.results, Exception):
            return self._name_input(result.results, self.jobs[queued].input_index)
        self.results[queued] = result.results
        self.missing -= result.stop - result.start
        return None if self.missing else [self.results[each] for each in self.jobs]

    @staticmethod
    def _name_input(error: LayertapError | RuntimeError, input_index: int | None) -> LayertapError | RuntimeError:
        """The error with the input that it is of, where a job has just one, and its sender may do something."""
        if input_index is None or not isinstance(error, (RequestError, TooLargeError)):
            return error
        return error.of_input(input_index)

    def record(self) -> None:
        """Tell the request how long each step took, each second once though parts ran side by side."""
        if not self.jobs:
            return
        timings, queued = next(iter(self.jobs.values())).timings, self.submitted
        if self.decoded is not None:
            timings.add_span("decode", self.submitted, self.decoded)
            queued = self.decoded
        if self.forwards:
            forward, copy, decode = count_seconds(self.forwards, self.copies, self.decodes)
            ran = (*self.forwards, *self.copies, *self.decodes)
            end = max(end for _, end in ran)
            if self.decodes:
                timings.add("decode", decode, self._list_spans("decode", self.decodes))
            waits = [Span("queue", *interval) for interval in find_gaps(queued, ran)]
            timings.add("queue", max(end - queued - forward - copy - decode, 0.0), waits)
            timings.add("forward", forward, self._list_spans("forward", self.forwards))
            timings.add("copy", copy, self._list_spans("copy", self.copies))
            timings.describe(batch_rows=max(timings.facts.batch_rows, *self.batch_rows.values()))
        elif not self.started:
            timings.add_span("queue", queued, time.perf_counter())
        timings.notes.update(self.notes)

    def _list_spans(self, step: str, intervals: Sequence[Interval]) -> list[Span]:
        """Each interval once, though several jobs of the request shared it; none of what never ran."""
        ran = [interval for interval in dict.fromkeys(intervals) if interval != NEVER]
        rows = self.batch_rows if step == "forward" else {}
        return [Span(step, *interval, rows.get(interval, 0)) for interval in ran]


def start_jobs(slices: Sequence[RowSlice], in_flight: Mapping[QueuedRequest, InFlight]) -> dict[QueuedRequest, Job]:
    """The jobs whose rows are in a batch from now on."""
    jobs = {}
    for row_slice in slices:
        flight = in_flight[row_slice.request]
        flight.started = True
        jobs[row_slice.request] = flight.jobs[row_slice.request]
    return jobs


@dataclass(eq=False, kw_only=True)
class PendingDecode(DecodeTask):
    """Something to decode: what does it, for which model, and who waits.

    It gives rows, or a job that is ready to run.
    """

    handle: ModelHandle
    decode: Callable[[], ItemAttempts | Job]
    flight: InFlight


def find_gaps(begin: float, intervals: Sequence[Interval]) -> list[Interval]:
    """When none of the intervals was under way, from a moment to the beginning of the last; none of what never ran."""
    gaps, reached = [], begin
    for started, ended in sorted(interval for interval in intervals if interval != NEVER):
        if started > reached:
            gaps.append((reached, started))
        reached = max(reached, ended)
    return gaps


def count_seconds(*steps: Sequence[Interval]) -> list[float]:
    """Seconds of each step, whose parts may be side by side; what several have at once counts for the first of them."""
    reached = [
        _count_covered([interval for step in steps[:count] for interval in step]) for count in range(len(steps) + 1)
    ]
    return [after - before for before, after in pairwise(reached)]


def _count_covered(intervals: list[Interval]) -> float:
    """Seconds that lie in at least one of them."""
    seconds, reached = 0.0, 0.0
    for begin, end in sorted(intervals):
        seconds += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return seconds
