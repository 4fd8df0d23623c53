"""Executors with worker processes, and the choice of an executor for each model.

An input that crashes, hangs or exhausts the memory of a worker process is refused; nothing else fails.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from layertap.models.devices import memory
from layertap.models.devices.devices import list_devices, resolve_device
from layertap.models.errors import InputError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.preprocess import LibraryProcessor
from layertap.models.loaded_model import LoadedModel, MultiDeviceModel, join_devices
from layertap.models.model_info import ModelInfo
from layertap.models.registry import load_ready_model
from layertap.models.sources.python import list_search_folders
from layertap.models.spec import ModelSpec
from layertap.service.engine.batch import CPU, Batch, BatchResult, RowSlice, SliceResult, UndecodedError
from layertap.service.engine.execute.batch_runner import refuse
from layertap.service.engine.execute.decode import decode_on_device, try_to_decode
from layertap.service.engine.execute.executor import (
    CallOutcome,
    Executor,
    Extend,
    InProcessExecutor,
    ModelFunction,
    ModelLostError,
)
from layertap.service.engine.execute.processes.channel import LARGE_BYTES
from layertap.service.engine.execute.processes.messages import CallModel, DecodeItems, HostOptions
from layertap.service.engine.execute.processes.model_host import ModelHost, OnRestart
from layertap.service.engine.execute.processes.worker_pool import (
    GRACE_SECONDS,
    RETRY_SECONDS,
    WorkerDiedError,
    WorkerPool,
    WorkerProcess,
)
from layertap.service.engine.execute.threads import start_single_threaded, wrap_error
from layertap.service.engine.rows import Attempt, ItemAttempts
from layertap.service.errors import ForwardError, UnavailableError
from layertap.service.inputs.items import ArraysItem, ImageItem, LocalItem, TextItem
from layertap.service.metrics import Metrics
from layertap.service.settings import MIN_WORKER_MEMORY_BYTES, Settings

DIED = "the model's process ended"
MEMORY_SHARE = 0.5  # of the memory that is free at loading: the share of all workers of a model
MAX_DECODE_ITEMS = 8  # of a request in one message
TRIES = 2  # a worker may die for another reason than its item
PARTS_AT_ONCE = 2  # threads that turn arrays into rows


def load(spec: ModelSpec, settings: Settings, metrics: Metrics, *, warm: bool = True) -> ModelInfo:
    """Load a model where it will run; LoadError. ``metrics`` count its workers' restarts.

    Models on a GPU run in this process: a forked process can't use the device's memory. Without ``warm``, all models
    run with hooks.
    """
    plans, costs = settings.cache_dir / "plans" if warm else None, settings.cache_dir / "costs"
    if settings.workers and not spec.devices and resolve_device(spec.device).type == "cpu":
        return load_in_host(spec, settings, plans, partial(metrics.count, "worker_restarts_total"))
    replicas = 1 if spec.devices else settings.replicas  # a CPU that stands in for a GPU runs one, too
    options = (replicas, settings.cpu_threads, settings.gpu_streams, plans, costs)
    if not spec.devices:
        return load_ready_model(spec, *options)
    parts = {name: replace(spec, device=name, devices=()) for name in list_devices(spec.devices)}
    return join_devices(spec, {name: load_ready_model(part, *options) for name, part in parts.items()})


def create_executor(model: ModelInfo, settings: Settings, metrics: Metrics) -> Executor:
    """The executor of a loaded model; ``metrics`` as for ``load``.

    If the model's device, or the first of several, is not the CPU, worker processes decode its pictures.
    """
    if isinstance(model, HostedModel):
        return ProcessExecutor(model, settings)
    if not isinstance(model, (LoadedModel, MultiDeviceModel)):
        raise TypeError(f"unknown kind of model: {type(model).__name__}")
    device = next(iter(model.by_device)) if isinstance(model, MultiDeviceModel) else str(model.device)
    if settings.workers and device != CPU and model.model_inputs.takes_pictures:
        return DecodingExecutor(model, settings, partial(metrics.count, "worker_restarts_total"))
    return InProcessExecutor(model, settings)


@dataclass(frozen=True, kw_only=True)
class HostedModel(ModelInfo):
    """A model loaded by its host process."""

    host: ModelHost

    @property
    def hooks(self) -> int:
        """Our hooks that are on the model in its workers after their last batches: 0."""
        return sum(worker.progress.hooks for worker in list(self.host.workers.values()))


def load_in_host(spec: ModelSpec, settings: Settings, plans: Path | None, on_restart: OnRestart) -> HostedModel:
    """Load a model in a process of its own; LoadError.

    ``plans`` as for ``HostOptions``, ``on_restart`` as for ``ModelHost``.
    """
    options = HostOptions(spec, settings, list_search_folders(), choose_worker_bytes(settings), plans)
    host = ModelHost(options, on_restart)
    info = cast("ModelInfo", host.load())
    return HostedModel(host=host, **{each.name: getattr(info, each.name) for each in fields(ModelInfo)})


def choose_worker_bytes(settings: Settings) -> int:
    """The memory limit in bytes of each worker of a model that is loaded now."""
    if settings.worker_memory_bytes is not None:
        return settings.worker_memory_bytes
    free = memory.measure_available_bytes(torch.device("cpu"))
    return max(int(free * MEMORY_SHARE / settings.workers), MIN_WORKER_MEMORY_BYTES)


class WorkerExecutor(Executor):
    """An executor whose workers decode: any idle one takes the next message; their host may be lost."""

    max_decode_items = MAX_DECODE_ITEMS
    _workers: WorkerPool
    _settings: Settings
    _pool: ThreadPoolExecutor

    async def wait_until_lost(self) -> None:
        """Return once the host and all its workers have ended."""
        await self._workers.wait_until_lost()

    async def restart(self) -> None:
        """Start the host and its workers again; LoadError."""
        await self._workers.restart()

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Decode items in a worker, on the GPU, or in a thread; an item that kills two workers is refused."""

        def decode_here() -> list[Sequence[Attempt] | None]:
            return [self._decode_here(item, inputs) for item in items]

        decoded: list[Sequence[Attempt] | None] = [None] * len(items)
        if inputs.decoder is not None or not all(self._is_for_workers(item, inputs) for item in items):
            decoded = await asyncio.get_running_loop().run_in_executor(self._pool, decode_here)
        missing = [item for item, attempts in zip(items, decoded, strict=True) if attempts is None]
        more = iter(await self._decode(missing) if missing else ())
        return [next(more) if attempts is None else attempts for attempts in decoded]

    @abstractmethod
    def _is_for_workers(self, item: LocalItem, inputs: ModelInputs) -> bool:
        """Whether workers decode an item, unless a GPU does."""

    def _decode_here(self, item: LocalItem, inputs: ModelInputs) -> Sequence[Attempt] | None:
        """The rows or error of an item that this process decodes; None if a worker decodes it."""
        if not self._is_for_workers(item, inputs):
            return try_to_decode(item, inputs, self._settings)
        try:
            row = decode_on_device(item, inputs, self._settings) if isinstance(item, ImageItem) else None
        except TooLargeError as error:
            return [error]
        return None if row is None else [{inputs.pictures.specs[0].name: row}]

    async def _decode(self, items: Sequence[LocalItem], tries: int = TRIES) -> ItemAttempts:
        """Decode items in a worker; an item that kills ``tries`` workers is refused.

        Once a worker has died, the other items have no attempts: retry each of them alone. ModelLostError,
        UnavailableError.
        """
        try:
            seconds = len(items) * self._settings.decode_timeout_s + GRACE_SECONDS
            return cast("ItemAttempts", await self._workers.ask(DecodeItems(items), seconds=seconds))
        except WorkerDiedError as error:
            attempts: ItemAttempts = [[] for _ in items]
            blamed = error.decoding if len(items) > 1 else 0
            if blamed < 0:
                return attempts
            if tries > 1 and not self._is_out_of_time(error):
                (attempts[blamed],) = await self._decode([items[blamed]], tries - 1)
            elif error.taken:
                attempts[blamed] = [self._make_refusal(error)]
            else:
                raise UnavailableError("no worker takes this input", retry_after=RETRY_SECONDS) from error
            return attempts

    def _make_refusal(self, error: WorkerDiedError) -> InputError:
        """The refusal of an item that killed a worker."""
        if self._is_out_of_time(error):
            limit = self._settings.decode_timeout_s
            return InputError(f"this input takes longer than {limit:g} s to decode", hint="send a smaller one")
        return InputError("this input ends the process that decodes it", hint="send it in another format")

    def _is_out_of_time(self, error: WorkerDiedError) -> bool:
        """Whether a worker died because its item takes too long to decode, as it would in another worker."""
        return error.decode_seconds >= self._settings.decode_timeout_s


