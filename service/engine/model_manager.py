"""The models of this process: loaded when wanted, found by name, unloaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from layertap.models.errors import Failure, LayertapError, LoadError
from layertap.models.model_info import ModelInfo
from layertap.models.registry import ModelEntry, Registry
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.executor import Executor
from layertap.service.engine.model_worker import ModelWorker
from layertap.service.engine.scheduler import Scheduler
from layertap.service.engine.unavailable import failure_error, unloading_error
from layertap.service.errors import DeadlineError, UnavailableError
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
LOADING_RETRY_S = 5.0
FAILED_RETRY_S = 60.0
ABORT_S = 2.0  # for forwards that nobody waits for
OWN_CODE = frozenset[Failure]({"code", "forward", "other"})  # failures of what the operator has written, or may have


class ModelManager:
    """The workers of this process by the names of their models. Used on the event loop, which it never blocks.

    ``on_unload`` hears of each worker that is gone, by its generation.
    """

    def __init__(
        self,
        registry: Registry,
        default: str,
        settings: Settings,
        metrics: Metrics,
        create_executor: Callable[[ModelInfo], Executor],
    ) -> None:
        self.registry = registry
        self.default = default
        self.draining = False
        self.workers: dict[str, ModelWorker] = {}
        self.on_unload: Callable[[int], None] = lambda generation: None
        self.scheduler = Scheduler(
            metrics, settings.cpu_threads, on_failure=self._fail_all, gpu_streams=settings.gpu_streams
        )
        self._ending = False
        self._aborted = asyncio.Event()
        self._settings = settings
        self._create_executor = create_executor

    def start(self) -> None:
        """Begin to load the models that are wanted from the start."""
        for entry in self.registry:
            if entry.spec.load == "startup":
                self._start(entry)

    async def wait_until_loaded(self) -> None:
        """Return once every model that began to load is loaded or has failed."""
        loading = [asyncio.wrap_future(worker.settled) for worker in self.workers.values()]
        if loading:
            await asyncio.wait(loading)  # which cancels none of them

    @property
    def ready(self) -> bool:
        """Whether every model wanted from the start is loaded or has failed, and the server is not draining."""
        settled = all(
            self.workers[entry.spec.name].loaded.done()
            for entry in self.registry
            if entry.spec.load == "startup" and entry.spec.name in self.workers
        )
        return settled and not self.draining and not self._ending

    @property
    def load_failures(self) -> list[Failure]:
        """What failed of each model that is wanted from the start, and required, and could not be loaded."""
        required = (entry for entry in self.registry if entry.spec.load == "startup" and entry.spec.required)
        return [entry.kind for entry in required if entry.state == "failed"]

    @property
    def alive(self) -> bool:
        """Whether nothing failed for good; asked by any thread."""
        return not self.scheduler.failure

    def withdraw_readiness(self) -> None:
        """Requests are served as before, but the server is not ready any more: it will end soon."""
        self._ending = True

    def abort_loading(self) -> None:
        """The process is about to end: whoever waits for a model to be loaded is told so; called on the event loop."""
        self._aborted.set()

    async def close(self) -> None:
        """Finish what was submitted, then end the threads; of a process that ends, those that soon can be."""
        self.draining = True
        limit_s = ABORT_S if self._aborted.is_set() else self._settings.deadline_s
        if not self.alive:
            limit_s = 0.0
        await asyncio.gather(*(self._stop(name, limit_s) for name in list(self.workers)))
        self.scheduler.close()

    async def get_worker(self, name: str | None, deadline: float) -> ModelWorker:
        """The worker of a model by its name (None: the default), loaded if it is not yet.

        UnknownModelError; UnavailableError while draining, where loading failed, or where it lasts beyond the deadline.
        """
        entry = self.registry.get_entry(self.default if name is None else name)
        if self.draining:
            raise UnavailableError("the server is shutting down", retry_after=LOADING_RETRY_S)
        if self.scheduler.failure:
            raise failure_error(self.scheduler.failure)
        worker = self.workers.get(entry.spec.name) or self._start_one_more(entry)
        if worker.stopping:
            raise unloading_error(worker.name)
        worker.last_used = time.monotonic()
        if not worker.loaded.done():
            await self._wait_for(worker, deadline)
        # Looked at, not raised again: an exception that many requests raise keeps the frames of all of them.
        error = worker.loaded.exception()
        if error is None:
            return worker
        detail, hint = (error.detail, error.hint) if isinstance(error, LayertapError) else (type(error).__name__, "")
        detail = f"model {worker.name} could not be loaded: {detail}"
        hint = "; ".join(filter(None, (hint, f"POST /models/{worker.name}/load tries again")))
        raise UnavailableError(detail, hint=hint, retry_after=FAILED_RETRY_S)

    async def load(self, name: str, deadline: float) -> None:
        """Load a model, also one whose loading failed before."""
        if self.registry.get_entry(name).state == "failed":
            await self.unload(name)
        await self.get_worker(name, deadline)

    async def unload(self, name: str) -> None:
        """Finish the model's queue, then forget it."""
        self.registry.get_entry(name)
        await self._stop(name, None)

    def _fail_all(self, reason: str) -> None:
        """No model can be relied on, as long as this process lasts."""
        log.critical("the server has to be restarted", extra={"fields": {"reason": reason}})
        for entry in self.registry:
            if entry.model is not None:
                self.registry.fail(entry.spec.name, reason)

    async def _wait_for(self, worker: ModelWorker, deadline: float) -> None:
        """Return once a model is loaded or has failed; UnavailableError where that lasts too long, or is given up."""
        aborted = asyncio.ensure_future(self._aborted.wait())
        settled = asyncio.wrap_future(worker.settled)
        try:
            with suppress(DeadlineError):
                await wait_until(deadline, asyncio.wait((settled, aborted), return_when=asyncio.FIRST_COMPLETED))
        finally:
            aborted.cancel()
        if not worker.loaded.done():
            raise UnavailableError(f"model {worker.name} is loading", retry_after=LOADING_RETRY_S)

    def _start_one_more(self, entry: ModelEntry) -> ModelWorker:
        self._make_room()
        return self._start(entry)

    def _start(self, entry: ModelEntry) -> ModelWorker:
        name = entry.spec.name
        entry.state = "loading"
        worker = ModelWorker(
            name, partial(self._load, name), partial(self.registry.fail, name), self.scheduler, self._settings
        )
        self.workers[name] = worker
        return worker

    def _load(self, name: str) -> Executor:
        try:
            model = self.registry.load(name)
            if model.report is not None and (report := model.report.describe()):
                log.info("a checkpoint was read", extra={"fields": {"model": name, **report}})
            try:
                return self._create_executor(model)
            except LoadError as error:
                self.registry.fail(name, error.detail, "other")
                raise
        except LayertapError as error:
            fields = {"model": name, "reason": error.detail, "hint": error.hint}
            traceback = error if isinstance(error, LoadError) and error.kind in OWN_CODE else None
            log.error("a model could not be loaded", exc_info=traceback, extra={"fields": fields})
            raise

    def _make_room(self) -> None:
        """Forget idle lazy models, the longest unused first, until one more may be loaded."""
        limit = self._settings.max_loaded_models
        while sum(not worker.failed for worker in self.workers.values()) >= limit:
            idle = [worker for worker in self.workers.values() if self._may_be_unloaded(worker)]
            if not idle:
                raise UnavailableError(
                    f"{limit} models are loaded and in use, as many as may be",
                    hint="come again later, or use a model that GET /models calls ready",
                    retry_after=LOADING_RETRY_S,
                )
            oldest = min(idle, key=lambda worker: worker.last_used)
            self.scheduler.remove_model(oldest)
            self._remove(oldest)

    def _may_be_unloaded(self, worker: ModelWorker) -> bool:
        lazy = self.registry.get_entry(worker.name).spec.load == "lazy"
        return lazy and worker.is_active and not worker.stopping and not worker.rows and self.scheduler.is_idle(worker)

    async def _stop(self, name: str, limit_s: float | None) -> None:
        # The worker keeps its place until its threads have ended: others would be more threads in the model.
        worker = self.workers.get(name)
        if worker is not None:
            await worker.stop(limit_s)
            if self.workers.get(name) is worker:
                self._remove(worker)

    def _remove(self, worker: ModelWorker) -> None:
        del self.workers[worker.name]
        self.registry.unload(worker.name)
        self.on_unload(worker.generation)
