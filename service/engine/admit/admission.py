"""Admission control: limits on bytes in memory, on queued rows per model, and on the size of a single request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from layertap.models.errors import TooLargeError
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.errors import QueueFullError, QueueTooLongError, unloading_error
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings
from layertap.service.timings import Timings

if TYPE_CHECKING:
    from layertap.service.engine.admit.planned_work import PlannedWork

WAIT_MARGIN = 1.25  # factor on the estimated wait, because estimates may be too low


class AdmissionControl:
    """Counts the admitted bytes and rows. For the event loop only.

    ``handles`` maps model names to the handles of this process, and changes as models come and go. ``used_bytes``
    counts request bodies as they arrive, rows, and estimated replies; ``works`` run many changed inputs.
    """

    def __init__(self, handles: Mapping[str, ModelHandle], settings: Settings, metrics: Metrics) -> None:
        self.used_bytes = 0
        self.works: list[PlannedWork] = []
        self.handles = handles
        self.settings = settings
        self.metrics = metrics

    def admit(self, deadline: float, timings: Timings | None = None) -> Ticket:
        """A ticket for a request with a deadline on the monotonic clock; its ``release`` gives back what it holds."""
        return Ticket(self, deadline, timings or Timings())

    def estimate_wait(self, handle: ModelHandle, rows: int) -> float:
        """Seconds until this many rows are done, if each other model on the device uses up to as much time.

        Any thread may ask.
        """
        wait = seconds = rows * handle.seconds_per_row
        for other in tuple(self.handles.values()):
            if other is not handle and other.rows and other.shares_device(handle):
                wait += min(seconds, other.rows * other.seconds_per_row)
        return wait


class Ticket(AbstractContextManager["Ticket"]):
    """One request's admission: its reserved bytes, its rows in the model's queue, its deadline and timings.

    ``nbytes`` starts at the size of the request's body. ``handles`` maps the requested model names to the handles that
    answer until the request ends, even if a new version of a model is loaded meanwhile. ``work_rows``: the rows of its
    planned work, which the batcher should not take for a small request.
    """

    def __init__(self, control: AdmissionControl, deadline: float, timings: Timings) -> None:
        self.deadline = deadline
        self.timings = timings
        self.nbytes = 0
        self.work_rows = 0
        self.handles: dict[str | None, ModelHandle] = {}
        self._control = control
        self._handle: ModelHandle | None = None
        self._rows = 0

    def hold(self, name: str | None, handle: ModelHandle) -> ModelHandle:
        """Use this handle for the model's name until the request ends."""
        self.handles[name] = handle
        handle.holders += 1
        return handle

    def reserve_bytes(self, size: int) -> None:
        """Reserve more bytes; QueueFullError if too few are free now, TooLargeError if it can never fit."""
        control, limit = self._control, self._control.settings.max_queue_bytes
        if self.nbytes + size > limit:
            detail = f"the request needs {self.nbytes + size} bytes, the queue holds {limit}"
            raise TooLargeError(detail, hint="pool the layers, ask for fewer, or send fewer or smaller inputs")
        if control.used_bytes + size > limit:
            control.metrics.count("refused_total", "queue_bytes")
            detail = f"the queue holds {control.used_bytes} bytes of {limit}"
            waits = (control.estimate_wait(each, each.rows) for each in control.handles.values())
            raise QueueFullError(detail, hint="come again later", retry_after=max(waits, default=0.0))
        control.used_bytes += size
        self.nbytes += size

    @contextmanager
    def return_bytes(self) -> Iterator[None]:
        """Release at the block's end the bytes reserved in it."""
        before = self.nbytes
        try:
            yield
        finally:
            self._control.used_bytes -= max(self.nbytes - before, 0)
            self.nbytes = min(self.nbytes, before)

    def enter_queue(self, handle: ModelHandle, rows: int) -> None:
        """Hold rows of a model's queue until ``leave_queue``; UnavailableError, and the errors of ``resize``."""
        if handle.answers == "none":
            raise unloading_error(handle.name, self._control.estimate_wait(handle, handle.rows))
        self._handle = handle
        self.resize(rows)

    def leave_queue(self) -> None:
        """Release the rows, if any are held."""
        if self._handle is not None:
            self._handle.add_rows(-self._rows)
            self._handle, self._rows = None, 0

    def resize(self, rows: int) -> None:
        """Change the number of rows held, if any are.

        QueueFullError if the queue is full, QueueTooLongError if the rows would miss the deadline, TooLargeError if the
        queue could never hold that many.
        """
        if self._handle is None or rows == self._rows:
            return
        if rows > self._rows:  # fewer rows always fit
            self._check_rows(self._handle, rows)
        self._handle.add_rows(rows - self._rows)
        self._rows = rows

    def _check_rows(self, handle: ModelHandle, rows: int) -> None:
        control, limit, others = self._control, self._control.settings.max_queue_rows, handle.rows - self._rows
        if rows > limit:
            detail = f"{rows} inputs are more than the queue holds, {limit}"
            raise TooLargeError(detail, hint=f"send at most {limit} at once")
        if not others:
            return
        wait = control.estimate_wait(handle, others)
        if others + rows > limit:
            control.metrics.count("refused_total", "queue_rows")
            detail, room = f"the queue holds {others} rows of {limit}", limit - others
            fewer = f", or send at most {room} input{'s' if room > 1 else ''} now" if room > 0 else ""
            raise QueueFullError(detail, hint=f"come again later{fewer}", retry_after=wait)
        needed = WAIT_MARGIN * (wait + rows * handle.seconds_per_row)
        if needed > self.deadline - time.monotonic():
            control.metrics.count("refused_total", "deadline")
            raise QueueTooLongError(
                f"{others} rows wait already, which takes about {wait:.1f} s: the deadline would pass",
                retry_after=wait,
                needed_s=needed,
            )

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give back everything that the request holds."""
        self._control.used_bytes -= self.nbytes
        self.nbytes = 0
        for handle in self.handles.values():
            handle.release()
        self.handles.clear()
