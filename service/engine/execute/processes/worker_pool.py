"""The workers of one model: an idle one takes the next message, a dead one is replaced."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch

from layertap.models.devices import memory
from layertap.models.errors import InputError, LoadError
from layertap.service.engine.execute.executor import Extend, ModelLostError
from layertap.service.engine.execute.processes.channel import UnsentError
from layertap.service.engine.execute.processes.messages import DecodeItems, ToWorker
from layertap.service.engine.execute.processes.worker_process import (
    GRACE_SECONDS,
    ModelHost,
    StartedWorker,
    WorkerDiedError,
    WorkerProcess,
    find_reason,
)
from layertap.service.engine.execute.threads import run_in_new_thread
from layertap.service.engine.rows.rows import Attempt, ItemAttempts
from layertap.service.errors import UnavailableError
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import MIN_WORKER_MEMORY_BYTES, Settings
from layertap.service.types import RestartReason

MEMORY_SHARE = 0.5  # of what is free when a model is loaded: what its workers may take, each its part
BORROW_SECONDS = 300.0  # for a worker to be idle: longer than any batch has that anybody waits for
MAX_DECODE_ITEMS = 8  # of a request in one message
TRIES = 2  # a worker may die of something else
SEND_TRIES = 3
RETRY_SECONDS = 5.0
log = logging.getLogger("layertap")


def choose_worker_bytes(settings: Settings) -> int:
    """How much memory each worker of a model that is loaded now may take."""
    if settings.worker_memory_bytes is not None:
        return settings.worker_memory_bytes
    free = memory.measure_available_bytes(torch.device("cpu"))
    return max(int(free * MEMORY_SHARE / settings.workers), MIN_WORKER_MEMORY_BYTES)


class WorkerPool:
    """As many workers as the settings say. For the event loop only, but for its creation."""

    def __init__(self, host: ModelHost, settings: Settings) -> None:
        """Start the workers; LoadError where they can't be started."""
        self._on_idle: Callable[[], None] = lambda: None
        self._host = host
        self._count = settings.workers
        self._decode_seconds = settings.decode_timeout_s
        self._idle: list[WorkerProcess] = []  # the one whose memory was used last comes last, and is taken first
        self._waiting: deque[asyncio.Future[WorkerProcess]] = deque()
        self._rows_wait = False
        self._lost = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._descriptor: int | None = None  # that can be read once the host has ended
        try:
            self._started = self._start_workers()
        except BaseException:
            host.close()
            raise

    def start(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """Begin to ask the workers that were started, and to look whether their host is there.

        ``on_idle`` is called when there is a new one, which is idle.
        """
        self._on_idle = on_idle
        self._lost = asyncio.Event()  # of this host: tasks of the one before keep theirs
        started, self._started = self._started, []
        self._descriptor = self._host.take_descriptor()
        if self._descriptor is None:
            self._lose()
        else:
            asyncio.get_running_loop().add_reader(self._descriptor, self._bury_host)
        for each in started:
            self._add(WorkerProcess(each, self._bury))

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Let the workers know whether rows of their model are in no batch yet."""
        if rows_wait != self._rows_wait:
            self._rows_wait = rows_wait
            for worker in self._host.workers:
                worker.progress.rows_wait = rows_wait

    @property
    def idle(self) -> int:
        """How many workers are idle, and not waited for."""
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
        """The answer of a worker that was taken, or else of one that is idle, once one is; as ``WorkerProcess.ask``.

        It has until ``deadline``, and so many ``seconds`` once a worker is there. One that was dead before it had the
        message is passed over.

        WorkerDiedError; ModelLostError where the host has ended; UnavailableError where nothing can be passed on.
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
            except BaseException as error:  # of this process, in the midst of the answer
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

    async def decode(self, items: Sequence[LocalItem], tries: int = TRIES) -> ItemAttempts:
        """Decode items in a worker; an item that kills ``tries`` workers is refused.

        Once a worker has died, the other items have no attempts: they are to be sent again, each alone. ModelLostError,
        UnavailableError.
        """
        try:
            seconds = len(items) * self._decode_seconds + GRACE_SECONDS
            return cast("ItemAttempts", await self.ask(DecodeItems(items), seconds=seconds))
        except WorkerDiedError as error:
            attempts: ItemAttempts = [[] for _ in items]
            blamed = error.decoding if len(items) > 1 else 0
            if blamed < 0:
                return attempts
            if tries > 1 and not self.is_out_of_time(error):
                (attempts[blamed],) = await self.decode([items[blamed]], tries - 1)
            elif error.taken:
                attempts[blamed] = [self.make_refusal(error)]
            else:
                raise UnavailableError("no worker takes this input", retry_after=RETRY_SECONDS) from error
            return attempts

    async def complete(self, items: Sequence[LocalItem], decoded: Sequence[Sequence[Attempt] | None]) -> ItemAttempts:
        """The attempts at items; a worker decodes each item whose attempt is None."""
        missing = [item for item, attempts in zip(items, decoded, strict=True) if attempts is None]
        more = iter(await self.decode(missing) if missing else ())
        return [next(more) if attempts is None else attempts for attempts in decoded]

    def make_refusal(self, error: WorkerDiedError) -> InputError:
        """Why an item that a worker died of is refused."""
        if self.is_out_of_time(error):
            limit = self._decode_seconds
            return InputError(f"this input takes longer than {limit:g} s to decode", hint="send a smaller one")
        return InputError("this input ends the process that decodes it", hint="send it in another format")

    def is_out_of_time(self, error: WorkerDiedError) -> bool:
        """Whether a worker died because it decoded too long, and another would."""
        return error.decode_seconds >= self._decode_seconds

    async def wait_until_lost(self) -> None:
        """Return once the host has ended, and with it all workers."""
        await self._lost.wait()

    async def restart(self) -> None:
        """Load the model again, and start its workers; LoadError."""
        await run_in_new_thread(f"load-{self._host.name}", self._host.load)
        self._started = await run_in_new_thread(f"start-{self._host.name}", self._start_workers)
        self.start(self._on_idle)

    async def close(self) -> None:
        """End all processes."""
        pids = [worker.pid for worker in self._host.workers]
        self._lose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await run_in_new_thread(f"end-{self._host.name}", partial(self._host.close, pids))

    def _start_workers(self) -> list[StartedWorker]:
        started: list[StartedWorker] = []
        try:
            while len(started) < self._count:
                started.append(self._host.start_worker())
        except BaseException:
            for each in started:
                each.connection.close()
            raise
        return started

    async def _borrow(self) -> WorkerProcess:
        """A worker for the caller alone, once one is idle; ModelLostError."""
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
                self._add(waiting.result())  # it came at the same moment
            if isinstance(error, TimeoutError):
                raise UnavailableError("no worker is idle", retry_after=RETRY_SECONDS) from None
            raise

    def _add(self, worker: WorkerProcess) -> None:
        """Have a worker be asked next."""
        if worker not in self._host.workers:
            if self._lost.is_set():
                worker.close()
                return
            worker.progress.rows_wait = self._rows_wait
            self._host.workers.append(worker)
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
        """A worker has died while it did nothing."""
        if worker in self._idle:
            self._idle.remove(worker)
            self._replace(worker)

    def _replace(self, worker: WorkerProcess, reason: RestartReason | None = None) -> None:
        """End a worker, and have another one take its place; without a reason it has ended by itself."""
        worker.close()
        if worker in self._host.workers:
            self._host.workers.remove(worker)
        if not self._lost.is_set():
            task = asyncio.get_running_loop().create_task(self._start_another(worker.pid, reason, self._lost))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _start_another(self, pid: int, reason: RestartReason | None, lost: asyncio.Event) -> None:
        """Have another worker take the place of a dead one, tried until its host is ``lost``."""
        name = self._host.name
        status = await run_in_new_thread(f"end-{name}", partial(self._host.wait_for_worker, pid))
        reason = reason or find_reason(status)
        log.warning(
            "a worker is replaced", extra={"fields": {"model": name, "pid": pid, "reason": reason, "status": status}}
        )
        self._host.on_restart(name, reason)
        while not lost.is_set():
            try:
                started = await run_in_new_thread(f"start-{name}", self._host.start_worker)
                if lost.is_set():
                    started.connection.close()
                else:
                    self._add(WorkerProcess(started, self._bury))
                return
            except Exception as error:
                detail = error.detail if isinstance(error, LoadError) else f"no worker of model {name} can be started"
                log.warning("no worker can be started", exc_info=error, extra={"fields": {"model": name}})
                self._refuse(partial(UnavailableError, detail, retry_after=RETRY_SECONDS))
                with suppress(TimeoutError):
                    await asyncio.wait_for(lost.wait(), RETRY_SECONDS)

    def _bury_host(self) -> None:
        """The host has died, and its workers with it; nobody knows why."""
        for _ in self._host.workers:
            self._host.on_restart(self._host.name, "unknown")
        self._lose()

    def _lose(self) -> None:
        """The host has ended, or is about to, and its workers with it."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        self._lost.set()
        self._idle.clear()
        workers, self._host.workers = self._host.workers, []
        for worker in workers:
            worker.close()
        self._refuse(ModelLostError)

    def _refuse(self, make_error: Callable[[], Exception]) -> None:
        """Tell whoever waits for a worker that there is none."""
        if not self._host.workers or self._lost.is_set():
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_exception(make_error())
