"""What may come in: bytes in memory, rows in a model's queue, and whether they can be answered in time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from layertap.models.errors import TooLargeError
from layertap.service.engine.admit.workload import WAIT_MARGIN, PlannedWork, Workload
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.errors import QueueFullError, QueueTooLongError, unloading_error
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings
from layertap.service.timings import Timings


class AdmissionControl:
    """What is admitted now. For the event loop only.

    ``handles`` are those of this process, by the names of their models; it grows and shrinks with them. ``used_bytes``
    counts bodies as they arrive, rows, and the replies that are expected. ``workload`` is what explanations plan.
    """

    def __init__(self, handles: Mapping[str, ModelHandle], settings: Settings, metrics: Metrics) -> None:
        self.used_bytes = 0
        self.workload = Workload(settings.deadline_s, metrics)
        self._handles = handles
        self._settings = settings
        self._metrics = metrics

    @contextmanager
    def admit(self, deadline: float, timings: Timings | None = None) -> Iterator[Ticket]:
        """A place for a request that is over at a moment on the monotonic clock; given back after the block."""
        ticket = Ticket(self, deadline, timings or Timings())
        try:
            yield ticket
        finally:
            ticket.release()

    def estimate_wait(self, handle: ModelHandle, rows: int) -> float:
        """Seconds until so many rows of a model are done: others on its device get as much time if they want it.

        Any thread may ask.
        """
        seconds = rows * handle.seconds_per_row
        devices = set(handle.devices)
        handles = tuple(self._handles.values())
        others = [each for each in handles if each is not handle and devices & set(each.devices)]
        return seconds + sum(min(seconds, other.rows * other.seconds_per_row) for other in others)

    def check_bytes(self, size: int, reserved_bytes: int) -> None:
        """Whether a request that holds some bytes may have more: QueueFullError now, TooLargeError where never."""
        limit = self._settings.max_queue_bytes
        if reserved_bytes + size > limit:
            detail = f"the request needs {reserved_bytes + size} bytes, the queue holds {limit}"
            raise TooLargeError(detail, hint="pool the layers, ask for fewer, or send fewer or smaller inputs")
        if self.used_bytes + size > limit:
            self._metrics.count_refused("queue_bytes")
            detail = f"the queue holds {self.used_bytes} bytes of {limit}"
            waits = (self.estimate_wait(each, each.rows) for each in self._handles.values())
            raise QueueFullError(detail, hint="come again later", retry_after=max(waits, default=0.0))

    def check_rows(self, handle: ModelHandle, rows: int, reserved_rows: int, deadline: float) -> None:
        """Whether a request that holds some rows may have so many in all.

        QueueFullError where the queue is full or so long that the deadline would pass, TooLargeError where it could
        never hold as many.
        """
        limit, others = self._settings.max_queue_rows, handle.rows - reserved_rows
        if rows > limit:
            detail = f"{rows} inputs are more than the queue holds, {limit}"
            raise TooLargeError(detail, hint=f"send at most {limit} at once")
        wait = self.estimate_wait(handle, others)
        if others + rows > limit:
            self._metrics.count_refused("queue_rows")
            detail, room = f"the queue holds {others} rows of {limit}", limit - others
            fewer = f", or send at most {room} input{'s' if room > 1 else ''} now" if room > 0 else ""
            raise QueueFullError(detail, hint=f"come again later{fewer}", retry_after=wait)
        needed = WAIT_MARGIN * (wait + rows * handle.seconds_per_row)
        if others and needed > deadline - time.monotonic():
            self._metrics.count_refused("deadline")
            raise QueueTooLongError(
                f"{others} rows wait already, which takes about {wait:.1f} s: the deadline would pass",
                retry_after=wait,
                needed_s=needed,
            )


class Ticket:
    """One request's place: the bytes that it holds, the rows that it has in its model's queue, its deadline, timings.

    It also holds the handles that answer it: another version of a model that comes meanwhile is not for it.
    """

    def __init__(self, control: AdmissionControl, deadline: float, timings: Timings) -> None:
        self.deadline = deadline
        self.timings = timings
        self._control = control
        self._held: dict[str | None, ModelHandle] = {}
        self._holds = ExitStack()
        self._handle: ModelHandle | None = None
        self._bytes = 0
        self._rows = 0
        self._work: PlannedWork | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that it holds: at first those of the request's body."""
        return self._bytes

    def find_handle(self, name: str | None) -> ModelHandle | None:
        """The handle that answers for a model's name in this request, where one does already."""
        return self._held.get(name)

    def hold(self, name: str | None, handle: ModelHandle) -> ModelHandle:
        """Have a handle answer for a model's name to the end of this request."""
        self._held[name] = handle
        self._holds.enter_context(handle.hold())
        return handle

    def reserve_bytes(self, size: int) -> None:
        """Hold so many bytes more; QueueFullError, TooLargeError."""
        self._control.check_bytes(size, self._bytes)
        self._control.used_bytes += size
        self._bytes += size

    @contextmanager
    def return_bytes(self) -> Iterator[None]:
        """Give back what is reserved in the block once it ends."""
        before = self._bytes
        try:
            yield
        finally:
            self._control.used_bytes -= max(self._bytes - before, 0)
            self._bytes = min(self._bytes, before)

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
            self._release_rows()

    def resize(self, rows: int) -> None:
        """Hold another number of rows, where any are held; QueueFullError, QueueTooLongError, TooLargeError."""
        if self._handle is None:
            return
        if rows > self._rows:  # who has a place keeps it, whoever came later
            self._control.check_rows(self._handle, rows, self._rows, self.deadline)
        self._handle.rows += rows - self._rows
        self._rows = rows

    @contextmanager
    def plan_work(self, work: PlannedWork) -> Iterator[None]:
        """Announce what the block runs in turns; QueueTooLongError where it can't be done in time."""
        with self._control.workload.plan(work, self.deadline):
            self._work = work
            try:
                yield
            finally:
                self._work = None

    async def wait_for_turn(self) -> None:
        """Return once the next rows of what is planned may be queued; DeadlineError."""
        if self._work is not None:
            await self._control.workload.wait_for_turn(self._work, self.deadline)

    def note_done(self, rows: int) -> None:
        """So many rows of what is planned are answered."""
        if self._work is not None:
            self._work.done += rows

    def release(self) -> None:
        """Give everything back."""
        self._release_rows()
        self._control.used_bytes -= self._bytes
        self._bytes = 0
        self._held.clear()
        self._holds.close()

    def _release_rows(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.rows -= self._rows
            self._rows = 0
            handle.notify_if_empty()
