"""The handle of a model: its state from loading to unloading, and what requests may ask of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeVar, cast

from layertap.models.catalog.catalog import Catalog
from layertap.models.devices import transfer
from layertap.models.errors import IN_THE_LOG, Failure, LayertapError, LoadError, clear_tracebacks, make_load_error
from layertap.models.explanations.map_layers import find_grad_cam_layer
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.plan import ResolvedObjective, Tap
from layertap.models.registry import ModelEntry
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import survey_shape, verify_resumption
from layertap.models.run.model_info import ModelInfo
from layertap.models.run.resumption import Resumption
from layertap.models.run.row_check import write_note
from layertap.models.spec import Shapes
from layertap.service import allocator
from layertap.service.engine.batch import CPU, LOST_DEVICE, LastingFailure
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.execute.executor import Executor
from layertap.service.engine.execute.processes.worker_process import ModelLostError
from layertap.service.engine.execute.threads import run_in_new_thread
from layertap.service.engine.models.surveys import Surveys
from layertap.service.engine.schedule.batch_key_cache import BatchKeyCache
from layertap.service.engine.schedule.pace import Pace
from layertap.service.engine.schedule.scheduler import ScheduledModel, Scheduler
from layertap.service.errors import UnavailableError, unloading_error
from layertap.service.features import Array
from layertap.service.settings import Settings

T = TypeVar("T")
log = logging.getLogger("layertap")
MAX_KEPT = 512  # plans of a model, and requests prepared for it
LONGEST_LOAD_S = 60.0  # the longest wait that a caller is told while a model loads
TRIES_AT_ONCE = 4  # to load a model again whose process was killed, or died soon after
FIRST_PAUSE_S = 1.0  # before the next one; doubled each time, and with the longest one the model has failed
LONGEST_PAUSE_S = 60.0
DEVICE_S = 30.0  # in which a device answers
PASSING = frozenset[Failure]({"killed", "memory", "lost"})  # failures after which it is loaded again
FAILED_RETRY_S = 60.0
OWN_CODE = frozenset[Failure]({"code", "forward", "other"})  # failures of the operator's own code, certain or possible
Answers = Literal["all", "held", "none"]
# A lost model loads again, and so does a failed one if its failure may pass.
ModelState = Literal["loading", "ready", "failed", "gone"]
_GENERATIONS = itertools.count(1)


class ModelHandle:
    """One loaded version of a model, or one that is loading. For the event loop only.

    ``entry`` stays its own, even if the name means another version by now. ``error``: why it failed. ``answers``: all
    requests, only those that hold it, or none. ``rows``: admitted and unanswered ones; ``holders``: unfinished requests
    that hold it. ``isolated``: no requests may share a forward, so that a request's bits never vary. ``key``: the name
    with a number that is unique in this process. ``planned`` keeps what requests used most recently.
    """

    def __init__(
        self,
        entry: ModelEntry,
        load: Callable[[], Executor],
        scheduler: Scheduler,
        settings: Settings,
        make_room: Callable[[], None],
    ) -> None:
        """Begin to load the model in a thread by ``load``, which may raise LayertapError.

        ``make_room`` is called before it is reloaded after a failure: UnavailableError if other models use the memory.
        """
        self.entry = entry
        self.name = entry.spec.name
        self.key = f"{self.name}@{next(_GENERATIONS)}"
        self.state: ModelState = "loading"
        self.entry.state = "loading"
        self.error: LayertapError | None = None
        self.answers: Answers = "all"
        self.rows = 0
        self.holders = 0
        self.changed = asyncio.Event()
        self.last_used = time.monotonic()
        self.isolated = False
        self.planned: LRUCache[Hashable, Any] = LRUCache(MAX_KEPT)
        self.executor: Executor  # as the next three: set when the model is first loaded
        self.model: ModelInfo
        self.batch_keys: BatchKeyCache
        self.pace: Pace
        self._load = load
        self._make_room = make_room
        self._began = time.monotonic()
        self._has_loaded = False
        self._scheduler = scheduler
        self._settings = settings
        self._surveys = Surveys()
        self._failures: list[LastingFailure] = []  # since it was first loaded, also while its decoding host is reloaded
        self._lasting_error: LoadError | None = None  # because of them
        self._life: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._run_lifecycle())

    @property
    def seconds_to_load(self) -> float:
        """Estimated seconds until the model is loaded: as many as it has been loading; 0 if it is not loading."""
        return min(time.monotonic() - self._began, LONGEST_LOAD_S) if self.state == "loading" else 0.0

    @property
    def devices(self) -> tuple[str, ...]:
        """The model's devices, each once; none if it is not loaded."""
        return tuple(dict.fromkeys(self.executor.devices)) if self.state == "ready" else ()

    @property
    def seconds_per_row(self) -> float:
        """The seconds of device time that a row takes."""
        return self.pace.seconds_per_row if self.state == "ready" else 0.0

    @property
    def is_unused(self) -> bool:
        """Whether it is loaded, and no request, forward or next version needs it."""
        replacement = self.entry.replacement
        is_replaced = replacement is not None and replacement.state != "failed"
        in_use = self.answers == "none" or self.holders or is_replaced or self.state != "ready"
        return not in_use and self._scheduler.is_idle(self.key)

    def shares_device(self, other: ModelHandle) -> bool:
        """Whether the two models have a device in common."""
        return not set(self.devices).isdisjoint(other.devices)

    def make_error(self) -> UnavailableError:
        """The error for requests to a model that is not available."""
        if self.error is None:
            return unloading_error(self.name, 1.0)
        kind = self.error.kind if isinstance(self.error, LoadError) else ""
        what = "has failed" if kind == "lost" else "could not be loaded"
        detail = f"model {self.name} {what}: {self.error.detail}"
        hint = "; ".join(filter(None, (self.error.hint, f"POST /models/{self.name}/load tries again")))
        return UnavailableError(detail, hint=hint, retry_after=FAILED_RETRY_S if kind in PASSING else None)

    async def survey(
        self,
        shapes: Shapes,
        deadline: float,
        *,
        functions: bool = False,
        seconds: float = math.inf,
        base: Catalog | None = None,
    ) -> Catalog:
        """The catalog of rows of a shape; InputError if the model does not take them, DeadlineError.

        With ``functions`` it has the return values of functions; ``base`` as of ``survey_shape``. OverdueError if it
        takes more than so many ``seconds``.
        """
        catalogs = self.model.catalogs
        find, keep = partial(catalogs.get_catalog, shapes, functions=functions), partial(catalogs.put_catalog, shapes)
        ask = partial(survey_shape, shapes=shapes, functions=functions, base=base)
        return await self._find_or_ask(("survey", shapes, functions), find, keep, ask, deadline, seconds)

    async def decode_tokens(self, tokens: Array, deadline: float) -> tuple[str, ...]:
        """The texts of generated tokens (rows, steps); () if the model has no tokenizer. DeadlineError."""
        decode = partial(LoadedModel.decode_tokens, tokens=tokens)
        return cast("tuple[str, ...]", await self.ask_again(partial(self._scheduler.call, self.key, decode), deadline))

    async def verify_resumption(self, start: Tap, shapes: Shapes, deadline: float) -> Resumption:
        """How forwards of a shape resume from a tensor; SelectorError if they can't, DeadlineError."""
        known, key = self.model.catalogs.resumptions, (start.point, shapes)
        ask = partial(verify_resumption, start=start, shapes=shapes)
        find, keep = partial(known.get, key), partial(known.put, key)
        return await self._find_or_ask(("resumption", *key), find, keep, ask, deadline)

    async def find_grad_cam_layer(self, objective: ResolvedObjective, deadline: float) -> Tap:
        """The last layer with maps on which an objective depends; SelectorError if there is none, DeadlineError."""
        known = self.model.catalogs.grad_cam_layers
        ask = partial(find_grad_cam_layer, objective=objective)
        find, keep = partial(known.get, objective), partial(known.put, objective)
        return await self._find_or_ask(("grad_cam", objective), find, keep, ask, deadline)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the model loaded for a request until the block ends, even if another version replaces it."""
        self.holders += 1
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """End a hold, which began where ``holders`` was raised."""
        self.holders -= 1
        self.last_used = time.monotonic()
        if not self.holders:
            self.changed.set()

    def add_rows(self, count: int) -> None:
        """Add to the number of admitted rows; a negative count removes rows that were answered or cancelled."""
        self.rows += count
        if not self.rows:
            self.changed.set()

    async def wait_until_settled(self) -> None:
        """Return once the model has loaded or failed."""
        await self.wait_for(lambda: self.state != "loading")

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Return once a condition holds; it depends on this handle's state, or its changes set ``changed``."""
        while not is_so():
            self.changed.clear()
            await self.changed.wait()

    async def ask_again(self, ask: Callable[[], Awaitable[T]], deadline: float | None = None) -> T:
        """The result of ``ask``, called again if the model was lost meanwhile; DeadlineError, UnavailableError."""
        while True:
            try:
                return await ask()
            except ModelLostError:
                await asyncio.sleep(0)  # for what notes that it is lost
            await wait_until(deadline, self.wait_until_settled())
            if self.state != "ready":
                raise self.make_error()

    async def stop(self, limit_s: float | None) -> None:
        """Finish admitted work for at most ``limit_s`` seconds, then release the model."""
        self.answers = "none"
        self.changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.wait_for(lambda: not self.rows and (self.state != "loading" or self._has_loaded))
                await self.wait_for(lambda: self._scheduler.is_idle(self.key))
                self._scheduler.remove_model(self.key)
                self._end_loading()
                if self._has_loaded:
                    await self.executor.close()
        self._end_loading()
        self._forget_requests()  # they refer to this handle
        self._set("gone")

    async def _run_lifecycle(self) -> None:
        """Keep the model loaded; an error of this class fails it, too, so that nobody waits for ever."""
        try:
            await self._keep_loaded()
        except Exception as error:
            self._fail(error)

    async def _keep_loaded(self) -> None:
        """Load the model, and load it again each time its process dies, until that fails for good."""
        deaths, pause = 0, 0.0  # deaths in a row
        while True:
            self.entry.state = "loading"
            self._set("loading")
            await asyncio.sleep(pause)
            self._began = time.monotonic()
            try:
                await (self.executor.restart() if self._has_loaded else self._begin())
            except Exception as error:
                if await _loses_device(error):
                    self._scheduler.fail_permanently(LOST_DEVICE)
                kind = error.kind if isinstance(error, LoadError) else ""
                deaths = 1 + (deaths if kind == "killed" else max(deaths, TRIES_AT_ONCE))
                if kind == "killed" and _choose_pause(deaths) < LONGEST_PAUSE_S:
                    fields = {"model": self.name, "reason": str(error), "deaths": deaths}
                    log.warning("a process was killed while it loaded a model", extra={"fields": fields})
                else:
                    self._fail(error)
                    await asyncio.to_thread(allocator.release_memory)
                if kind not in PASSING:
                    return
                await self._wait_for_room(deaths)
                pause = 0.0
            else:
                self._succeed()
                loaded = time.monotonic()
                await self.executor.wait_until_lost()
                deaths = 1 + (deaths if time.monotonic() - loaded < LONGEST_PAUSE_S else 0)
                log.warning("a model's process has died, and is started again", extra={"fields": {"model": self.name}})
                pause = _choose_pause(deaths)

    async def _wait_for_room(self, deaths: int) -> None:
        """Pause after a load that ended in this many deaths in a row, longer while other models use the memory."""
        await asyncio.sleep(_choose_pause(deaths))
        while self.state == "failed":
            with suppress(UnavailableError):
                self._make_room()
                break
            deaths += 1
            await asyncio.sleep(_choose_pause(deaths))

    async def _begin(self) -> None:
        """Load the model for the first time, and schedule its batches."""
        executor = await run_in_new_thread(f"load-{self.name}", self._load)
        model, size, budget = executor.model, self.entry.memory_bytes, self._settings.model_memory_bytes
        try:
            if budget is not None and size > budget:
                detail = f"it takes {size} bytes, and all models together may have {budget}"
                raise LoadError(detail, hint="set LAYERTAP_MODEL_MEMORY_BYTES")
            self.batch_keys = BatchKeyCache(model, self.key, executor.devices, self._settings)
            key = self.batch_keys.get(model.catalog, model.shapes)
            # On a GPU, forwards only overlap.
            parallel = sum(device == CPU for device in executor.devices) or len(set(executor.devices))
            self.pace = Pace(model, key, len(executor.devices), parallel)
            callbacks = self.changed.set, self._note_crossing, self._note_failure
            self._scheduler.add_model(ScheduledModel(self.key, self.name, executor, self.pace, *callbacks))
            if key.padded_rows is not None:
                await self._try_padding(key.padded_rows)
        except BaseException:
            self._scheduler.remove_model(self.key)
            await executor.close()
            raise
        self.executor, self.model, self._has_loaded = executor, model, True

    def _note_crossing(self, layer: str, shared_answers: int) -> None:
        """Rows turned out to affect each other: run each alone from now on, also after the next start."""
        if self.model.catalogs.crossing is not None:
            return
        note = write_note(self._settings.notes_dir, self.model.identity, shared_answers)
        self.model.catalogs.note_crossing(note)
        self._forget_requests()
        fields = {"model": self.name, "layer": layer, "shared_answers": shared_answers}
        log.error("rows of a model affect each other: from now on each runs alone", extra={"fields": fields})

    def _note_failure(self, failure: LastingFailure) -> None:
        """The loaded model can't answer any more: refuse its requests at once, until all that hangs has ended."""

        def recover(_: asyncio.Future[Any]) -> None:
            self._failures.remove(failure)
            if self.state == "failed" and self.error is self._lasting_error and not self._failures:
                log.warning("a model answers again", extra={"fields": {"model": self.name}})
                self._accept()

        self._failures.append(failure)
        if failure.ended is not None:
            failure.ended.add_done_callback(recover)
        if self.state == "ready":
            self._refuse_lastingly(failure)

    def _refuse_lastingly(self, failure: LastingFailure) -> None:
        log.error("a model has failed", extra={"fields": {"model": self.name, "reason": failure.reason}})
        self._lasting_error = LoadError(failure.reason, kind="lost")
        self._refuse(self._lasting_error)

    async def _try_padding(self, rows: int) -> None:
        """If padding to ``rows`` rows changes the bits of results, isolate all requests; LoadError."""
        function = partial(LoadedModel.is_batch_invariant, rows=rows)
        try:
            is_invariant = await self._scheduler.call(self.key, function)
        except LayertapError:
            raise
        except ModelLostError as error:
            raise LoadError("the process that loads it has ended", kind="killed") from error
        except Exception as error:
            cause = error.__cause__ or error
            detail = f"a forward of {rows} rows ended in {type(cause).__name__}"
            raise LoadError(detail, hint=IN_THE_LOG, kind="forward") from error
        self.isolated = not is_invariant
        if self.isolated:
            log.warning("rows move bits in a batch: each request runs alone", extra={"fields": {"model": self.name}})

    def _succeed(self) -> None:
        """Answer requests, unless something of the model still hangs: then only its decoding host was reloaded."""
        if self._failures:
            self._refuse_lastingly(self._failures[-1])
            return
        self._accept()
        fields = {
            "model": self.name,
            "device": ", ".join(self.devices),
            "seconds": round(time.monotonic() - self._began, 1),
        }
        log.info("a model is loaded", extra={"fields": fields})

    def _accept(self) -> None:
        """From now on requests are answered."""
        self.error = None
        self._scheduler.refuse(self.key, None)
        self.entry.recover(self.model)
        self.last_used = time.monotonic()
        self._set("ready")

    def _fail(self, error: Exception) -> None:
        """Note why the model can't be loaded, and fail the requests that wait for it."""
        refusal = error if isinstance(error, LayertapError) else make_load_error(error.__cause__ or error)
        fields = {"model": self.name, "reason": refusal.detail, "hint": refusal.hint}
        kind: Failure = refusal.kind if isinstance(refusal, LoadError) else "other"
        exc_info = error if kind in OWN_CODE else None
        log.error("a model could not be loaded", exc_info=exc_info, extra={"fields": fields})
        clear_tracebacks(error)  # their frames hold the module
        clear_tracebacks(refusal)
        self._refuse(refusal)

    def _refuse(self, refusal: LayertapError) -> None:
        """From now on requests are refused with an error of which this is the reason, those that wait, too."""
        kind: Failure = refusal.kind if isinstance(refusal, LoadError) else "other"
        reason = f"{refusal.detail}; {refusal.hint}" if refusal.hint else refusal.detail
        self.entry.fail(reason, kind or "other")
        self.error = refusal
        self._set("failed")
        self._scheduler.refuse(self.key, self.make_error)

    async def _find_or_ask(
        self,
        key: Hashable,
        find: Callable[[], T | None],
        keep: Callable[[T], None],
        ask: Callable[[LoadedModel], T],
        deadline: float,
        seconds: float = math.inf,
    ) -> T:
        """The result of ``find``, or else that of a survey, which is kept; DeadlineError, its errors."""
        if (found := find()) is not None:
            return found

        async def find_or_survey() -> T:
            found = find()  # an earlier survey may have found it
            if found is None:
                found = cast("T", await self.ask_again(partial(self._scheduler.survey, self.key, ask, seconds)))
                keep(found)
            return found

        return await self._surveys.ask(key, find_or_survey, deadline, bounded=math.isfinite(seconds))

    def _end_loading(self) -> None:
        if self._life is not None:
            self._life.cancel()
            self._life = None  # its frames hold this handle, and therefore the model

    def _forget_requests(self) -> None:
        """Keep nothing of what is known so far, nor what is being planned by it."""
        self.planned.clear()  # what is in it refers to it
        self.planned = LRUCache(MAX_KEPT)

    def _set(self, state: ModelState) -> None:
        self.state = state
        self.changed.set()


def _choose_pause(deaths: int) -> float:
    """Seconds until a model is loaded again whose process has died so many times in a row."""
    more = deaths - TRIES_AT_ONCE
    return min(FIRST_PAUSE_S * 2.0 ** min(more - 1, 10), LONGEST_PAUSE_S) if more > 0 else 0.0


async def _loses_device(error: Exception) -> bool:
    """Whether a device is lost, by an error of a load; a device that does not answer is."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(transfer.is_lost, error), DEVICE_S)
    except TimeoutError:
        return True
