"""The jobs of a request from the moment they wait to their answer, as the scheduler sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from layertap.models.errors import RequestError, TooLargeError
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
        self._parts: list[SliceResult] = []

    def add(self, job: Job, batch: Batch, result: SliceResult) -> None:
        """Keep what became of some rows; the answer is there with the first error, or with the last rows."""
        self._parts.append(result)
        job.timings.notes.update(fill=f"{result.rows}/{batch.key.max_rows}", depth=f"{batch.depth:.4g}")
        outcome = result.results
        if isinstance(outcome, (RequestError, TooLargeError)) and job.input_index is not None:
            outcome = outcome.of_input(job.input_index)
        if isinstance(outcome, Exception):
            self.fail(outcome)
            return
        self._results[job] = outcome
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
        if self._parts:
            forwards, copies = [part.forward for part in self._parts], [part.copy for part in self._parts]
            decodes = [part.decode for part in self._parts if part.decode != NEVER]
            rows = {part.forward: part.rows for part in self._parts}
            forward, copy, decode = count_seconds(forwards, copies, decodes)
            ran = (*forwards, *copies, *decodes)
            end = max(end for _, end in ran)
            if decodes:
                timings.add("decode", decode, _list_spans("decode", decodes, {}))
            waits = [Span("queue", *interval) for interval in find_gaps(queued, ran)]
            timings.add("queue", max(end - queued - forward - copy - decode, 0.0), waits)
            timings.add("forward", forward, _list_spans("forward", forwards, rows))
            timings.add("copy", copy, _list_spans("copy", copies, {}))
            timings.facts.batch_rows = max(timings.facts.batch_rows, *rows.values())
        elif not self.started:
            timings.add_span("queue", queued, time.perf_counter())


def _list_spans(step: str, intervals: Sequence[Interval], rows: Mapping[Interval, int]) -> list[Span]:
    """Each interval once, though several jobs of the request shared it; none of what never ran."""
    return [Span(step, *each, rows.get(each, 0)) for each in dict.fromkeys(intervals) if each != NEVER]


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
