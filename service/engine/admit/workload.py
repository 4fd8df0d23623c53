"""What explanations have yet to run, a few rows at a time: whether one more is done in time, and whose turn it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from layertap.service.engine.deadline import wait_until
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.errors import QueueTooLongError
from layertap.service.metrics import Metrics

WAIT_MARGIN = 1.25  # what is expected may take so many times as long
LENIENCY = 2.0  # where nothing else is planned: it may take so many times less
TURNS = 2  # explanations that run on a device at a time: one prepares its next rows while another's are computed


@dataclass(eq=False)
class PlannedWork:
    """Changed inputs that a request will queue a few at a time, and what makes them fewer, in words.

    ``seconds``: of all their forwards on one thread, by what was measured at loading; ``done`` of the rows are
    answered; ``begun``: it has had its first turn, or waits for it.
    """

    handle: ModelHandle
    rows: int
    seconds: float
    smaller: str
    done: int = 0
    begun: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def seconds_left(self) -> float:
        """How long what is left takes as of late, with nothing beside it."""
        return max(1 - self.done / max(self.rows, 1), 0.0) * self.handle.estimate_seconds(self.seconds)


class Workload:
    """The planned work of all requests. For the event loop only."""

    def __init__(self, deadline_s: float, metrics: Metrics) -> None:
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._planned: list[PlannedWork] = []

    @contextmanager
    def plan(self, work: PlannedWork, deadline: float) -> Iterator[None]:
        """Have work count for others until the block ends; QueueTooLongError where it can't be done in time.

        What else is planned for its device gets as much time, if it wants it. With nothing planned it is refused only
        where there is no hope: what was measured may be slower than what will be.
        """
        self._check(work, max(deadline - time.monotonic(), 0.0))
        self._planned.append(work)
        try:
            yield
        finally:
            self._planned.remove(work)
            for other in self._planned:
                other.changed.set()

    async def wait_for_turn(self, work: PlannedWork, deadline: float) -> None:
        """Return once it is among those that run, which have least left to do; DeadlineError.

        So what is short does not wait for what is long, and where there is too much for the deadlines of all the first
        ones are done in time, in place of none.
        """
        work.begun = True
        while not self._has_turn(work):
            work.changed.clear()
            await wait_until(deadline, work.changed.wait())

    def _check(self, work: PlannedWork, left: float) -> None:
        seconds = work.seconds_left
        wait = sum(min(seconds, other.seconds_left) for other in self._list_others(work))
        if wait:
            if WAIT_MARGIN * (seconds + wait) > left:
                taken = f"about {seconds:.1f} s, and explanations that run already {wait:.1f} s"
                hint = f"come again later, or run fewer changed inputs: {work.smaller}"
                self._refuse(work, taken, hint, wait, seconds + wait)
            return
        alone = work.handle.estimate_least_seconds(work.seconds)
        if alone / LENIENCY > left:
            hint = f"run at most {max(int(work.rows * left / alone), 1)} changed inputs: {work.smaller}"
            if alone > self._deadline_s:
                hint += ", or raise LAYERTAP_DEADLINE_S"
            self._refuse(work, f"about {alone:.1f} s", hint, alone, alone)

    def _refuse(self, work: PlannedWork, taken: str, hint: str, retry_after: float, needed_s: float) -> NoReturn:
        self._metrics.count_refused("deadline")
        detail = f"{work.rows} changed inputs take {taken}: the deadline would pass"
        raise QueueTooLongError(detail, hint=hint, retry_after=retry_after, needed_s=needed_s)

    def _has_turn(self, work: PlannedWork) -> bool:
        """Whether few enough others have less to do; of equals the first that came is first."""
        place, seconds = self._planned.index(work), work.seconds_left
        begun = [other for other in self._list_others(work) if other.begun]
        ahead = [(other.seconds_left, self._planned.index(other)) < (seconds, place) for other in begun]
        return sum(ahead) < TURNS * max(len(work.handle.devices), 1)  # one that is unloaded has none

    def _list_others(self, work: PlannedWork) -> list[PlannedWork]:
        """What else is planned for its device."""
        devices = set(work.handle.devices)
        return [other for other in self._planned if other is not work and devices & set(other.handle.devices)]
