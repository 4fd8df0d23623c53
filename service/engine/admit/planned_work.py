"""Admits and orders explanations, sweeps and optimisations, which run many changed inputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from layertap.models.errors import TooLargeError
from layertap.service.engine.admit.admission import WAIT_MARGIN, AdmissionControl
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.errors import QueueTooLongError
from layertap.service.settings import Settings

LENIENCY = 2.0  # work that runs alone may be this many times faster than estimated
CHUNK_ROWS = 32  # changed inputs queued at a time
OnProgress = Callable[[int, int], None]  # changed inputs that are done, and all of them
TURNS = 2  # works that run on a device at a time: one prepares rows while the other computes


@dataclass(eq=False)
class PlannedWork:
    """Changed inputs that a request queues a few at a time; ``hint`` says how to need fewer.

    ``seconds``: estimate for all forwards on one thread, by the load-time measurement. ``found``: rows known to be
    needed; ``done``: rows answered. ``begun``: it has had its first turn or waits for it.
    """

    control: AdmissionControl
    handle: ModelHandle
    rows: int
    seconds: float
    hint: str
    found: int = 0
    done: int = 0
    begun: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def seconds_left(self) -> float:
        """Estimated seconds for the remaining rows, running alone."""
        return max(1 - self.done / max(self.rows, 1), 0.0) * self.handle.pace.estimate_seconds(self.seconds)

    @contextmanager
    def count(self) -> Iterator[None]:
        """List this work among the unfinished ones until the block ends."""
        self.control.works.append(self)
        try:
            yield
        finally:
            self.control.works.remove(self)
            for other in self.control.works:
                other.changed.set()

    async def wait_for_turn(self, deadline: float) -> None:
        """Return once this work is among those with the least time left, which run; DeadlineError.

        Short work does not wait for long work. Under overload the first works finish in time instead of all being late.
        """
        self.begun = True
        while not self._has_turn():
            self.changed.clear()
            await wait_until(deadline, self.changed.wait())

    def check(self, deadline: float) -> None:
        """QueueTooLongError if the work can't be done in time.

        Each other work on the device is assumed to use up to as much time. Alone, it is refused only if it would be
        late even at ``LENIENCY`` times the measured speed: the measurement may be too slow.
        """
        left, seconds = max(deadline - time.monotonic(), 0.0), self.seconds_left
        wait = sum(min(seconds, other.seconds_left) for other in self._list_others())
        if wait:
            if WAIT_MARGIN * (seconds + wait) > left:
                taken = f"about {seconds:.1f} s, and what runs already {wait:.1f} s"
                hint = f"come again later, or run fewer changed inputs: {self.hint}"
                self._refuse(taken, hint, wait, seconds + wait)
            return
        alone = self.handle.pace.estimate_least_seconds(self.seconds)
        if alone / LENIENCY > left:
            hint = f"run at most {max(int(self.rows * left / alone), 1)} changed inputs: {self.hint}"
            if alone > self.control.settings.deadline_s:
                hint += ", or raise LAYERTAP_DEADLINE_S"
            self._refuse(f"about {alone:.1f} s", hint, alone, alone)

    def _refuse(self, taken: str, hint: str, retry_after: float, needed_s: float) -> NoReturn:
        self.control.metrics.count("refused_total", "deadline")
        detail = f"{self.rows} changed inputs take {taken}: the deadline would pass"
        raise QueueTooLongError(detail, hint=hint, retry_after=retry_after, needed_s=needed_s)

    def _has_turn(self) -> bool:
        """Whether few enough other works have less time left; ties go to the one that came first."""
        works, seconds = self.control.works, self.seconds_left
        begun = [other for other in self._list_others() if other.begun]
        ahead = [(other.seconds_left, works.index(other)) < (seconds, works.index(self)) for other in begun]
        return sum(ahead) < TURNS * max(len(self.handle.devices), 1)  # an unloaded model has no devices

    def _list_others(self) -> list[PlannedWork]:
        """The other works on its device."""
        return [each for each in self.control.works if each is not self and each.handle.shares_device(self.handle)]


def check_changed_inputs(count: int, rows: int, settings: Settings, hint: str) -> None:
    """TooLargeError if there are more changed inputs than allowed; ``hint`` says how to need fewer."""
    limit = settings.max_changed_inputs
    if count > limit:
        most = rows * limit // count
        detail = f"the request would run the model on {count} changed inputs, the limit is {limit}"
        raise TooLargeError(detail, hint=(f"send at most {most} inputs at once, or " if most else "") + hint)
