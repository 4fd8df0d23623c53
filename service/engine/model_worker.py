"""A model that lives in this process, or is on its way in: its threads, its lanes, what is admitted for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from layertap.models.catalog.catalog import Catalog, Costs
from layertap.models.compiled.compiled_plan import CompiledPlan
from layertap.models.devices import memory, transfer
from layertap.models.errors import IN_THE_LOG, Failure, LayertapError, LoadError
from layertap.models.loaded_model import LoadedModel
from layertap.models.model_catalogs import MAX_CATALOGS
from layertap.models.spec import Shapes
from layertap.service.engine.batch import CPU, BatchQueue
from layertap.service.engine.plan_cache import PlanCache
from layertap.service.engine.scheduler import ReplicaThreads, Scheduler
from layertap.service.engine.worker_thread import WorkerThread
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
MAX_LANES = 4 * MAX_CATALOGS  # with a graph and without, from the beginning and from a layer, compiled
SHARE = {"cpu": 0.25, "cuda": 0.8}  # of the memory that is free when a model is loaded: what its forwards may take


class ModelWorker:
    """One model in memory. ``loaded`` tells when it is there, or why it is not.

    ``rows`` are admitted and not answered; it and ``last_used`` are touched by the event loop only. ``stopping``: from
    now on it takes nothing.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], LoadedModel],
        fail: Callable[[str, Failure], None],
        scheduler: Scheduler,
        settings: Settings,
    ) -> None:
        self._fail = fail
        self.loaded: Future[LoadedModel] = Future()
        self.settled: Future[None] = Future()  # as ``loaded``, but tells no reason
        self.rows = 0
        self.last_used = 0.0
        self.stopping = False
        self._name = name
        self._scheduler = scheduler
        self._settings = settings
        self._budget = 0
        self._empty: asyncio.Event | None = None
        self.plans = PlanCache()
        self._moves = False  # whether a row's bits depend on its place in a batch; looked at only where it matters
        self._queues: dict[tuple[Shapes, bool, str, CompiledPlan | None, bool], tuple[Catalog, BatchQueue]] = {}
        self._workers = [self._worker(f"load-{name}")]
        self.loaded.add_done_callback(lambda _: self.settled.set_result(None))
        self._workers[0].post(partial(self._load, load))

    @property
    def is_dead(self) -> bool:
        """Whether a thread ended though nobody stopped it."""
        return any(worker.is_dead for worker in self._workers)

    @property
    def failed(self) -> bool:
        """Whether its model could not be loaded."""
        return self.loaded.done() and self.loaded.exception() is not None

    @property
    def seconds_per_row(self) -> float:
        """Seconds that a row takes its device, as of late."""
        crew = self._scheduler.get_threads(self._name)
        return crew.seconds_per_row if crew else 0.0

    @property
    def device(self) -> str | None:
        """Where its model is, None where it is not loaded."""
        crew = self._scheduler.get_threads(self._name)
        return str(crew.model.device) if crew else None

    @property
    def requires_isolation(self) -> bool:
        """Whether every request must have its forwards for itself, so that its bits are always the same."""
        return self._moves

    def get_queue(
        self,
        catalog: Catalog,
        shapes: Shapes,
        graph: bool,
        compiled: CompiledPlan | None = None,
        together: bool = False,
    ) -> BatchQueue:
        """What rows of a shape wait in.

        Those whose forward keeps its graph, begins in the middle, or is compiled, wait apart; so do those that affect
        each other and run ``together``.
        """
        key = shapes, graph, catalog.start, compiled, together
        known = self._queues.get(key)
        if known is not None and known[0] is catalog:
            return known[1]
        while len(self._queues) >= MAX_LANES:
            del self._queues[next(iter(self._queues))]
        costs = compiled.costs if compiled else catalog.graph_costs if graph else catalog.costs
        lane = self._new_lane(self.loaded.result(), catalog, costs, together)
        self._queues[key] = catalog, lane
        return lane

    def max_batch_rows(self) -> int:
        """The most rows of a forward, of the shape that was new last."""
        return next((lane.max_rows for _, lane in reversed(list(self._queues.values()))), 0)

    async def stop(self, patience: float | None) -> None:
        """Finish what was given, then end the threads; wait for that at most so many seconds."""
        self.stopping = True
        try:
            async with asyncio.timeout(patience):
                await asyncio.wait((asyncio.wrap_future(self.settled),))
                self._empty = self._empty or asyncio.Event()
                self.left()
                await self._empty.wait()
                if not self.failed:
                    await asyncio.shield(asyncio.wrap_future(self._scheduler.remove_model(self._name)))
                for worker in self._workers:
                    await asyncio.to_thread(worker.join, None)
        except TimeoutError:
            return

    def left(self) -> None:
        """Some rows were answered, or given up; called on the event loop."""
        if self._empty is not None and not self.rows:
            self._empty.set()

    def _worker(self, name: str) -> WorkerThread:
        return WorkerThread(name, lambda: self._scheduler.fail_permanently(f"a thread of model {self._name} died"))

    def _load(self, load: Callable[[], LoadedModel]) -> None:
        begun = time.monotonic()
        fixed: int | None = None
        try:
            model = load()
            if model.device.type == "cuda":
                transfer.synchronize_device(model.device)
            self._budget = self._measured(model)
            fixed = self._new_lane(model, model.catalog, model.catalog.costs).padded_rows
            self._moves = fixed is not None and not model.is_batch_invariant(fixed)
            if model.device.type == "cuda":
                transfer.synchronize_device(model.device)
        except LayertapError as error:
            self._workers[0].stop()
            self.loaded.set_exception(error)
            return
        except BaseException as error:  # a third party's forward may raise anything, SystemExit too
            self._workers[0].stop()
            reason = f"{f'a forward of {fixed} rows' if fixed else 'loading'} ended in {type(error).__name__}"
            log.error("a model could not be loaded", exc_info=error, extra={"fields": {"model": self._name}})
            self._fail(f"{reason}; {IN_THE_LOG}", "forward" if fixed else "other")
            self.loaded.set_exception(LoadError(reason, hint=IN_THE_LOG))
            return
        if self._moves:
            log.warning("rows move bits in a batch: each request runs alone", extra={"fields": {"model": self._name}})
        # New threads: one that computed on all cores keeps helpers, and libgomp lets none spin where there are more of
        # these than cores, which makes every other model's rows on all cores slower.
        self._workers[0].stop()
        self._workers = [self._worker(f"model-{number}-{self._name}") for number in range(len(model.replicas))]
        for worker in self._workers:
            worker.post(partial(torch.set_num_threads, 1))
            if model.device.type == "cuda":
                worker.post(partial(transfer.use_own_stream, model.device))
        sides = len(model.replicas) if model.device.type == "cpu" else 1  # on a GPU they only overlap
        self._scheduler.add_model(self._name, ReplicaThreads(model, self._workers, model.catalog.seconds / sides))
        self.loaded.set_result(model)
        fields = {"model": self._name, "device": str(model.device), "seconds": round(time.monotonic() - begun, 1)}
        log.info("a model is loaded", extra={"fields": fields})

    def _measured(self, model: LoadedModel) -> int:
        """Bytes that one forward may take."""
        if self._settings.batch_memory_bytes is not None:
            return self._settings.batch_memory_bytes
        free = memory.measure_available_bytes(model.device) * SHARE[model.device.type]
        return int(free / len(model.replicas))

    def _new_lane(self, model: LoadedModel, catalog: Catalog, costs: Costs, together: bool = False) -> BatchQueue:
        settings = self._settings
        most = settings.fixed_batch_rows or settings.max_batch_rows
        fitting = max(self._budget // max(costs.row_bytes, 1), 1)
        return BatchQueue(
            model=self._name,
            device=CPU if model.device.type == "cpu" else str(model.device),
            costs=costs,
            max_rows=min(most, fitting) if catalog.rowwise or together else 1,
            max_bytes=self._budget,
            padded_rows=min(most, fitting) if settings.fixed_batch_rows and catalog.rowwise else None,
            slots=max(settings.cpu_threads // len(model.replicas), 1) if costs.speedup > 1 else 1,
        )
