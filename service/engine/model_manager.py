"""The models of this process: started when wanted, found by name, stopped; who may wait for them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from layertap.models.errors import Failure, LayertapError, LoadError, TooLargeError
from layertap.models.loaded_model import LoadedModel
from layertap.models.registry import ModelEntry, Registry
from layertap.service.engine.admission import Budget
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.model_worker import ModelWorker
from layertap.service.engine.scheduler import Scheduler, failed_error
from layertap.service.errors import DeadlineError, QueueFullError, QueueTooLongError, UnavailableError
from layertap.service.metrics import Metrics, Snapshot
from layertap.service.settings import Settings

T = TypeVar("T")
log = logging.getLogger("layertap")
LOADING_RETRY_S = 5.0
FAILED_RETRY_S = 60.0
HURRY_S = 2.0  # for forwards that nobody waits for
OWN_CODE = frozenset[Failure]({"code", "forward", "other"})  # failures of what the operator has written, or may have
MARGIN = 1.25  # what is expected may take so many times as long


class ModelManager:
    """The residents of this process by name. Used on the event loop, which it never blocks."""

    def __init__(self, registry: Registry, default: str, settings: Settings, metrics: Metrics) -> None:
        self.registry = registry
        self.default = default
        self.draining = False
        self._leaving = False
        self._hurried = asyncio.Event()
        self.scheduler = Scheduler(metrics, settings.cpu_threads, on_loss=self._lose, streams=settings.gpu_streams)
        self._settings = settings
        self._metrics = metrics
        self._workers: dict[str, ModelWorker] = {}
        self.budget = Budget(settings.max_queue_bytes, self._longest_wait, metrics)

    def start(self) -> None:
        """Begin to load the models that are wanted from the start."""
        for entry in self.registry:
            if entry.spec.load == "startup":
                self._start(entry)

    async def wait_until_loaded(self) -> None:
        """Return once every model that began to load is loaded or has failed."""
        loading = [asyncio.wrap_future(resident.settled) for resident in self._workers.values()]
        if loading:
            await asyncio.wait(loading)  # which cancels none of them

    @property
    def ready(self) -> bool:
        """Whether every model wanted from the start is loaded or has failed, and the server is not draining."""
        settled = all(
            self._workers[entry.spec.name].loaded.done()
            for entry in self.registry
            if entry.spec.load == "startup" and entry.spec.name in self._workers
        )
        return settled and not self.draining and not self._leaving

    @property
    def load_failures(self) -> list[Failure]:
        """What failed of each model that is wanted from the start, and required, and could not be loaded."""
        wanted = (entry for entry in self.registry if entry.spec.load == "startup" and entry.spec.required)
        return [entry.kind for entry in wanted if entry.state == "failed"]

    @property
    def alive(self) -> bool:
        """Whether the threads of every loaded model are, and nothing is lost for good; asked by any thread."""
        return not self.scheduler.failure and not any(resident.is_dead for resident in list(self._workers.values()))

    def withdraw_readiness(self) -> None:
        """Requests are served as before, but the server is not ready any more: it will end soon."""
        self._leaving = True

    def abort_loading(self) -> None:
        """The process is about to end: whoever waits for a model to be loaded is told so; called on the event loop."""
        self._hurried.set()

    async def close(self) -> None:
        """Finish what was submitted, then end the threads; of a process that ends, those that soon can be."""
        self.draining = True
        limit = HURRY_S if self._hurried.is_set() else self._settings.deadline_s
        if not self.alive:
            limit = 0.0
        await asyncio.gather(*(self._stop(name, limit) for name in list(self._workers)))
        self.scheduler.close()

    async def get_model(self, name: str | None, deadline: float) -> LoadedModel:
        """A model by name (None: the default), loaded if it is not yet.

        UnknownModelError; UnavailableError while draining, where loading failed, or where it lasts beyond the deadline.
        """
        entry = self.registry.entry(self.default if name is None else name)
        if self.draining:
            raise UnavailableError("the server is shutting down", retry_after=LOADING_RETRY_S)
        if self.scheduler.failure:
            raise failed_error(self.scheduler.failure)
        resident = self._workers.get(entry.spec.name) or self._start_one_more(entry)
        if resident.stopping:
            raise _unloaded(entry.spec.name)
        resident.last_used = time.monotonic()
        if not resident.loaded.done():
            await self._loaded(resident, entry.spec.name, deadline)
        # Looked at, not raised again: an exception that many requests raise keeps the frames of all of them.
        error = resident.loaded.exception()
        if error is None:
            return resident.loaded.result()
        detail, hint = (error.detail, error.hint) if isinstance(error, LayertapError) else (type(error).__name__, "")
        detail = f"model {entry.spec.name} could not be loaded: {detail}"
        hint = "; ".join(filter(None, (hint, f"POST /models/{entry.spec.name}/load tries again")))
        raise UnavailableError(detail, hint=hint, retry_after=FAILED_RETRY_S)

    async def load(self, name: str, deadline: float) -> LoadedModel:
        """Load a model, also one whose loading failed before."""
        if self.registry.entry(name).state == "failed":
            await self.unload(name)
        return await self.get_model(name, deadline)

    async def unload(self, name: str) -> None:
        """Finish the model's queue, then forget it."""
        self.registry.entry(name)
        await self._stop(name, None)

    def get_worker(self, model: LoadedModel) -> ModelWorker:
        """Where a loaded model lives; UnavailableError where it does no more.

        One that is about to go still serves what was admitted: it waits for that.
        """
        resident = self._workers.get(model.spec.name)
        if (
            resident is None
            or resident.loaded.result() is not model
            or self.scheduler.get_threads(model.spec.name) is None
        ):
            raise _unloaded(model.spec.name)
        return resident

    async def call_model(self, model: LoadedModel, run: Callable[[LoadedModel], T], deadline: float) -> T:
        """Run a function in the model's first thread; DeadlineError where it has not ended by then."""
        self.get_worker(model)
        return await wait_until(deadline, asyncio.wrap_future(self.scheduler.call(model.spec.name, run)))

    @contextmanager
    def admit(self, model: LoadedModel, rows: int, deadline: float) -> Iterator[Callable[[int], None]]:
        """A place for so many rows while they wait and run; the function given makes it one for another number.

        QueueFullError where the queue is full or so long that the deadline would pass, TooLargeError where it could
        never hold as many.
        """
        resident, held = self.get_worker(model), 0
        if resident.stopping:
            raise _unloaded(model.spec.name)

        def hold(rows: int) -> None:
            nonlocal held
            if rows > held:  # who has a place keeps it, whoever came later
                self._check_place(resident, rows, held, deadline)
            resident.rows, held = resident.rows - held + rows, rows

        hold(rows)
        try:
            yield hold
        finally:
            resident.rows -= held
            resident.left()

    def estimate_wait(self, name: str | None) -> float:
        """Seconds until a model (None: the default) has answered all that is here now, or let it go by its deadline."""
        resident = self._workers.get(self.default if name is None else name)
        return min(self._wait(resident, resident.rows), self._settings.deadline_s) if resident else 0.0

    def snapshot(self) -> Snapshot:
        """What is so at this moment, for the metrics; called by any thread."""
        entries, residents = list(self.registry), dict(self._workers)
        models = [(entry.spec.name, entry.model) for entry in entries]
        waiting = {name: self.scheduler.count_waiting_rows(name) for name in residents}
        rows = sum(resident.rows for resident in residents.values())
        return Snapshot(
            queue_rows=sum(waiting.values()),
            queue_bytes=self.budget.used,
            running_rows=max(rows - sum(waiting.values()), 0),
            states={entry.spec.name: entry.state for entry in entries},
            hooks={name: model.hooks for name, model in models if model is not None},
            ceilings={
                name: resident.max_batch_rows() for name, resident in residents.items() if resident.max_batch_rows()
            },
        )

    def _lose(self, reason: str) -> None:
        """No model can be relied on, as long as this process lasts."""
        log.critical("the server has to be restarted", extra={"fields": {"reason": reason}})
        for entry in self.registry:
            if entry.model is not None:
                self.registry.fail(entry.spec.name, reason)

    def _check_place(self, resident: ModelWorker, rows: int, held: int, deadline: float) -> None:
        limit, others = self._settings.max_queue_rows, resident.rows - held
        if rows > limit:
            detail = f"{rows} inputs are more than the queue holds, {limit}"
            raise TooLargeError(detail, hint=f"send at most {limit} at once")
        wait = self._wait(resident, others)
        if others + rows > limit:
            self._metrics.count_refused("queue_rows")
            detail, room = f"the queue holds {others} rows of {limit}", limit - others
            fewer = f", or send at most {room} input{'s' if room > 1 else ''} now" if room > 0 else ""
            raise QueueFullError(detail, hint=f"come again later{fewer}", retry_after=max(math.ceil(wait), 1))
        needed = MARGIN * (wait + rows * resident.seconds_per_row)
        if others and needed > deadline - time.monotonic():
            self._metrics.count_refused("deadline")
            raise QueueTooLongError(
                f"{others} rows wait already, which takes about {wait:.1f} s: the deadline would pass",
                retry_after=max(math.ceil(wait), 1),
                needed_s=needed,
            )

    def _wait(self, resident: ModelWorker, rows: int) -> float:
        """Seconds until so many rows of a model are done: others on its device get as much time if they want it."""
        own = rows * resident.seconds_per_row
        rivals = (each for each in self._workers.values() if each is not resident and each.device == resident.device)
        return own + sum(min(own, rival.rows * rival.seconds_per_row) for rival in rivals)

    def _longest_wait(self) -> float:
        """Seconds until all that is admitted now is done."""
        return max((self._wait(each, each.rows) for each in self._workers.values()), default=0.0)

    async def _loaded(self, resident: ModelWorker, name: str, deadline: float) -> None:
        hurried = asyncio.ensure_future(self._hurried.wait())
        settled = asyncio.wrap_future(resident.settled)
        try:
            with suppress(DeadlineError):
                await wait_until(deadline, asyncio.wait((settled, hurried), return_when=asyncio.FIRST_COMPLETED))
        finally:
            hurried.cancel()
        if not resident.loaded.done():
            raise UnavailableError(f"model {name} is loading", retry_after=LOADING_RETRY_S)

    def _start_one_more(self, entry: ModelEntry) -> ModelWorker:
        self._make_room()
        return self._start(entry)

    def _start(self, entry: ModelEntry) -> ModelWorker:
        name = entry.spec.name
        entry.state = "loading"
        resident = ModelWorker(
            name, lambda: self._load(name), partial(self.registry.fail, name), self.scheduler, self._settings
        )
        self._workers[name] = resident
        return resident

    def _load(self, name: str) -> LoadedModel:
        try:
            return self.registry.load(name)
        except LayertapError as error:
            reason = {"model": name, "reason": error.detail, "hint": error.hint}
            traceback = error if isinstance(error, LoadError) and error.kind in OWN_CODE else None
            log.error("a model could not be loaded", exc_info=traceback, extra={"fields": reason})
            raise

    def _make_room(self) -> None:
        """Forget idle lazy models, the longest unused first, until one more may be loaded."""
        while sum(not resident.failed for resident in self._workers.values()) >= self._settings.max_loaded_models:
            idle = [name for name, resident in self._workers.items() if self._may_go(name, resident)]
            if not idle:
                raise UnavailableError(
                    f"{self._settings.max_loaded_models} models are loaded and in use, as many as may be",
                    hint="come again later, or use a model that GET /models calls ready",
                    retry_after=LOADING_RETRY_S,
                )
            oldest = min(idle, key=lambda name: self._workers[name].last_used)
            del self._workers[oldest]
            self.scheduler.remove_model(oldest)
            self.registry.unload(oldest)

    def _may_go(self, name: str, resident: ModelWorker) -> bool:
        lazy = self.registry.entry(name).spec.load == "lazy"
        there = resident.loaded.done() and not resident.failed and not resident.stopping
        return lazy and there and resident.rows == 0 and self.scheduler.is_idle(name)

    async def _stop(self, name: str, patience: float | None) -> None:
        # The resident keeps its place until its threads have ended: others would be more threads in the model.
        resident = self._workers.get(name)
        if resident is not None:
            await resident.stop(patience)
            if self._workers.get(name) is resident:
                del self._workers[name]
                self.registry.unload(name)


def _unloaded(name: str) -> UnavailableError:
    return UnavailableError(f"model {name} is being unloaded", retry_after=1.0)
