"""The jobs of a request from the moment they wait to their answer, as the scheduler sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise

from layertap.models.errors import LayertapError, RequestError, TooLargeError
from layertap.service.engine.batch import NEVER, Batch, Interval, Job, Results, SliceResult
from layertap.service.timings import Span


class InFlight:
    """What waits for its forward, or runs; ``answer`` has each job's results in the end.

    ``started``: a batch with some of them has begun.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.answer: asyncio.Future[list[Results]] = asyncio.get_running_loop().create_future()
        self.started = False
        self._submitted = time.perf_counter()
        self._missing = sum(job.rows for job in jobs)
        self._results: dict[Job, Results] = {}
        self._decodes: list[Interval] = []
        self._forwards: list[Interval] = []
        self._copies: list[Interval] = []
        self._batch_rows: dict[Interval, int] = {}  # how many rows shared each forward
        self._notes: dict[str, str] = {}

    def add(self, job: Job, batch: Batch, result: SliceResult) -> None:
        """Keep what became of some rows; the answer is there with the first error, or with the last rows."""
        self._forwards.append(result.forward)
        self._batch_rows[result.forward] = result.rows
        self._copies.append(result.copy)
        if result.decode != NEVER:
            self._decodes.append(result.decode)
        self._notes["fill"] = f"{result.rows}/{batch.key.max_rows}"
        self._notes["depth"] = f"{batch.depth:.4g}"
        if isinstance(result.results, Exception):
            self.fail(_name_input(result.results, job.input_index))
            return
        self._results[job] = result.results
        self._missing -= result.stop - result.start
        if not self._missing and not self.answer.done():
            self.answer.set_result([self._results[each] for each in self.jobs])

    def fail(self, error: Exception) -> None:
        """Answer with an error, where there is no answer yet."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def record(self) -> None:
        """Note in the request's timings how long each step took, each second once though parts ran side by side."""
        timings, queued = self.jobs[0].timings, self._submitted
        if self._forwards:
            forward, copy, decode = count_seconds(self._forwards, self._copies, self._decodes)
            ran = (*self._forwards, *self._copies, *self._decodes)
            end = max(end for _, end in ran)
            if self._decodes:
                timings.add("decode", decode, self._list_spans("decode", self._decodes))
            waits = [Span("queue", *interval) for interval in find_gaps(queued, ran)]
            timings.add("queue", max(end - queued - forward - copy - decode, 0.0), waits)
            timings.add("forward", forward, self._list_spans("forward", self._forwards))
            timings.add("copy", copy, self._list_spans("copy", self._copies))
            timings.describe(batch_rows=max(timings.facts.batch_rows, *self._batch_rows.values()))
        elif not self.started:
            timings.add_span("queue", queued, time.perf_counter())
        timings.notes.update(self._notes)

    def _list_spans(self, step: str, intervals: Sequence[Interval]) -> list[Span]:
        """Each interval once, though several jobs of the request shared it; none of what never ran."""
        ran = [interval for interval in dict.fromkeys(intervals) if interval != NEVER]
        rows = self._batch_rows if step == "forward" else {}
        return [Span(step, *interval, rows.get(interval, 0)) for interval in ran]


def _name_input(error: LayertapError | RuntimeError, input_index: int | None) -> LayertapError | RuntimeError:
    """The error with the input that it is of, where a job has just one, and its sender may do something."""
    if input_index is None or not isinstance(error, (RequestError, TooLargeError)):
        return error
    return error.of_input(input_index)


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