class ProcessExecutor(WorkerExecutor):
    """Runs a model's forwards in its workers, too."""

    model: HostedModel
    decodes_batches = True

    def __init__(self, model: HostedModel, settings: Settings) -> None:
        """Start the workers; LoadError."""
        self.model = model
        self.devices = (CPU,) * settings.workers
        self._settings = settings
        self._workers = WorkerPool(model.host, settings.workers)
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, "decode", initializer=start_single_threaded)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the host alone, measured after loading, and of its workers now."""
        return (self.model.process_bytes or self.model.memory_bytes) + self._workers.host.measure_worker_bytes()

    def start(self, on_idle: Callable[[], None]) -> None:
        """Begin to send messages to the workers."""
        self._workers.start(on_idle)

    def count_idle(self) -> Mapping[str, int]:
        """The number of idle workers."""
        return {CPU: self._workers.idle}

    def run(self, batch: Batch, extend: Extend) -> Awaitable[BatchResult]:
        """Run a batch in a worker. If that dies, blame the slice that it was decoding, or else try each slice alone."""
        return self._run(batch, extend, self._workers.take())

    async def _run(self, batch: Batch, extend: Extend, worker: WorkerProcess) -> BatchResult:
        try:
            deadline = batch.deadline + GRACE_SECONDS
            result: BatchResult = await self._workers.ask(batch, deadline=deadline, worker=worker, extend=extend)
            return await self._join(batch, replace(result, failure=""))  # the failure ended with its worker
        except ModelLostError:
            return BatchResult(again=(batch,))
        except UnavailableError as error:
            return refuse(batch, error)
        except WorkerDiedError as error:
            return self._blame(batch, error)

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Workers check the flag after decoding a batch's pictures."""
        self._workers.note_waiting_rows(rows_wait)

    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """Call the function in a worker, which is killed after so many seconds."""
        try:
            outcome: CallOutcome = await self._workers.ask(CallModel(function), seconds=seconds)
        except WorkerDiedError:
            raise ForwardError(DIED) from None
        return replace(outcome, failure="")  # the failure ended with its worker

    def _is_for_workers(self, item: LocalItem, inputs: ModelInputs) -> bool:
        """True of pictures and texts, and of arrays if decoded pictures go through a library's processor."""
        arrays = isinstance(item, ArraysItem) and isinstance(inputs.preprocess, LibraryProcessor)
        return inputs is self.model.model_inputs and (arrays or isinstance(item, (ImageItem, TextItem)))

    async def close(self) -> None:
        """End all processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await self._workers.close()

    async def _join(self, batch: Batch, result: BatchResult) -> BatchResult:
        """Join each slice's rows with those of its job; large results are copied in a thread."""
        join = partial(_join_rows, batch, result)
        try:
            copied = any(each.job.joined is not None and each.rows < each.job.rows for each in batch.slices)
            large = copied and sum(each.nbytes for each in result.results) > LARGE_BYTES
            return await asyncio.get_running_loop().run_in_executor(self._pool, join) if large else join()
        except MemoryError as error:
            return refuse(batch, wrap_error(error))

    def _blame(self, batch: Batch, error: WorkerDiedError) -> BatchResult:
        """The result of a batch whose worker died: a blamed slice runs once more, alone; the others run again."""
        if error.timed_out or (error.decoding < 0 and batch.tries):  # nobody waits any more, or it was alone
            return refuse(batch, ForwardError(DIED))
        if error.decoding < 0:
            return BatchResult(again=[batch.take([each], tries=1) for each in batch.slices])
        slices = list(batch.slices)
        blamed = slices.pop(error.decoding)
        again = [batch.take(slices)] if slices else []
        if batch.tries or self._is_out_of_time(error) or len(blamed.encoded) != 1:
            row = blamed.start if len(blamed.encoded) == 1 else None
            refusal = UndecodedError(self._make_refusal(error), row)
            return BatchResult(
                [SliceResult(error.decoding, blamed.start, blamed.stop, refusal, blamed.rows)], again=again
            )
        return BatchResult(again=[*again, batch.take([blamed], tries=1)])


