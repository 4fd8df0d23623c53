"""The workers of one model: an idle one takes the next message, a dead one is replaced."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from layertap.models.errors import LoadError
from layertap.service.engine.batch import Batch, BatchResult, SliceResult
from layertap.service.engine.execute.executor import Extend, ModelLostError
from layertap.service.engine.execute.processes.channel import LoopChannel, UnsentError
from layertap.service.engine.execute.processes.messages import BatchDecoded, ToWorker
from layertap.service.engine.execute.processes.model_host import ModelHost, StartedWorker
from layertap.service.engine.execute.processes.references import ServerReferences
from layertap.service.engine.execute.threads import run_in_new_thread
from layertap.service.errors import UnavailableError
from layertap.service.types import RestartReason

GRACE_SECONDS = 1.0  # after the deadline
BORROW_SECONDS = 300.0  # to wait for an idle worker: longer than any batch that somebody waits for
SEND_TRIES = 3
RETRY_SECONDS = 5.0
SIGNALS: Mapping[int, RestartReason] = {signal.SIGALRM: "decode_timeout", signal.SIGKILL: "killed"}
log = logging.getLogger("layertap")


@dataclass(eq=False)
class WorkerDiedError(Exception):
    """A worker ended, or was killed, before it answered.

    ``taken``: it may have died because of the message; else it was dead before. ``timed_out``: it exceeded its time
    limit. ``decoding``: the number of the item that it was decoding, and ``decode_seconds`` for how long; -1 if it was
    decoding none. ``failures``: those of its batch until then.
    """

    taken: bool
    timed_out: bool
    decoding: int
    decode_seconds: float


def find_reason(status: int | None) -> RestartReason:
    """Why a worker ended that the server did not kill."""
    if status is None:
        return "unknown"
    return SIGNALS.get(-status, "crash") if status < 0 else "exit"


class WorkerProcess:
    """The event loop's end of a worker, for one message at a time.

    ``pid``: its process; ``progress``: its shared state.
    """

    def __init__(self, started: StartedWorker, on_lost: Callable[[WorkerProcess], None]) -> None:
        """``on_lost`` is called with this object when the worker has died."""
        self.pid = started.pid
        self.progress = started.progress
        self._process: int | None = None  # a pidfd: the pid may be another process's by now
        with suppress(ProcessLookupError):  # it has died already: the next message shows it
            self._process = os.pidfd_open(self.pid)
        self._references = ServerReferences()
        self._channel = LoopChannel(started.connection, self._references, lambda: on_lost(self))

    @property
    def is_closed(self) -> bool:
        """Whether it was ended."""
        return self._channel.is_closed

    async def ask(self, message: ToWorker, deadline: float, extend: Extend = lambda: None) -> Any:
        """The answer to a message; WorkerDiedError if the worker dies or misses the deadline (monotonic).

        ``extend`` returns the rows that join a batch whose pictures are decoded. UnsentError if the message was not
        sent; the worker is well. After any other error it may be in the middle of an answer, and is unusable.
        """
        taken, results = self.progress.taken, list[SliceResult]()
        if self._references.is_full:  # not between a batch and the rows that join it: the worker answers both together
            self._references.clear()
        try:
            async with asyncio.timeout_at(_to_loop_time(deadline)) as limit:
                await self._channel.send(message)
                while True:
                    answer = await self._channel.receive()
                    if isinstance(answer, BatchDecoded):
                        more = extend()
                        await self._send_more(more or cast("Batch", message).take(()))
                        if more is not None:
                            deadline = max(deadline, more.deadline + GRACE_SECONDS)
                            limit.reschedule(_to_loop_time(deadline))
                    elif isinstance(answer, BatchResult) and answer.more:
                        results += answer.results
                    else:
                        break
        except (EOFError, TimeoutError) as error:
            decoding, since = self.progress.item, self.progress.since
            raise WorkerDiedError(
                taken=self.progress.taken > taken,
                timed_out=isinstance(error, TimeoutError),
                decoding=decoding,
                decode_seconds=time.monotonic() - since if decoding >= 0 else 0.0,
            ) from error
        except UnsentError:  # the message's specs did not reach the worker
            self._references.clear()
            raise
        return replace(answer, results=[*results, *answer.results]) if results else answer

    async def _send_more(self, more: Batch) -> None:
        try:
            await self._channel.send(more)
        except UnsentError as error:  # the worker waits for this message
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Kill the process."""
        self._channel.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = None


