"""The models of this process and their threads: started when wanted, found by name, stopped."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from models.errors import LayertapError, TooLargeError
from models.loaded import LoadedModel
from models.registry import Entry, Registry
from service.engine.worker import Worker
from service.errors import DeadlineError, QueueFullError, UnavailableError
from service.settings import Settings

T = TypeVar("T")
log = logging.getLogger("layertap")
LOADING_RETRY_S = 5.0
FAILED_RETRY_S = 60.0


class Fleet:
    """One worker for each model that is loaded or being loaded. Used on the event loop, which it never blocks."""

    def __init__(self, registry: Registry, default: str, settings: Settings) -> None:
        self.registry = registry
        self.default = default
        self.draining = False
        self._settings = settings
        self._workers: dict[str, Worker] = {}

    def start(self) -> None:
        """Begin to load the models that are wanted from the start."""
        for entry in self.registry:
            if entry.spec.load == "startup":
                self._start(entry)

    @property
    def ready(self) -> bool:
        """Whether every model wanted from the start is loaded or has failed, and the server is not draining."""
        settled = all(
            self._workers[entry.spec.name].loaded.done()
            for entry in self.registry
            if entry.spec.load == "startup" and entry.spec.name in self._workers
        )
        return settled and not self.draining

    @property
    def alive(self) -> bool:
        """Whether the thread of every loaded model is."""
        return not any(worker.dead for worker in self._workers.values())

    async def close(self) -> None:
        """Finish what was submitted, then end the threads."""
        self.draining = True
        limit = self._settings.deadline_s
        await asyncio.gather(*(self._stop(name, limit) for name in list(self._workers)))

    async def model(self, name: str | None, deadline: float) -> LoadedModel:
        """A model by name (None: the default), loaded if it is not yet.

        UnknownModelError; UnavailableError while draining, where loading failed, or where it lasts beyond the deadline.
        """
        entry = self.registry.entry(self.default if name is None else name)
        if self.draining:
            raise UnavailableError("the server is shutting down", retry_after=LOADING_RETRY_S)
        worker = self._workers.get(entry.spec.name) or self._start_one_more(entry)
        if worker.stopping:
            raise _unloaded(entry.spec.name)
        worker.last_used = time.monotonic()
        try:
            await within(deadline, asyncio.wait((asyncio.wrap_future(worker.loaded),)))
        except DeadlineError:
            if not worker.loaded.done():
                raise UnavailableError(f"model {entry.spec.name} is loading", retry_after=LOADING_RETRY_S) from None
        # Looked at, not raised again: an exception that many requests raise keeps the frames of all of them.
        error = worker.loaded.exception()
        if error is None:
            return worker.loaded.result()
        detail, hint = (error.detail, error.hint) if isinstance(error, LayertapError) else (type(error).__name__, "")
        detail = f"model {entry.spec.name} could not be loaded: {detail}"
        raise UnavailableError(detail, hint=hint, retry_after=FAILED_RETRY_S)

    async def load(self, name: str, deadline: float) -> LoadedModel:
        """Load a model, also one whose loading failed before."""
        if self.registry.entry(name).state == "failed":
            await self.unload(name)
        return await self.model(name, deadline)

    async def unload(self, name: str) -> None:
        """Finish the model's queue, then forget it."""
        self.registry.entry(name)
        await self._stop(name, None)

    async def call(self, model: LoadedModel, run: Callable[[LoadedModel], T], deadline: float) -> T:
        """Run a function in the model's thread; DeadlineError where it has not ended by then."""
        worker = self._workers.get(model.spec.name)
        if worker is None or worker.stopping or worker.loaded.result() is not model:
            raise _unloaded(model.spec.name)
        return await within(deadline, asyncio.wrap_future(worker.submit(run)))

    @contextmanager
    def admitted(self, model: LoadedModel, rows: int) -> Iterator[Callable[[int], None]]:
        """A place for so many rows while they wait and run; the function given makes it one for another number.

        QueueFullError where the queue is full, TooLargeError where it could never hold as many.
        """
        worker, limit, held = self._workers.get(model.spec.name), self._settings.max_queue_rows, 0
        if worker is None or worker.stopping:
            raise _unloaded(model.spec.name)

        def hold(rows: int) -> None:
            nonlocal held
            others = worker.rows - held
            if rows > limit:
                raise TooLargeError(f"{rows} inputs are more than the queue holds, {limit}", hint="send fewer at once")
            if others + rows > limit:
                wait = math.ceil(max(others * model.catalog.seconds, 1.0))
                raise QueueFullError(f"the queue holds {others} rows of {limit}", retry_after=wait)
            worker.rows, held = others + rows, rows

        hold(rows)
        try:
            yield hold
        finally:
            worker.rows -= held

    def _start_one_more(self, entry: Entry) -> Worker:
        self._make_room()
        return self._start(entry)

    def _start(self, entry: Entry) -> Worker:
        name = entry.spec.name
        entry.state = "loading"
        worker = self._workers[name] = Worker(name, lambda: self._load(name))
        return worker

    def _load(self, name: str) -> LoadedModel:
        try:
            return self.registry.load(name)
        except LayertapError as error:
            reason = {"model": name, "reason": error.detail, "hint": error.hint}
            log.error("a model could not be loaded", extra={"fields": reason})
            raise

    def _make_room(self) -> None:
        """Forget idle lazy models, the longest unused first, until one more may be loaded."""
        while sum(not worker.failed for worker in self._workers.values()) >= self._settings.max_loaded_models:
            idle = [name for name, worker in self._workers.items() if self._may_go(name, worker)]
            if not idle:
                raise UnavailableError("as many models are loaded as may be", retry_after=LOADING_RETRY_S)
            oldest = min(idle, key=lambda name: self._workers[name].last_used)
            self._workers.pop(oldest).stop()
            self.registry.unload(oldest)

    def _may_go(self, name: str, worker: Worker) -> bool:
        lazy = self.registry.entry(name).spec.load == "lazy"
        return lazy and worker.loaded.done() and not worker.failed and not worker.stopping and worker.rows == 0

    async def _stop(self, name: str, patience: float | None) -> None:
        # The worker keeps its place until its thread has ended: another one would be a second thread in the model.
        worker = self._workers.get(name)
        if worker is not None:
            worker.stop()
            await asyncio.to_thread(worker.join, patience)
            if self._workers.get(name) is worker:
                del self._workers[name]
                self.registry.unload(name)


def _unloaded(name: str) -> UnavailableError:
    return UnavailableError(f"model {name} is being unloaded", retry_after=1.0)


async def within(deadline: float, awaited: Awaitable[T]) -> T:
    """Await until a moment on the monotonic clock; DeadlineError then."""
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
            return await awaited
    except TimeoutError:
        raise DeadlineError("the deadline passed before the answer was there") from None
