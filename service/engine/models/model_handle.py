"""The owner of a model: its threads, from loading to the end, and how quick it is. Nothing else runs it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.devices import transfer
from layertap.models.errors import IN_THE_LOG, LayertapError, LoadError
from layertap.models.explanations.sensitivity import PointInfo
from layertap.models.model_info import ModelInfo
from layertap.models.registry import ModelEntry
from layertap.models.resume.resumption import Resumption
from layertap.models.selection.hook_points import HookPoint
from layertap.models.selection.plan import ResolvedObjective
from layertap.models.spec import Shapes
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.execute import model_functions
from layertap.service.engine.execute.executor import Executor, ModelFunction
from layertap.service.engine.execute.threads import publish_name
from layertap.service.engine.execute.worker_thread import WorkerThread
from layertap.service.engine.models.unavailable import unloading_error
from layertap.service.engine.plan.plan_cache import PlanCache
from layertap.service.engine.schedule.batch import CPU, Batch
from layertap.service.engine.schedule.batch_keys import BatchKeys
from layertap.service.engine.schedule.scheduler import Scheduler
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
SMOOTHING = 0.2  # the newest batch's part in a mean
LONGEST_LOAD_S = 60.0  # that a caller is told to wait for a model that loads


_GENERATIONS = itertools.count(1)


class ModelHandle:
    """One model, from its loading on; each of its replicas has a thread.

    ``entry`` is its model's, whatever requests mean by the name. ``loaded`` tells when it is there, or why it is not;
    ``settled`` the same without the reason, ``began`` when it began to load, on the monotonic clock. ``rows`` are
    admitted and not answered, ``holders`` are requests that it is to answer; they, ``last_used``, ``stopping`` (from
    now on it takes nothing) and ``replaced`` (set once no new request is its own) belong to the event loop.
    ``idle_replicas``, ``calls`` (which want the first replica for themselves) and ``drained`` belong to the scheduler,
    under its lock. ``requires_isolation``: every request must have its forwards for itself, so that its bits are always
    the same. ``generation`` is a number that no other handle of this process has, ``key`` the name with it.
    """

    def __init__(
        self,
        entry: ModelEntry,
        load: Callable[[], Executor],
        scheduler: Scheduler,
        settings: Settings,
    ) -> None:
        self.entry = entry
        self.name = entry.spec.name
        self.generation = next(_GENERATIONS)
        self.key = f"{self.name}@{self.generation}"
        self.loaded: Future[Executor] = Future()
        self.settled = settled = Future[None]()
        self.rows = 0
        self.holders = 0
        self.last_used = 0.0
        self.began = time.monotonic()
        self.stopping = False
        self.replaced = asyncio.Event()
        self._released = asyncio.Event()
        self.requires_isolation = False
        self.plans = PlanCache()
        self.batch_keys: BatchKeys
        self.idle_replicas: list[int] = []
        self.calls: deque[tuple[ModelFunction, Future[Any]]] = deque()
        self.drained: Future[None] | None = None
        self._scheduler = scheduler
        self._settings = settings
        self._empty: asyncio.Event | None = None
        self._batch_seconds_per_row = 0.0
        self._decode_seconds_per_row = 0.0
        self._loaded_seconds_per_row = 1.0  # of a row alone, when it was loaded
        self._parallel = 1.0  # how many rows its device computes at once, one on each thread
        self._threads = [WorkerThread(f"load-{self.name}", publish_name)]
        self.loaded.add_done_callback(lambda _: settled.set_result(None))  # not self: a cycle would keep the model
        self.submit(0, partial(self._load, load))

    @property
    def executor(self) -> Executor:
        """What runs the model; raises what its loading did, waits for its end."""
        return self.loaded.result()

    @property
    def model(self) -> ModelInfo:
        """The model; raises what its loading did, waits for its end."""
        return self.executor.model

    @property
    def is_active(self) -> bool:
        """Whether its model is loaded and not about to go."""
        return self.loaded.done() and not self.failed and self.drained is None

    @property
    def failed(self) -> bool:
        """Whether its model could not be loaded."""
        return self.loaded.done() and self.loaded.exception() is not None

    @property
    def seconds_to_load(self) -> float:
        """Seconds until its model may be expected: as many again as it has been loading; 0 where it no longer loads."""
        return 0.0 if self.loaded.done() else min(time.monotonic() - self.began, LONGEST_LOAD_S)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where its model is, each device once; none where it is not loaded."""
        return tuple(dict.fromkeys(self.executor.devices)) if self.is_active else ()

    @property
    def seconds_per_row(self) -> float:
        """Seconds that a row takes its device, as of late."""
        return self._batch_seconds_per_row + self._decode_seconds_per_row if self.is_active else 0.0

    def estimate_seconds(self, seconds: float) -> float:
        """How long its device takes as of late for forwards that took so many seconds one by one when it was loaded."""
        return seconds * self._batch_seconds_per_row / self._loaded_seconds_per_row if self.is_active else 0.0

    def estimate_least_seconds(self, seconds: float) -> float:
        """As ``estimate_seconds``, or as when it was loaded, whichever is less."""
        return min(self.estimate_seconds(seconds), seconds / self._parallel)

    @property
    def max_batch_rows(self) -> int:
        """The most rows of a forward, of the shape that was used last; 0 where none was."""
        return self.batch_keys.max_rows if self.is_active else 0

    @property
    def replicas(self) -> int:
        """How many batches it runs at once; 0 where its model is not loaded."""
        return len(self._threads) if self.is_active else 0

    @property
    def busy_replicas(self) -> int:
        """How many of its replicas have something to do."""
        return max(self.replicas - len(self.idle_replicas), 0)

    @property
    def is_idle(self) -> bool:
        """Whether none of its threads has anything to do; under the scheduler's lock."""
        return len(self.idle_replicas) == len(self._threads) and not self.calls

    def count_idle_replicas(self) -> dict[str, int]:
        """Its idle replicas by device; under the scheduler's lock."""
        return Counter(self.executor.devices[replica] for replica in self.idle_replicas)

    def take_idle_replica(self, device: str) -> int:
        """The first idle replica on a device, which is idle no more; under the scheduler's lock."""
        replica = min(each for each in self.idle_replicas if self.executor.devices[each] == device)
        self.idle_replicas.remove(replica)
        return replica

    async def survey(self, shapes: Shapes, deadline: float, *, functions: bool = False) -> Catalog:
        """What the model does with rows of a shape; InputError where it does not take them, DeadlineError.

        With ``functions`` it tells what these return.
        """
        keep = partial(self.model.catalogs.put_catalog, shapes)
        survey = partial(model_functions.survey, shapes=shapes, functions=functions)
        catalog: Catalog = await self._call(survey, keep, deadline)
        return catalog

    async def verify_resumption(
        self, point: HookPoint, tensor: TensorInfo, shapes: Shapes, deadline: float
    ) -> Resumption:
        """How forwards of rows of a shape go on from a point; SelectorError where they can't, DeadlineError."""
        verify = partial(model_functions.verify_resumption, point=point, leaf=tensor, shapes=shapes)
        keep = partial(self.model.catalogs.put_resumption, point, shapes)
        resumption: Resumption = await self._call(verify, keep, deadline)
        return resumption

    async def find_grad_cam_layer(self, objective: ResolvedObjective, deadline: float) -> PointInfo:
        """The last layer of maps that an objective depends on; SelectorError where there is none, DeadlineError."""
        find = partial(model_functions.find_grad_cam_layer, objective=objective)
        keep = partial(self.model.catalogs.put_grad_cam_layer, objective)
        layer: PointInfo = await self._call(find, keep, deadline)
        return layer

    async def _call(self, function: ModelFunction, keep: Callable[[Any], None], deadline: float) -> Any:
        """Run a function in the first replica's thread, when that does nothing else; raises what it does."""
        if not self.is_active:
            raise unloading_error(self.name, self.rows * self.seconds_per_row)
        future = self._scheduler.call(self, function)
        # Also where nobody waits any more: the next one who asks would wait as long.
        future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else keep(done.result()))
        return await wait_until(deadline, asyncio.wrap_future(future))

    def submit(self, thread: int, task: Callable[[], None]) -> None:
        """Run a task in one of its threads, after all that was submitted before."""
        self._threads[thread].submit(partial(self._guard, task))

    def add_batch_time(self, batch: Batch, seconds: float, parallel: int, decoded: bool) -> None:
        """Note how long a batch took, beside as many others as the device computes at the same time.

        ``decoded``: decoding its pictures was a part of it, and took no time before.
        """
        parallel_batches = min(parallel, len(self._threads))
        # In rows of the configured shape: a few large pictures say nothing of the small ones that wait.
        weight = batch.key.costs.per_row / self.model.catalog.costs.per_row
        spent = seconds / parallel_batches / batch.rows / weight
        self._batch_seconds_per_row += SMOOTHING * (spent - self._batch_seconds_per_row)
        if decoded:
            self.add_decode_time(0.0, batch.rows)

    def add_decode_time(self, seconds: float, rows: int) -> None:
        """Note how long all slots of the CPU took to decode so many rows."""
        if rows:
            self._decode_seconds_per_row += SMOOTHING * (seconds / rows - self._decode_seconds_per_row)

    def note_waiting_rows(self, rows: int) -> None:
        """So many rows are in no batch yet; under the scheduler's lock."""
        if self.loaded.done():  # its loader may be just about to say so
            self.executor.note_waiting_rows(rows > 0)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let it be there for a request until the block ends, also where another version takes its place."""
        self.holders += 1
        try:
            yield
        finally:
            self.holders -= 1
            self.last_used = time.monotonic()
            if not self.holders:
                self._released.set()

    async def wait_until_released(self) -> None:
        """Return once no request holds it."""
        while self.holders:
            self._released.clear()
            await self._released.wait()

    def notify_if_empty(self) -> None:
        """Some rows were answered, or given up; called on the event loop."""
        if self._empty is not None and not self.rows:
            self._empty.set()

    async def stop(self, limit_s: float | None) -> None:
        """Finish what was given, then end the threads; wait for that at most ``limit_s`` seconds."""
        self.stopping = True
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.wait((asyncio.wrap_future(self.settled),))
                self._empty = self._empty or asyncio.Event()
                self.notify_if_empty()
                await self._empty.wait()
                if not self.failed:
                    await asyncio.shield(asyncio.wrap_future(self._scheduler.remove_model(self)))
                await asyncio.wait([asyncio.wrap_future(thread.ended) for thread in self._threads])

    def close(self) -> None:
        """Let go of the model, and have all threads end, after what was submitted."""
        self.submit(0, self.executor.close)
        self.end_threads()

    def end_threads(self) -> None:
        """Have all threads end after what was submitted."""
        for thread in self._threads:
            thread.shutdown()

    def _guard(self, task: Callable[[], None]) -> None:
        """Run a task that tells itself what goes wrong: where it raises all the same, nothing here can be relied on."""
        try:
            task()
        except BaseException:
            log.critical("a thread failed", exc_info=True, extra={"fields": {"model": self.name}})
            self._scheduler.fail_permanently(f"a thread of model {self.name} failed")

    def _load(self, load: Callable[[], Executor]) -> None:
        started = time.monotonic()
        stage = "loading"
        executor: Executor | None = None
        try:
            executor = load()
            model = executor.model
            self.batch_keys = BatchKeys(model, self.key, executor.devices, self._settings)
            padded_rows = self.batch_keys.create(model.catalog, model.catalog.costs).padded_rows
            if padded_rows is not None:
                stage = f"a forward of {padded_rows} rows"
                check = executor.call(partial(model_functions.is_batch_invariant, rows=padded_rows))
                if isinstance(check.result, Exception):
                    raise check.result.__cause__ or check.result
                self.requires_isolation = not check.result
            if model.device.type == "cuda":
                transfer.synchronize_device(model.device)
        except LayertapError as error:
            self._end_loading(executor)
            self.loaded.set_exception(error)
            return
        except BaseException as error:  # a third party's forward may raise anything, SystemExit too
            self._end_loading(executor)
            reason = f"{stage} ended in {type(error).__name__}"
            log.error("a model could not be loaded", exc_info=error, extra={"fields": {"model": self.name}})
            self.entry.fail(f"{reason}; {IN_THE_LOG}", "other" if stage == "loading" else "forward")
            self.loaded.set_exception(LoadError(reason, hint=IN_THE_LOG))
            return
        if self.requires_isolation:
            log.warning("rows move bits in a batch: each request runs alone", extra={"fields": {"model": self.name}})
        self._start_replicas(executor)
        devices = tuple(dict.fromkeys(executor.devices))
        self._scheduler.add_model(self, devices)
        self.last_used = time.monotonic()
        self.loaded.set_result(executor)
        fields = {"model": self.name, "device": ", ".join(devices), "seconds": round(time.monotonic() - started, 1)}
        log.info("a model is loaded", extra={"fields": fields})

    def _end_loading(self, executor: Executor | None) -> None:
        """Loading has failed: end its thread, and what it has started."""
        self.end_threads()
        if executor is not None:
            executor.close()

    def _start_replicas(self, executor: Executor) -> None:
        # New threads: one that computed on all cores keeps helpers, and libgomp lets none spin where there are more of
        # these than cores, which makes every other model's rows on all cores slower.
        self.end_threads()
        self._threads = [
            WorkerThread(f"model-{number}-{self.name}", partial(executor.start_thread, number))
            for number in range(executor.replicas)
        ]
        self.idle_replicas = list(range(executor.replicas))
        # On a GPU forwards only overlap.
        parallel = sum(device == CPU for device in executor.devices) or len(set(executor.devices))
        catalog = executor.model.catalog
        key = self.batch_keys.create(catalog, catalog.costs)
        self._parallel = parallel * min(key.slots, catalog.costs.speedup)  # a batch may take several threads
        self._loaded_seconds_per_row = catalog.costs.estimate_seconds(1)
        self._batch_seconds_per_row = self._loaded_seconds_per_row / self._parallel