class WorkerPool:
    """A fixed number of workers, started by ``host``. For the event loop only, except its creation."""

    def __init__(self, host: ModelHost, count: int) -> None:
        """Start the workers; LoadError."""
        self._on_idle: Callable[[], None] = lambda: None
        self.host = host
        self._count = count
        self._workers: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []  # the most recently used comes last, and is taken first
        self._waiting: deque[asyncio.Future[WorkerProcess]] = deque()
        self._rows_wait = False
        self._lost = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._descriptor: int | None = None  # becomes readable when the host ends
        try:
            self._started = self._start_workers()
        except BaseException:
            host.close()
            raise

    def start(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """Begin to send messages to the started workers, and watch for the end of their host.

        ``on_idle`` is called when a new, idle worker is added.
        """
        self._on_idle = on_idle
        self._lost = asyncio.Event()  # of this host: tasks of the previous host keep their own event
        started, self._started = self._started, []
        self._descriptor = self.host.take_descriptor()
        if self._descriptor is None:
            self._lose()
        else:
            asyncio.get_running_loop().add_reader(self._descriptor, self._bury_host)
        for each in started:
            self._add(WorkerProcess(each, self._bury))

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Tell the workers whether rows of their model wait that are in no batch yet."""
        if rows_wait != self._rows_wait:
            self._rows_wait = rows_wait
            for worker in self._workers:
                worker.progress.rows_wait = rows_wait

    @property
    def idle(self) -> int:
        """The number of idle workers that no message waits for."""
        return 0 if self._waiting else len(self._idle)

    def take(self) -> WorkerProcess:
        """An idle worker, for ``ask``."""
        return self._idle.pop()

    async def ask(
        self,
        message: ToWorker,
        *,
        deadline: float = math.inf,
        seconds: float = math.inf,
        worker: WorkerProcess | None = None,
        extend: Extend = lambda: None,
    ) -> Any:
        """The answer of a worker that was taken, or else of the next idle one; as ``WorkerProcess.ask``.

        It has until ``deadline``, and at most ``seconds`` once a worker is idle. If the worker was dead before the
        message, another one gets it.

        WorkerDiedError; ModelLostError if the host has ended; UnavailableError if nothing can be sent.
        """
        for _ in range(SEND_TRIES):
            worker = worker or await self._borrow()
            try:
                answer = await worker.ask(message, min(deadline, time.monotonic() + seconds), extend)
            except WorkerDiedError as error:
                self._replace(worker, "timeout" if error.timed_out else None)
                if self._lost.is_set():
                    raise ModelLostError from error
                if error.taken or error.timed_out:
                    raise
                worker = None
            except UnsentError as error:
                self._add(worker)
                raise UnavailableError(
                    f"nothing can be passed to a worker ({error})", retry_after=RETRY_SECONDS
                ) from error
            except BaseException as error:  # of this process, in the middle of an answer
                self._replace(worker, "failure")
                if isinstance(error, (OSError, MemoryError)):
                    raise UnavailableError("an answer could not be received", retry_after=RETRY_SECONDS) from error
                raise
            else:
                if getattr(answer, "failure", ""):
                    self._replace(worker, "failure")
                else:
                    self._add(worker)
                return answer
        raise UnavailableError("workers end before they are asked", retry_after=RETRY_SECONDS)

    async def wait_until_lost(self) -> None:
        """Return once the host and all its workers have ended."""
        await self._lost.wait()

    async def restart(self) -> None:
        """Load the model again, and start its workers; LoadError."""
        await run_in_new_thread(f"load-{self.host.name}", self.host.load)
        self._started = await run_in_new_thread(f"start-{self.host.name}", self._start_workers)
        self.start(self._on_idle)

    async def close(self) -> None:
        """End all processes."""
        self._lose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await run_in_new_thread(f"end-{self.host.name}", self.host.close)

    def _start_workers(self) -> list[StartedWorker]:
        return [self.host.start_worker() for _ in range(self._count)]

    async def _borrow(self) -> WorkerProcess:
        """An idle worker, for this caller alone; ModelLostError."""
        if self._lost.is_set():
            raise ModelLostError
        if self._idle and not self._waiting:
            return self._idle.pop()
        waiting: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(BORROW_SECONDS):
                return await waiting
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._add(waiting.result())  # it became idle at the same moment
            if isinstance(error, TimeoutError):
                raise UnavailableError("no worker is idle", retry_after=RETRY_SECONDS) from None
            raise

    def _add(self, worker: WorkerProcess) -> None:
        """Give a worker to the next caller that waits, or make it idle."""
        if worker not in self._workers:
            if self._lost.is_set():
                worker.close()
                return
            worker.progress.rows_wait = self._rows_wait
            self._workers.append(worker)
            asyncio.get_running_loop().call_soon(self._on_idle)
        elif worker.is_closed:
            return
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(worker)
                return
        self._idle.append(worker)

    def _bury(self, worker: WorkerProcess) -> None:
        """Replace a worker that died while it was idle."""
        if worker in self._idle:
            self._idle.remove(worker)
            self._replace(worker)

    def _replace(self, worker: WorkerProcess, reason: RestartReason | None = None) -> None:
        """End a worker and start another one in its place; without ``reason``, it has ended by itself."""
        worker.close()
        if worker in self._workers:
            self._workers.remove(worker)
        if not self._lost.is_set():
            task = asyncio.get_running_loop().create_task(self._start_another(worker.pid, reason, self._lost))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _start_another(self, pid: int, reason: RestartReason | None, lost: asyncio.Event) -> None:
        """Start a worker in the place of a dead one; retry until the host is ``lost``."""
        name = self.host.name
        status = await run_in_new_thread(f"end-{name}", partial(self.host.wait_for_worker, pid))
        reason = reason or find_reason(status)
        log.warning(
            "a worker is replaced", extra={"fields": {"model": name, "pid": pid, "reason": reason, "status": status}}
        )
        self.host.on_restart(name, reason)
        while not lost.is_set():
            try:
                started = await run_in_new_thread(f"start-{name}", self.host.start_worker)
                if lost.is_set():
                    started.connection.close()
                    return
                try:
                    self._add(WorkerProcess(started, self._bury))
                except OSError:  # this process is out of descriptors
                    started.connection.close()  # so that it ends
                    await run_in_new_thread(f"end-{name}", partial(self.host.wait_for_worker, started.pid))
                    raise
                return
            except Exception as error:
                detail = error.detail if isinstance(error, LoadError) else f"no worker of model {name} can be started"
                log.warning("no worker can be started", exc_info=error, extra={"fields": {"model": name}})
                self._refuse(partial(UnavailableError, detail, retry_after=RETRY_SECONDS))
                with suppress(TimeoutError):
                    await asyncio.wait_for(lost.wait(), RETRY_SECONDS)

    def _bury_host(self) -> None:
        """The host has died, and its workers with it; the reason is unknown."""
        for _ in self._workers:
            self.host.on_restart(self.host.name, "unknown")
        self._lose()

    def _lose(self) -> None:
        """The host has ended, or is about to, and its workers with it."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        self._lost.set()
        self._idle.clear()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        self._refuse(ModelLostError)

    def _refuse(self, make_error: Callable[[], Exception]) -> None:
        """Raise the error for all callers that wait for a worker, if there is none."""
        if not self._workers or self._lost.is_set():
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_exception(make_error())


def _to_loop_time(deadline: float) -> float | None:
    """Convert a deadline from the monotonic clock to the event loop's; None if infinite."""
    return None if math.isinf(deadline) else asyncio.get_running_loop().time() + deadline - time.monotonic()
