"""The models of this process: loaded on demand or at the start, found by name, replaced, unloaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from layertap.models.devices import transfer
from layertap.models.devices.devices import is_accelerator, resolve_device
from layertap.models.devices.memory import measure_available_bytes
from layertap.models.errors import LayertapError
from layertap.models.registry import ModelEntry, Registry
from layertap.models.run.model_info import ModelInfo
from layertap.service import allocator
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.execute.executor import Executor
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.schedule.scheduler import Scheduler
from layertap.service.errors import (
    DeadlineError,
    UnavailableError,
    ending_error,
    failure_error,
    starting_error,
    unloaded_error,
    unloading_error,
)
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings
from layertap.service.timings import Timings

log = logging.getLogger("layertap")
ABORT_S = 2.0  # for forwards whose requests are gone
TIDY_INTERVAL_S = 1.0
NO_ROOM_RETRY_S = 5.0
COME_AGAIN = "come again later, or use a model that GET /models calls ready"
NO_ROOM_HINT = "POST /models/{}/unload first, or raise LAYERTAP_MODEL_MEMORY_BYTES or LAYERTAP_MAX_LOADED_MODELS"


class ModelManager:
    """The handles of this process, by model name. For the event loop, which it never blocks.

    ``handles`` answer new requests; ``list_handles`` also has replacements that are loading and handles that finish
    their requests. ``ending``: the process will end soon, and no more than one reply goes over a connection.

    The settings limit the number of models, their bytes and their idle time. All loaded and loading models count: with
    their measured bytes, or the expected ones while they load. These stay: a model with unanswered requests, one whose
    next version is loading, and one loaded at the start, unless it has a time-out of its own. Of the others, the least
    recently used one goes first.
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
        self.ending = False
        self.handles: dict[str, ModelHandle] = {}
        self.scheduler = Scheduler(
            metrics, settings.cpu_threads, on_failure=self._fail_all, gpu_streams=settings.gpu_streams
        )
        self._all: set[ModelHandle] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._startup: set[str] = set()  # models to load at the start
        self._unseen: set[str] = set()  # those of them that have not loaded yet
        self._starting: set[ModelHandle] = set()  # of the start, neither loaded nor failed yet
        self._unloaded: set[str] = set()  # by an administrator, and not lazy
        self._has_unloaded = False
        self._is_over_budget = False
        self._aborted = False
        self._settings = settings
        self._metrics = metrics
        self._create_executor = create_executor

    def start(self) -> None:
        """Begin to load the models that are configured to load at the start."""
        self._startup = {entry.spec.name for entry in self.registry if entry.spec.load == "startup"}
        self._unseen = set(self._startup)
        for name in self._startup:
            handle = self._start(self.registry.get_entry(name))
            self._starting.add(handle)
            self.run_beside(self._settle_start(handle))
        self.run_beside(self._keep_tidy())

    async def wait_until_loaded(self) -> None:
        """Return once every model that is loading has loaded or failed."""
        for handle in list(self.handles.values()):
            await handle.wait_until_settled()

    @property
    def ready(self) -> bool:
        """Whether all models to load at the start have loaded or failed, and the server is not draining."""
        unseen = [handle for name in self._unseen if (handle := self.handles.get(name)) is not None]
        self._unseen -= {handle.name for handle in unseen if handle.state == "ready"}
        return not (self.draining or self.ending or any(handle.state == "loading" for handle in unseen))

    @property
    def can_answer(self) -> bool:
        """Whether there is a model that answers, or that is loaded when it is asked for."""
        return any(
            entry.state == "ready" or (entry.spec.load == "lazy" and entry.state != "failed") for entry in self.registry
        )

    @property
    def failures(self) -> list[ModelEntry]:
        """The models to load at the start that could not be loaded, or broke later."""
        return [entry for entry in self.registry if entry.spec.name in self._startup and entry.state == "failed"]

    @property
    def load_failures(self) -> list[ModelEntry]:
        """The failed models that keep the server from being ready, by the settings."""
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
        """Whether the process can go on; any thread may ask."""
        return not self.scheduler.failure

    def abort_loading(self) -> None:
        """Fail the requests that wait for a model to load, because the process is about to end; on the event loop."""
        self._aborted = True
        for handle in self._all:
            handle.changed.set()

    async def close(self) -> None:
        """Finish admitted work, then end the threads; in a process that ends, only within a short time."""
        self.draining = True
        limit_s = 0.0 if not self.alive else ABORT_S if self._aborted else self._settings.deadline_s
        await asyncio.gather(*(self._stop(handle, limit_s) for handle in self.list_handles()))
        for task in self._tasks:
            task.cancel()

    def list_handles(self) -> list[ModelHandle]:
        """All handles that are loaded or loading; any thread may ask."""
        return list(self._all.copy())

    def find_handle(self, name: str | None) -> ModelHandle | None:
        """The handle that answers for a model's name or alias (None: the default); None if there is none."""
        return self.handles.get(self.find_name(name))

    def find_name(self, name: str | None) -> str:
        """The model's name for a name or alias (None: the default); an unknown name is returned unchanged."""
        name = self.default if name is None else name
        return self.registry.aliases.get(name, name)

    def find_ready(self, name: str | None) -> ModelHandle | None:
        """The handle of a model that answers now, by its name or alias (None: the default); else None."""
        handle = self.handles.get(self.find_name(name))
        if handle is None or handle.state != "ready" or handle.answers != "all" or self.draining:
            return None
        handle.last_used = time.monotonic()
        return handle if not self.scheduler.failure else None

    async def get_handle(self, name: str | None, deadline: float, timings: Timings | None = None) -> ModelHandle:
        """The handle of a model by its name or alias (None: the default), loaded if necessary.

        A caller that awaits anything else while using it must hold it (``ModelHandle.hold``). UnknownModelError;
        UnavailableError while draining, after an administrator unloaded the model, if loading failed, if it takes
        longer than the deadline, and at once while the server starts with it: another server may answer meanwhile.
        """
        while True:
            entry = self.registry.get_entry(self.default if name is None else name)
            if self.draining:
                raise ending_error()
            if self.scheduler.failure:
                raise failure_error(self.scheduler.failure)
            if (handle := self.handles.get(entry.spec.name)) is None:
                if entry.spec.name in self._unloaded and entry.spec.load != "lazy":
                    raise unloaded_error(entry.spec.name)
                self._make_room(entry)
                handle = self._start(entry)
            if handle.answers == "none":
                raise unloading_error(handle.name, handle.rows * handle.seconds_per_row)
            handle.last_used = time.monotonic()
            if handle.state == "loading":
                if handle in self._starting:
                    raise starting_error(handle.name, handle.seconds_to_load)
                with (timings or Timings()).step("load"):
                    await self._wait_for(handle, deadline)
            if handle.state == "failed":
                raise handle.make_error()  # a new one: a shared one would keep the frames of all requests that raise it
            if handle.answers == "all":
                return handle

    async def load(self, name: str, deadline: float) -> None:
        """Load a model, also one that failed to load."""
        if self.registry.get_entry(name).state == "failed":
            await self.unload(name)
        self._unloaded.discard(self.registry.get_entry(name).spec.name)
        if (handle := self.find_handle(name)) in self._starting:  # who asks for just that waits for it
            await self._wait_for(handle, deadline)
        await self.get_handle(name, deadline)

    async def unload(self, name: str) -> None:
        """Finish the model's queue, then unload it; if it is not lazy, only ``load`` brings it back."""
        entry = self.registry.get_entry(name)
        if entry.spec.load != "lazy":
            self._unloaded.add(entry.spec.name)
        handle = self.handles.get(entry.spec.name)
        if handle is not None:
            await self._stop(handle, None)

    # Models that are replaced, added and removed while others serve

    async def exchange(self, entry: ModelEntry) -> None:
        """Load a new version of a model; once it is loaded, it gets new requests.

        The old version answers its own requests and is then unloaded. LoadError if the new one can't be loaded,
        UnavailableError if there is no room for it; in both cases nothing changes.
        """
        self._make_room(entry, NO_ROOM_HINT.format(entry.spec.name))
        handle = self._create_handle(entry)
        await handle.wait_until_settled()
        error = handle.error
        if error is not None or self.draining:
            await self._stop(handle, 0.0 if error is None else None)
            raise error or ending_error()
        self._unload_when_released(handle.name)
        self.registry.put_entry(entry)
        self.handles[handle.name] = handle

    def put_entry(self, entry: ModelEntry) -> ModelHandle | None:
        """Add an entry, or replace the one with its name; its handle, if it is to be loaded at the start.

        The old handle of the name finishes its requests and is unloaded.
        """
        self._unload_when_released(entry.spec.name)
        self.registry.put_entry(entry)
        return self._start(entry) if entry.spec.load == "startup" and not self.draining else None

    def remove_entry(self, name: str) -> None:
        """Remove a model: new requests don't find it, its own are answered."""
        self.registry.remove_entry(name)
        self._unload_when_released(name)

    # Which models stay

    def tidy(self) -> None:
        """Unload models that exceed their idle time, and unused ones while all models exceed the memory limit."""
        now = time.monotonic()
        for handle in list(self.handles.values()):
            spec = handle.entry.spec
            default_s = self._settings.model_idle_timeout_s if spec.load == "lazy" else None
            timeout_s = default_s if spec.idle_timeout_s is None else spec.idle_timeout_s
            if timeout_s is not None and now - handle.last_used >= timeout_s and handle.is_unused:
                self._unload_now(handle)
        budget = self._settings.model_memory_bytes
        if budget is None:
            return
        while (used := self._count_bytes()) > budget and (unused := self._list_unused()):
            self._unload_now(unused[0])
        was_over, self._is_over_budget = self._is_over_budget, used > budget
        if self._is_over_budget and not was_over:
            fields = {"used_bytes": used, "model_memory_bytes": budget}
            log.warning("models in use take more than all may: no other is loaded", extra={"fields": fields})

    def _make_room(self, entry: ModelEntry, hint: str = COME_AGAIN) -> None:
        """Unload models until one more may be loaded.

        UnavailableError with the hint, and nothing is unloaded, if the models in use leave no room.
        """
        unused, going = self._list_unused(), list[ModelHandle]()
        while shortage := self._find_shortage(entry, going):
            if not unused:
                raise UnavailableError(shortage, hint=hint, retry_after=NO_ROOM_RETRY_S)
            going.append(unused.pop(0))
        for handle in going:
            self._unload_now(handle)

    def _find_shortage(self, entry: ModelEntry, going: Sequence[ModelHandle]) -> str:
        """What is missing to load one more model once others are gone; empty if there is room."""
        limit, budget = self._settings.max_loaded_models, self._settings.model_memory_bytes
        name, used = entry.spec.name, self._count_bytes(going)
        # A next version is not an additional model.
        if len({handle.name for handle in self._list_counted(going)} - {name}) >= limit:
            return f"{limit} models are loaded and in use, the limit (LAYERTAP_MAX_LOADED_MODELS)"
        if budget is not None and used + entry.memory_bytes > budget:
            taken = f"model {name} took {entry.memory_bytes} bytes when it was loaded last, and "
            return f"{taken if entry.memory_bytes else ''}models in use have {used} of {budget} bytes"
        if entry.memory_bytes and not entry.spec.devices:
            free = measure_available_bytes(resolve_device(entry.spec.device)) + sum(
                handle.entry.memory_bytes for handle in going
            )
            if entry.memory_bytes > free:
                return f"model {name} took {entry.memory_bytes} bytes when it was loaded last, and {free} are free"
        return ""

    def _list_counted(self, going: Sequence[ModelHandle] = ()) -> list[ModelHandle]:
        return [handle for handle in self._all if handle.state != "failed" and handle not in going]

    def _count_bytes(self, going: Sequence[ModelHandle] = ()) -> int:
        """Bytes of all models but some, with the expected ones of models that are loading."""
        return sum(handle.entry.memory_bytes for handle in self._list_counted(going))

    def _list_unused(self) -> list[ModelHandle]:
        """The models that may be unloaded to make room, the first to go first."""
        unused = [each for each in self.handles.values() if each.entry.spec.load == "lazy" and each.is_unused]
        return sorted(unused, key=lambda handle: handle.last_used)

    # Background tasks

    def run_beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a background task until it or the server ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, LayertapError):
            log.error("a task beside requests failed", exc_info=error)
            self._metrics.count("task_failures_total", "once")

    def _unload_when_released(self, name: str) -> None:
        """Let the handle of a name answer only the requests that hold it, and unload it then."""
        if (handle := self.handles.pop(name, None)) is not None:
            handle.answers = "held"
            handle.changed.set()
            self.run_beside(self._stop_when_released(handle))

    async def _stop_when_released(self, handle: ModelHandle) -> None:
        await handle.wait_for(lambda: not handle.holders)
        await self._stop(handle, None)
        log.info("a model's former version is unloaded", extra={"fields": {"model": handle.name}})

    async def _settle_start(self, handle: ModelHandle) -> None:
        await handle.wait_until_settled()
        self._starting.discard(handle)

    async def _keep_tidy(self) -> None:
        """Unload unused models for as long as the server runs, even after an error."""
        while True:
            try:
                if self._has_unloaded:  # and their memory is free by now
                    self._has_unloaded = False
                    await asyncio.to_thread(allocator.release_memory)
                self.tidy()
            except Exception:
                log.exception("a task beside requests failed", extra={"fields": {"task": "tidy"}})
                self._metrics.count("task_failures_total", "tidy")
            await asyncio.sleep(TIDY_INTERVAL_S)

    def _fail_all(self, reason: str) -> None:
        """Mark all models as failed: the process must be restarted."""
        log.critical("the server has to be restarted", extra={"fields": {"reason": reason}})
        for entry in self.registry:
            if entry.model is not None:
                entry.fail(reason)

    async def _wait_for(self, handle: ModelHandle, deadline: float) -> None:
        """Return once a model has loaded or failed, or another version has replaced it.

        UnavailableError if that takes too long, or is aborted.
        """
        with suppress(DeadlineError), handle.hold():
            awaited = handle.wait_for(lambda: handle.state != "loading" or handle.answers != "all" or self._aborted)
            await wait_until(deadline, awaited)
        if handle.state == "loading" and handle.answers == "all":
            raise UnavailableError(f"model {handle.name} is loading", retry_after=handle.seconds_to_load)

    def _start(self, entry: ModelEntry) -> ModelHandle:
        handle = self.handles[entry.spec.name] = self._create_handle(entry)
        return handle

    def _create_handle(self, entry: ModelEntry) -> ModelHandle:
        def make_room() -> None:
            if entry.spec.load == "lazy":  # models that load at the start have no limit
                self._make_room(entry)

        self._unloaded.discard(entry.spec.name)
        handle = ModelHandle(entry, partial(self._load, entry), self.scheduler, self._settings, make_room)
        self._all.add(handle)
        return handle

    def _load(self, entry: ModelEntry) -> Executor:
        """Load a model and create its executor; LayertapError. In a thread."""
        model = self.registry.load_model(entry.spec)
        if model.report is not None and (report := model.report.describe()):
            log.info("a checkpoint was read", extra={"fields": {"model": entry.spec.name, **report}})
        executor = self._create_executor(model)
        entry.memory_bytes = executor.memory_bytes
        devices = list(map(resolve_device, set(executor.devices)))
        for device in devices:
            transfer.synchronize(device)  # other threads use its tensors, in other streams
        if any(map(is_accelerator, devices)):
            transfer.release_memory()
        return executor

    def _unload_now(self, handle: ModelHandle) -> None:
        """Unload a handle that nobody uses."""
        log.info("a model is unloaded", extra={"fields": {"model": handle.name}})
        self._forget(handle)
        self.run_beside(handle.stop(None))

    async def _stop(self, handle: ModelHandle, limit_s: float | None) -> None:
        # The handle keeps its place until its threads have ended, so that no others compute the model meanwhile.
        await handle.stop(limit_s)
        self._forget(handle)

    def _forget(self, handle: ModelHandle) -> None:
        if handle not in self._all:
            return
        self._all.discard(handle)
        if self.handles.get(handle.name) is handle:
            del self.handles[handle.name]
            handle.entry.unload()
        self._has_unloaded = True