def _join_rows(batch: Batch, result: BatchResult) -> BatchResult:
    def join(each: SliceResult) -> SliceResult:
        whole: RowSlice = batch.slices[each.index]
        start, stop, results = whole.start + each.start, whole.start + each.stop, each.results
        if not isinstance(results, Exception) and whole.job.joined is not None:
            results = whole.job.joined.add(start, stop, results)
        return replace(each, start=start, stop=stop, results=results)

    return replace(result, results=[join(each) for each in result.results])


class DecodingExecutor(WorkerExecutor, InProcessExecutor):
    """For a model that takes pictures, on any device. A GPU that can decode some pictures decodes them itself.

    Texts are tokenized here, because a tokenizer can't be sent to another process.
    """

    def __init__(self, model: LoadedModel | MultiDeviceModel, settings: Settings, on_restart: OnRestart) -> None:
        """Start the workers; LoadError. ``on_restart`` as for ``ModelHost``."""
        super().__init__(model, settings)
        pictures = replace(model.model_inputs.pictures, text=None, decoder=None)
        options = HostOptions(model.spec, settings, (), choose_worker_bytes(settings), plans=None, pictures=pictures)
        host = ModelHost(options, on_restart)
        host.load()
        self._workers = WorkerPool(host, settings.workers)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights and buffers on all devices, and of the workers now."""
        return super().memory_bytes + self._workers.host.measure_worker_bytes()

    def start(self, on_idle: Callable[[], None]) -> None:
        """Start the threads, and begin to send messages to the workers."""
        super().start(on_idle)
        self._workers.start()

    def _is_for_workers(self, item: LocalItem, inputs: ModelInputs) -> bool:
        """True of pictures."""
        return inputs is self.model.model_inputs and isinstance(item, ImageItem)

    async def close(self) -> None:
        """End the threads and the workers."""
        await super().close()
        await self._workers.close()
