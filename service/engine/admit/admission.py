"""What may come in: bytes in memory, rows in a model's queue, work of explanations; and whether it is done in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from layertap.models.errors import TooLargeError
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.errors import QueueFullError, QueueTooLongError, unloading_error
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings
from layertap.service.timings import Timings

WAIT_MARGIN = 1.25  # what is expected may take so many times as long
LENIENCY = 2.0  # where nothing else is planned: it may take so many times less
TURNS = 2  # explanations that run on a device at a time: one prepares its next rows while another's are computed


@dataclass(eq=False)
class PlannedWork:
    """Changed inputs that a request will queue a few at a time, and what makes them fewer, in words.

    ``seconds``: of all their forwards on one thread, by what was measured at loading; ``found`` of the rows are known
    to be needed, ``done`` are answered; ``begun``: it has had its first turn, or waits for it.
    """

    handle: ModelHandle
    rows: int
    seconds: float
    smaller: str
    found: int = 0
    done: int = 0
    begun: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def seconds_left(self) -> float:
        """Estimated seconds for the remaining rows, running alone."""
        return max(1 - self.done / max(self.rows, 1), 0.0) * self.handle.pace.estimate_seconds(self.seconds)


class AdmissionControl:
    """What is admitted now. For the event loop only.

    ``handles`` are those of this process, by the names of their models; it grows and shrinks with them. ``used_bytes``
    counts bodies as they arrive, rows, and the replies that are expected.
    """

    def __init__(self, handles: Mapping[str, ModelHandle], settings: Settings, metrics: Metrics) -> None:
        self.used_bytes = 0
        self.handles = handles
        self.settings = settings
        self.metrics = metrics
        self._planned: list[PlannedWork] = []

    def admit(self, deadline: float, timings: Timings | None = None) -> Ticket:
        """A place for a request that is over at a moment on the monotonic clock; given back after its block."""
        return Ticket(self, deadline, timings or Timings())

    def estimate_wait(self, handle: ModelHandle, rows: int) -> float:
        """Seconds until so many rows of a model are done: others on its device get as much time if they want it.

        Any thread may ask.
        """
        seconds = rows * handle.seconds_per_row
        others = [each for each in tuple(self.handles.values()) if each is not handle and _share_device(each, handle)]
        return seconds + sum(min(seconds, other.rows * other.seconds_per_row) for other in others)

    @contextmanager
    def plan_work(self, work: PlannedWork, deadline: float) -> Iterator[None]:
        """Have work count for others until the block ends; QueueTooLongError where it can't be done in time.

        What else is planned for its device gets as much time, if it wants it. With nothing planned it is refused only
        where there is no hope: what was measured may be slower than what will be.
        """
        self._check_work(work, max(deadline - time.monotonic(), 0.0))
        self._planned.append(work)
        try:
            yield
        finally:
            self._planned.remove(work)
            for other in self._planned:
                other.changed.set()

    async def wait_for_turn(self, work: PlannedWork, deadline: float) -> None:
        """Return once it is among those that run, which have least left to do; DeadlineError.

        Short work does not wait for long work. Where the deadlines leave no time for all of it, the first ones are done
        in time instead of all being late.
        """
        work.begun = True
        while not self._has_turn(work):
            work.changed.clear()
            await wait_until(deadline, work.changed.wait())

    def _check_work(self, work: PlannedWork, left: float) -> None:
        seconds = work.seconds_left
        wait = sum(min(seconds, other.seconds_left) for other in self._list_others(work))
        if wait:
            if WAIT_MARGIN * (seconds + wait) > left:
                taken = f"about {seconds:.1f} s, and explanations that run already {wait:.1f} s"
                hint = f"come again later, or run fewer changed inputs: {work.smaller}"
                self._refuse_work(work, taken, hint, wait, seconds + wait)
            return
        alone = work.handle.pace.estimate_least_seconds(work.seconds)
        if alone / LENIENCY > left:
            hint = f"run at most {max(int(work.rows * left / alone), 1)} changed inputs: {work.smaller}"
            if alone > self.settings.deadline_s:
                hint += ", or raise LAYERTAP_DEADLINE_S"
            self._refuse_work(work, f"about {alone:.1f} s", hint, alone, alone)

    def _refuse_work(self, work: PlannedWork, taken: str, hint: str, retry_after: float, needed_s: float) -> NoReturn:
        self.metrics.count_refused("deadline")
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
        return [each for each in self._planned if each is not work and _share_device(each.handle, work.handle)]


class Ticket(AbstractContextManager["Ticket"]):
    """One request's place: the bytes that it holds, the rows that it has in its model's queue, its deadline, timings.

    ``nbytes`` are at first those of the request's body. ``handles`` answer it to its end, by the names that it asks
    for: another version of a model that comes meanwhile is not for it.
    """

    def __init__(self, control: AdmissionControl, deadline: float, timings: Timings) -> None:
        self.deadline = deadline
        self.timings = timings
        self.nbytes = 0
        self.handles: dict[str | None, ModelHandle] = {}
        self._control = control
        self._holds = ExitStack()
        self._handle: ModelHandle | None = None
        self._rows = 0

    def hold(self, name: str | None, handle: ModelHandle) -> ModelHandle:
        """Have a handle answer for a model's name to the end of this request."""
        self.handles[name] = handle
        self._holds.enter_context(handle.hold())
        return handle

    def reserve_bytes(self, size: int) -> None:
        """Hold so many bytes more; QueueFullError where there are none now, TooLargeError where there never are."""
        control, limit = self._control, self._control.settings.max_queue_bytes
        if self.nbytes + size > limit:
            detail = f"the request needs {self.nbytes + size} bytes, the queue holds {limit}"
            raise TooLargeError(detail, hint="pool the layers, ask for fewer, or send fewer or smaller inputs")
        if control.used_bytes + size > limit:
            control.metrics.count_refused("queue_bytes")
            detail = f"the queue holds {control.used_bytes} bytes of {limit}"
            waits = (control.estimate_wait(each, each.rows) for each in control.handles.values())
            raise QueueFullError(detail, hint="come again later", retry_after=max(waits, default=0.0))
        control.used_bytes += size
        self.nbytes += size

    @contextmanager
    def return_bytes(self) -> Iterator[None]:
        """Give back what is reserved in the block once it ends."""
        before = self.nbytes
        try:
            yield
        finally:
            self._control.used_bytes -= max(self.nbytes - before, 0)
            self.nbytes = min(self.nbytes, before)

    @contextmanager
    def queue_rows(self, handle: ModelHandle, rows: int) -> Iterator[None]:
        """Hold so many rows of a model's queue until the block ends; as ``resize``, UnavailableError."""
        if handle.answers == "none":
            raise unloading_error(handle.name, self._control.estimate_wait(handle, handle.rows))
        self._handle = handle
        try:
            self.resize(rows)
            yield
        finally:
            self._handle = None
            handle.add_rows(-self._rows)
            self._rows = 0

    def resize(self, rows: int) -> None:
        """Hold another number of rows, where any are held.

        QueueFullError where the queue is full, QueueTooLongError where it is so long that the deadline would pass,
        TooLargeError where it could never hold as many.
        """
        if self._handle is None:
            return
        if rows > self._rows:  # who has a place keeps it, whoever came later
            self._check_rows(self._handle, rows)
        self._handle.add_rows(rows - self._rows)
        self._rows = rows

    def _check_rows(self, handle: ModelHandle, rows: int) -> None:
        control, limit, others = self._control, self._control.settings.max_queue_rows, handle.rows - self._rows
        if rows > limit:
            detail = f"{rows} inputs are more than the queue holds, {limit}"
            raise TooLargeError(detail, hint=f"send at most {limit} at once")
        wait = control.estimate_wait(handle, others)
        if others + rows > limit:
            control.metrics.count_refused("queue_rows")
            detail, room = f"the queue holds {others} rows of {limit}", limit - others
            fewer = f", or send at most {room} input{'s' if room > 1 else ''} now" if room > 0 else ""
            raise QueueFullError(detail, hint=f"come again later{fewer}", retry_after=wait)
        needed = WAIT_MARGIN * (wait + rows * handle.seconds_per_row)
        if others and needed > self.deadline - time.monotonic():
            control.metrics.count_refused("deadline")
            raise QueueTooLongError(
                f"{others} rows wait already, which takes about {wait:.1f} s: the deadline would pass",
                retry_after=wait,
                needed_s=needed,
            )

    def __exit__(self, *_: object) -> None:
        self._control.used_bytes -= self.nbytes
        self.nbytes = 0
        self.handles.clear()
        self._holds.close()


def _share_device(one: ModelHandle, other: ModelHandle) -> bool:
    return not set(one.devices).isdisjoint(other.devices)
