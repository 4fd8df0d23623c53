"""The workers of one model: an idle one takes the next message, a dead one is replaced."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from layertap.models.devices.memory import count_oom_kills
from layertap.models.errors import LoadError
from layertap.service.engine.batch import CPU
from layertap.service.engine.execute.processes.forking import Forker, find_cause
from layertap.service.engine.execute.processes.model_host import ModelHost
from layertap.service.engine.execute.processes.wire import ToWorker
from layertap.service.engine.execute.processes.worker_process import (
    GRACE_SECONDS,
    RETRY_SECONDS,
    Ended,
    ModelLostError,
    PendingMessage,
    WorkerDiedError,
    WorkerProcess,
)
from layertap.service.engine.execute.threads import run_in_new_thread
from layertap.service.errors import UnavailableError
from layertap.service.types import RestartReason

SIGNALS: Mapping[int, RestartReason] = {signal.SIGALRM: "decode_timeout", signal.SIGKILL: "killed"}
log = logging.getLogger("layertap")


def find_reason(status: int | None) -> RestartReason:
    """Why a worker ended that the server did not end."""
    if status is None:
        return "unknown"
    return SIGNALS.get(-status, "crash") if status < 0 else "exit"


def no_worker_error(name: str, error: Exception) -> UnavailableError:
    """The error for what waits for a worker of a model, after this error when it was started."""
    detail = error.detail if isinstance(error, LoadError) else f"no worker of model {name} can be started"
    return UnavailableError(detail, retry_after=RETRY_SECONDS)


class WorkerPool:
    """The workers that ``host`` has started. For the event loop only, except its creation.

    ``idle``: how many workers take a message at once, by device; ``lost`` is set once the host has ended, and all its
    workers with it.
    """

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        self.idle = {CPU: 0}
        self.lost = asyncio.Event()
        self._on_idle: Callable[[], None] = lambda: None
        self._workers: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []  # the most recently used comes last, and is taken first
        self._waiting: deque[PendingMessage] = deque()  # for the next worker that is free
        self._apart: set[WorkerProcess] = set()  # workers that answer a single message
        self._starting = asyncio.Lock()  # one worker of a message after the other
        self._rows_wait = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._oom_kills = (count_oom_kills(),) * 2  # a second ago or two, then the latest count

    def start(self, on_idle: Callable[[], None]) -> None:
        """Begin to send messages to the workers; ``on_idle`` is called when a new, idle worker is added."""
        self._on_idle = on_idle
        self.lost = asyncio.Event()  # of this host: tasks of the previous host keep their own event
        for worker in list(self.host.workers.values()):
            self._welcome(worker)

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Tell the workers whether rows of their model wait that are in no batch yet."""
        if rows_wait != self._rows_wait:
            self._rows_wait = rows_wait
            for worker in self._workers:
                worker.progress.rows_wait = rows_wait

    def take(self) -> WorkerProcess:
        """An idle worker, to be asked now."""
        worker = self._idle.pop()
        self.idle[CPU] = len(self._idle)
        if self._timer is None:
            self._end_late()
        return worker

    async def ask(self, message: ToWorker, seconds: float) -> Any:
        """The answer of the next idle worker, which is ended after so many seconds; errors of ``PendingMessage``."""
        pending = PendingMessage(message, seconds)
        if self.lost.is_set():
            raise ModelLostError
        if self._idle:
            self.take().ask(pending)
        else:
            self._waiting.append(pending)
        return await pending.result

    async def ask_apart(self, message: ToWorker, seconds: float) -> Any:
        """As ``ask``, by a worker that is started for this message; it is ended too if this is cancelled."""
        pending = PendingMessage(message, seconds)
        if self.lost.is_set():
            raise ModelLostError
        self._keep(self._answer_apart(pending, self.host.forker, self.lost))
        return await pending.result

    async def restart(self) -> None:
        """Load the model again, and start its workers; LoadError."""
        await run_in_new_thread(f"load-{self.host.name}", self.host.load)
        self.start(self._on_idle)

    async def close(self) -> None:
        """End all processes."""
        self._lose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await run_in_new_thread(f"end-{self.host.name}", self.host.close)

    async def _answer_apart(self, pending: PendingMessage, forker: Forker | None, lost: asyncio.Event) -> None:
        """Settle a message by a worker of its own, and end that once it has answered, or its caller has gone."""
        name, host = self.host.name, self.host
        try:
            async with self._starting:
                if pending.result.done():  # its caller has gone
                    return
                worker = await run_in_new_thread(f"start-{name}", partial(host.start_worker, forker))
        except Exception as error:
            is_lost = lost.is_set() or host.has_ended
            pending.settle(ModelLostError() if is_lost else no_worker_error(name, error))
            return
        ended: asyncio.Future[tuple[Ended, Any]] = asyncio.get_running_loop().create_future()
        if lost.is_set():
            worker.channel.close()
            pending.settle(ModelLostError())
            with suppress(RuntimeError):
                await run_in_new_thread(f"end-{name}", partial(host.end_worker, worker.pid))
            return

        def end(worker: WorkerProcess, why: Ended, pending: PendingMessage | None, outcome: Any) -> None:
            if not ended.done():
                ended.set_result((why, outcome))

        worker.start(end)
        self._apart.add(worker)
        self._watch_deadlines()
        worker.ask(pending)
        await asyncio.wait([ended, pending.result], return_when=asyncio.FIRST_COMPLETED)
        if worker in self._apart:  # else the host was lost
            self._apart.remove(worker)
            worker.close()
        why, outcome = ended.result() if ended.done() else ("", None)
        if why != "unknown":
            pending.settle(outcome)
        status = None
        with suppress(RuntimeError):  # no thread can be started; the host ends it in the end
            status = await run_in_new_thread(f"end-{name}", partial(host.end_worker, worker.pid))
        if why == "unknown":
            pending.settle(self._find_cause(outcome, status))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, before the pool is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _add(self, worker: WorkerProcess) -> None:
        """Give a worker the next message that waits, or make it idle."""
        while self._waiting:
            pending = self._waiting.popleft()
            if not pending.result.done():  # its caller has not gone
                self._watch_deadlines()
                worker.ask(pending)
                return
        self._idle.append(worker)
        self.idle[CPU] = len(self._idle)

    def _free(self, worker: WorkerProcess, ended: Ended, pending: PendingMessage | None, outcome: Any) -> None:
        """Use a worker again, or replace it if it has ended; settle its message."""
        settle = pending.settle if pending is not None else lambda outcome: None
        if worker not in self._workers:  # it was ended before
            settle(outcome)
        elif not ended:
            self._add(worker)
            settle(outcome)
        elif self.host.has_ended:
            self._bury_host()
            settle(ModelLostError())
        else:
            self._workers.remove(worker)
            if worker in self._idle:
                self._idle.remove(worker)
                self.idle[CPU] = len(self._idle)
            worker.close()
            self._keep(self._replace(worker.pid, ended, settle, outcome, self.lost))

    def _watch_deadlines(self) -> None:
        """A worker is about to get a message."""
        if self._timer is None:
            self._end_late()

    def _end_late(self) -> None:
        """End the workers whose messages are late, now and every second until all workers are idle."""
        for worker in [*self._workers, *self._apart]:
            worker.expire()
        self._oom_kills = self._oom_kills[1], count_oom_kills()
        is_busy = len(self._idle) < len(self._workers) + len(self._apart)
        self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._end_late) if is_busy else None

    async def _replace(
        self, pid: int, ended: RestartReason, settle: Callable[[Any], None], outcome: Any, lost: asyncio.Event
    ) -> None:
        """End a worker, settle its message, and start another one; retry until the host is ``lost``."""
        name, host = self.host.name, self.host
        status = None
        if ended != "unknown":
            settle(outcome)
        try:
            with suppress(RuntimeError):  # no thread can be started; the host ends it in the end
                status = await run_in_new_thread(f"end-{name}", partial(host.end_worker, pid))
        finally:
            if ended == "unknown":
                ended = find_reason(status)
                settle(self._find_cause(outcome, status))
        log.warning(
            "a worker is replaced", extra={"fields": {"model": name, "pid": pid, "reason": ended, "status": status}}
        )
        host.on_restart(name, ended)
        while not lost.is_set():
            try:
                worker = await run_in_new_thread(f"start-{name}", host.start_worker)
            except Exception as error:
                log.warning("no worker can be started", exc_info=error, extra={"fields": {"model": name}})
                if lost.is_set():
                    return
                if host.has_ended:
                    self._bury_host()
                elif not self._workers:
                    self._refuse(partial(no_worker_error, name, error))
                with suppress(TimeoutError):
                    await asyncio.wait_for(lost.wait(), RETRY_SECONDS)
            else:
                if not lost.is_set():
                    self._welcome(worker)
                elif worker not in self._workers:
                    worker.channel.close()
                return

    def _find_cause(self, outcome: Any, status: int | None) -> Any:
        """The outcome of a message whose worker has ended with this status, None if its host has ended, too."""
        if status is None:
            return ModelLostError()
        if isinstance(outcome, WorkerDiedError):
            outcome.cause = find_cause(status, self._oom_kills[0])
            self._oom_kills = (count_oom_kills(),) * 2
        return outcome

    def _welcome(self, worker: WorkerProcess) -> None:
        """Add a worker that has just been started."""
        worker.start(self._free)
        worker.progress.rows_wait = self._rows_wait
        self._workers.append(worker)
        self._idle.append(worker)
        self.idle[CPU] = len(self._idle)
        asyncio.get_running_loop().call_soon(self._use_new)

    def _use_new(self) -> None:
        """Let batches take new workers before other messages."""
        self._on_idle()
        while self._idle and self._waiting:
            self._add(self.take())

    def _bury_host(self) -> None:
        """The host has died, and its workers with it; the reason is unknown."""
        for _ in self._workers:
            self.host.on_restart(self.host.name, "unknown")
        self._lose()

    def _lose(self) -> None:
        """The host has ended, or is about to, and its workers with it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.lost.set()
        self._idle.clear()
        self.idle[CPU] = 0
        workers, self._workers, self._apart = [*self._workers, *self._apart], [], set()
        for worker in workers:
            worker.close()
        self._refuse(ModelLostError)

    def _refuse(self, make_error: Callable[[], Exception]) -> None:
        """Settle all messages that wait for a worker with an error."""
        while self._waiting:
            self._waiting.popleft().settle(make_error())
