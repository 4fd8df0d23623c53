"""The models of this process: loaded when wanted, found by name, replaced, unloaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from layertap.models.devices import transfer
from layertap.models.errors import LayertapError, LoadError
from layertap.models.model_info import ModelInfo
from layertap.models.registry import ModelEntry, Registry
from layertap.service import allocator
from layertap.service.engine.execute.executor import Executor
from layertap.service.engine.execute.threads import run_in_new_thread
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.models.model_room import ModelRoom
from layertap.service.engine.schedule.scheduler import Scheduler
from layertap.service.errors import DeadlineError, UnavailableError, ending_error, failure_error, unloading_error
from layertap.service.metrics import Metrics, Task
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
ABORT_S = 2.0  # for forwards that nobody waits for
TIDY_INTERVAL_S = 1.0
NO_ROOM_HINT = "POST /models/{}/unload first, or raise LAYERTAP_MODEL_MEMORY_BYTES or LAYERTAP_MAX_LOADED_MODELS"


class ModelManager:
    """The handles of this process by the names of their models. Used on the event loop, which it never blocks.

    ``handles`` answer new requests; beside them are those that load to take another's place, or finish what they have.
    ``on_unload`` hears of each handle that is gone, by its generation.
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
        self.handles: dict[str, ModelHandle] = {}
        self.on_unload: Callable[[int], None] = lambda generation: None
        self.scheduler = Scheduler(
            metrics, settings.cpu_threads, on_failure=self._fail_all, gpu_streams=settings.gpu_streams
        )
        self._others: set[ModelHandle] = set()
        self.room = ModelRoom(self.handles, self._others, settings, self._is_idle, self._unload_now)
        self._tasks: set[asyncio.Task[None]] = set()
        self._startup: set[str] = set()  # models that were wanted from the start
        self._unseen: set[str] = set()  # those of them that were never there
        self._has_unloaded = False
        self._ending = False
        self._aborted = asyncio.Event()
        self._settings = settings
        self._metrics = metrics
        self._create_executor = create_executor

    def start(self) -> None:
        """Begin to load the models that are wanted from the start."""
        self._startup = {entry.spec.name for entry in self.registry if entry.spec.load == "startup"}
        self._unseen = set(self._startup)
        for name in self._startup:
            self._start(self.registry.get_entry(name))
        self.run_beside(self._supervise("tidy", self._tidy))

    async def wait_until_loaded(self) -> None:
        """Return once every model that began to load is loaded or has failed."""
        for handle in list(self.handles.values()):
            await handle.wait_until_settled()

    @property
    def ready(self) -> bool:
        """Whether every model wanted from the start was loaded or has failed, and the server is not draining."""
        handles = {name: handle for name in self._unseen if (handle := self.handles.get(name)) is not None}
        self._unseen -= {name for name, handle in handles.items() if handle.is_active}
        settled = all(handles[name].is_settled for name in self._unseen & handles.keys())
        return settled and not self.draining and not self._ending

    @property
    def failures(self) -> list[ModelEntry]:
        """The models wanted from the start that could not be loaded, or broke later."""
        return [entry for entry in self.registry if entry.spec.name in self._startup and entry.state == "failed"]

    @property
    def load_failures(self) -> list[ModelEntry]:
        """Those of the failed models that keep the server from being ready, as the settings say."""
        failures = self.failures
        match self._settings.ready_when:
            case "all":
                return failures
            case "required":
                return [entry for entry in failures if entry.spec.required]
            case "any":
                wanted = [entry for entry in self.registry if entry.spec.name in self._startup]
                return failures if len(failures) == len(wanted) else []

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
        await asyncio.gather(*(self._stop(handle, limit_s) for handle in self.list_handles()))
        for task in self._tasks:
            task.cancel()

    def list_handles(self) -> list[ModelHandle]:
        """All that are loaded or load; called by any thread."""
        return [*dict(self.handles).values(), *self._others.copy()]

    def find_handle(self, name: str | None) -> ModelHandle | None:
        """The handle that answers for a model's name or alias (None: the default), where there is one."""
        return self.handles.get(self.find_name(name))

    def find_name(self, name: str | None) -> str:
        """A model's own name by its name or alias (None: the default); an unknown name is returned as it is."""
        name = self.default if name is None else name
        return self.registry.aliases.get(name, name)

    async def get_handle(self, name: str | None, deadline: float) -> ModelHandle:
        """The handle of a model by its name or alias (None: the default), loaded if it is not yet.

        Who awaits something else while he uses it holds it (``ModelHandle.hold``). UnknownModelError; UnavailableError
        while draining, where loading failed, or where it lasts beyond the deadline.
        """
        while True:
            entry = self.registry.get_entry(self.default if name is None else name)
            if self.draining:
                raise ending_error()
            if self.scheduler.failure:
                raise failure_error(self.scheduler.failure)
            handle = self.handles.get(entry.spec.name) or self._start_one_more(entry)
            if handle.answers == "none":
                raise unloading_error(handle.name, handle.rows * handle.seconds_per_row)
            handle.last_used = time.monotonic()
            if not handle.is_settled:
                await self._wait_for(handle, deadline)
            if handle.failed:  # a new error each time: one that many requests raise keeps the frames of all of them
                raise handle.make_error()
            if handle.answers == "all":
                return handle

    async def load(self, name: str, deadline: float) -> None:
        """Load a model, also one whose loading failed before."""
        if self.registry.get_entry(name).state == "failed":
            await self.unload(name)
        await self.get_handle(name, deadline)

    async def unload(self, name: str) -> None:
        """Finish the model's queue, then forget it."""
        handle = self.handles.get(self.registry.get_entry(name).spec.name)
        if handle is not None:
            await self._stop(handle, None)

    # Models that come and go while others serve

    async def exchange(self, entry: ModelEntry) -> None:
        """Load a model beside the one of its name; once it is there new requests are its own.

        Requests that the other one has are answered by it, then it is let go. LoadError where it can't be loaded,
        UnavailableError where there is no room for it, and all is as it was.
        """
        self.room.make_for(entry, NO_ROOM_HINT.format(entry.spec.name))
        handle = self._create_handle(entry)
        self._others.add(handle)
        await handle.wait_until_settled()
        error = handle.error
        if error is not None or self.draining:
            self._others.discard(handle)
            await handle.stop(0.0 if error is None else None)
            raise error or ending_error()
        self.put_entry(entry)
        self._others.discard(handle)
        self.handles[handle.name] = handle

    def put_entry(self, entry: ModelEntry) -> None:
        """Let an entry take the place of the one of its name, or be one more; what answered for that is let go."""
        self._let_go(entry.spec.name)
        self.registry.put_entry(entry)

    def remove_entry(self, name: str) -> None:
        """Let a model go for good: new requests don't find it, those that it has are answered."""
        self.registry.remove_entry(name)
        self._let_go(name)

    def begin_loading(self, entry: ModelEntry) -> None:
        """Load a model that is listed, if it is not there yet, without anybody who waits for it."""
        if entry.spec.name not in self.handles and not self.draining:
            self._start(entry)

    def run_beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside requests, until it ends or the server does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, LayertapError):
            log.error("a task beside requests failed", exc_info=error)
            self._metrics.count_task_failure("once")

    async def _supervise(self, name: Task, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something as long as the server lasts, and again where it raises."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("a task beside requests failed", extra={"fields": {"task": name}})
                self._metrics.count_task_failure(name)
            await asyncio.sleep(TIDY_INTERVAL_S)

    def _is_idle(self, handle: ModelHandle) -> bool:
        return self.scheduler.is_idle(handle.key)

    def _let_go(self, name: str) -> None:
        handle = self.handles.pop(name, None)
        if handle is not None:
            handle.let_go()
            self._others.add(handle)
            self.run_beside(self._stop_when_released(handle))

    async def _stop_when_released(self, handle: ModelHandle) -> None:
        await handle.wait_until_released()
        await self._stop(handle, None)
        log.info("a model's former version is unloaded", extra={"fields": {"model": handle.name}})

    async def _tidy(self) -> None:
        if self._has_unloaded:  # and by now let go of what it had
            self._has_unloaded = False
            await asyncio.to_thread(allocator.release_memory)
        self.room.tidy()

    def _fail_all(self, reason: str) -> None:
        """No model can be relied on, as long as this process lasts."""
        log.critical("the server has to be restarted", extra={"fields": {"reason": reason}})
        for entry in self.registry:
            if entry.model is not None:
                entry.fail(reason)

    async def _wait_for(self, handle: ModelHandle, deadline: float) -> None:
        """Return once a model is loaded or has failed, or another version has taken its place.

        UnavailableError where that lasts too long, or is given up.
        """
        loading = asyncio.ensure_future(handle.wait_until_loaded(deadline))
        aborted = asyncio.ensure_future(self._aborted.wait())
        try:
            with suppress(DeadlineError), handle.hold():
                await asyncio.wait((loading, aborted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loading.cancel()
            aborted.cancel()
        if not handle.is_settled and handle.answers == "all":
            raise UnavailableError(f"model {handle.name} is loading", retry_after=handle.seconds_to_load)

    def _start_one_more(self, entry: ModelEntry) -> ModelHandle:
        self.room.make_for(entry)
        return self._start(entry)

    def _start(self, entry: ModelEntry) -> ModelHandle:
        handle = self.handles[entry.spec.name] = self._create_handle(entry)
        return handle

    def _create_handle(self, entry: ModelEntry) -> ModelHandle:
        entry.state = "loading"
        return ModelHandle(entry, partial(self._load, entry), self.scheduler, self._settings)

    async def _load(self, entry: ModelEntry) -> Executor:
        """What runs a model, once it is loaded; LayertapError."""
        executor = await run_in_new_thread(f"load-{entry.spec.name}", partial(self._load_here, entry))
        try:
            self.room.check_size(entry)
        except LoadError:
            await executor.close()
            raise
        return executor

    def _load_here(self, entry: ModelEntry) -> Executor:
        """The same in a thread, whatever the model takes."""
        model = self.registry.load_entry(entry)
        entry.state = "loading"  # until it can be asked
        if model.report is not None and (report := model.report.describe()):
            log.info("a checkpoint was read", extra={"fields": {"model": entry.spec.name, **report}})
        executor = self._create_executor(model)
        entry.memory_bytes = executor.memory_bytes
        if model.device.type == "cuda":
            transfer.synchronize_device(model.device)
        return executor

    def _unload_now(self, handle: ModelHandle) -> None:
        """Let go of a handle that nobody uses."""
        log.info("a model is unloaded", extra={"fields": {"model": handle.name}})
        self._forget(handle)
        self.run_beside(handle.stop(None))

    async def _stop(self, handle: ModelHandle, limit_s: float | None) -> None:
        # The handle keeps its place until its threads have ended: others would be more threads in the model.
        await handle.stop(limit_s)
        self._forget(handle)

    def _forget(self, handle: ModelHandle) -> None:
        if self.handles.get(handle.name) is handle:
            del self.handles[handle.name]
            handle.entry.unload()
        elif handle not in self._others:
            return
        self._others.discard(handle)
        self._has_unloaded = True
        self.on_unload(handle.generation)
