"""What may come in: bytes in memory, rows in a model's queue, and whether they can be answered in time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn

from layertap.models.errors import TooLargeError
from layertap.service.engine.model_worker import ModelWorker
from layertap.service.engine.unavailable import unloading_error
from layertap.service.errors import QueueFullError, QueueTooLongError
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings

WAIT_MARGIN = 1.25  # what is expected may take so many times as long
LENIENCY = 2.0  # of what nothing waits for: it is expected to take so many times less than was measured


@dataclass(eq=False)
class PlannedWork:
    """Changed inputs that a request will queue a few at a time, and what makes them fewer, in words.

    ``seconds``: of all their forwards on one thread, by what was measured at loading; ``done`` of them are answered.
    """

    worker: ModelWorker
    rows: int
    seconds: float
    smaller: str
    done: int = 0

    @property
    def share_left(self) -> float:
        """How much of it is yet to be done."""
        return max(1 - self.done / max(self.rows, 1), 0.0)

    @property
    def seconds_left(self) -> float:
        """How long what is left takes as of late, with nothing beside it."""
        return self.share_left * self.worker.estimate_seconds(self.seconds)


class AdmissionControl:
    """What is admitted now. For the event loop only.

    ``workers`` are those of this process, by the names of their models; it grows and shrinks with them. ``used_bytes``
    counts bodies as they arrive, rows, and the replies that are expected. ``planned`` is what explanations have yet to
    do.
    """

    def __init__(self, workers: Mapping[str, ModelWorker], settings: Settings, metrics: Metrics) -> None:
        self.used_bytes = 0
        self.planned: set[PlannedWork] = set()
        self._workers = workers
        self._settings = settings
        self._metrics = metrics

    @contextmanager
    def admit(self, deadline: float) -> Iterator[Admission]:
        """A place for a request that is over at a moment on the monotonic clock; given back after the block."""
        admission = Admission(self, deadline)
        try:
            yield admission
        finally:
            admission.release()

    def estimate_wait(self, worker: ModelWorker, rows: int) -> float:
        """Seconds until so many rows of a model are done: others on its device get as much time if they want it.

        Any thread may ask.
        """
        seconds = rows * worker.seconds_per_row
        devices = set(worker.devices)
        workers = tuple(self._workers.values())
        others = [each for each in workers if each is not worker and devices & set(each.devices)]
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
            waits = (self.estimate_wait(each, each.rows) for each in self._workers.values())
            raise QueueFullError(detail, hint="come again later", retry_after=max(math.ceil(max(waits, default=0)), 1))

    def check_rows(self, worker: ModelWorker, rows: int, reserved_rows: int, deadline: float) -> None:
        """Whether a request that holds some rows may have so many in all.

        QueueFullError where the queue is full or so long that the deadline would pass, TooLargeError where it could
        never hold as many.
        """
        limit, others = self._settings.max_queue_rows, worker.rows - reserved_rows
        if rows > limit:
            detail = f"{rows} inputs are more than the queue holds, {limit}"
            raise TooLargeError(detail, hint=f"send at most {limit} at once")
        wait = self.estimate_wait(worker, others)
        if others + rows > limit:
            self._metrics.count_refused("queue_rows")
            detail, room = f"the queue holds {others} rows of {limit}", limit - others
            fewer = f", or send at most {room} input{'s' if room > 1 else ''} now" if room > 0 else ""
            raise QueueFullError(detail, hint=f"come again later{fewer}", retry_after=max(math.ceil(wait), 1))
        needed = WAIT_MARGIN * (wait + rows * worker.seconds_per_row)
        if others and needed > deadline - time.monotonic():
            self._metrics.count_refused("deadline")
            raise QueueTooLongError(
                f"{others} rows wait already, which takes about {wait:.1f} s: the deadline would pass",
                retry_after=max(math.ceil(wait), 1),
                needed_s=needed,
            )

    def check_work(self, work: PlannedWork, deadline: float) -> None:
        """Whether work that is to be queued bit by bit can be done in time; QueueTooLongError.

        What else is planned for its device gets as much time, if it wants it. With nothing planned it is refused only
        where there is no hope: what was measured may be slower than what will be.
        """
        devices, seconds = set(work.worker.devices), work.seconds_left
        others = [other for other in self.planned if devices & set(other.worker.devices)]
        wait = sum(min(seconds, other.seconds_left) for other in others)
        left = max(deadline - time.monotonic(), 0.0)
        if wait:
            if WAIT_MARGIN * (seconds + wait) > left:
                taken = f"about {seconds:.1f} s, and explanations that run already {wait:.1f} s"
                hint = f"come again later, or run fewer changed inputs: {work.smaller}"
                self._refuse_work(work, taken, hint, wait, seconds + wait)
            return
        alone = work.worker.estimate_least_seconds(work.seconds)
        if alone / LENIENCY > left:
            hint = f"run at most {max(int(work.rows * left / alone), 1)} changed inputs: {work.smaller}"
            if alone > self._settings.deadline_s:
                hint += ", or raise LAYERTAP_DEADLINE_S"
            self._refuse_work(work, f"about {alone:.1f} s", hint, alone, alone)

    def _refuse_work(self, work: PlannedWork, taken: str, hint: str, retry_after: float, needed_s: float) -> NoReturn:
        self._metrics.count_refused("deadline")
        detail = f"{work.rows} changed inputs take {taken}: the deadline would pass"
        raise QueueTooLongError(detail, hint=hint, retry_after=max(math.ceil(retry_after), 1), needed_s=needed_s)


class Admission:
    """One request's place: the bytes that it holds, the rows that it has in its model's queue, its deadline.

    It also holds the workers that answer it: another version of a model that comes meanwhile is not for it.
    """

    def __init__(self, control: AdmissionControl, deadline: float) -> None:
        self.deadline = deadline
        self._control = control
        self._held: dict[str | None, ModelWorker] = {}
        self._holds = ExitStack()
        self._worker: ModelWorker | None = None
        self._bytes = 0
        self._rows = 0
        self._work: PlannedWork | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that it holds: at first those of the request's body."""
        return self._bytes

    def find_worker(self, name: str | None) -> ModelWorker | None:
        """The worker that answers for a model's name in this request, where one does already."""
        return self._held.get(name)

    def hold(self, name: str | None, worker: ModelWorker) -> ModelWorker:
        """Have a worker answer for a model's name to the end of this request."""
        self._held[name] = worker
        self._holds.enter_context(worker.hold())
        return worker

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
    def queue_rows(self, worker: ModelWorker, rows: int) -> Iterator[None]:
        """Hold so many rows of a model's queue until the block ends; as ``resize``, UnavailableError."""
        if worker.stopping:
            raise unloading_error(worker.name)
        self._worker = worker
        try:
            self.resize(rows)
            yield
        finally:
            self._release_rows()

    def resize(self, rows: int) -> None:
        """Hold another number of rows, where any are held; QueueFullError, QueueTooLongError, TooLargeError."""
        if self._worker is None:
            return
        if rows > self._rows:  # who has a place keeps it, whoever came later
            self._control.check_rows(self._worker, rows, self._rows, self.deadline)
        self._worker.rows += rows - self._rows
        self._rows = rows

    @contextmanager
    def plan_work(self, work: PlannedWork) -> Iterator[None]:
        """Have work that the block queues bit by bit count for others; QueueTooLongError where it can't be in time."""
        self._control.check_work(work, self.deadline)
        self._control.planned.add(work)
        self._work = work
        try:
            yield
        finally:
            self._control.planned.discard(work)
            self._work = None

    def note_done(self, rows: int) -> None:
        """So many rows of what was planned are answered."""
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
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.rows -= self._rows
            self._rows = 0
            worker.notify_if_empty()
