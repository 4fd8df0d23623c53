"""Executors run a model's forwards and functions: here in threads, on one or several devices.

``processes/process_executor.py`` has the one that uses worker processes. A decoder turns inputs into rows for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from layertap.models.devices import transfer
from layertap.models.errors import LayertapError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.batch import Batch, BatchResult, LastingFailure
from layertap.service.engine.execute.batch_runner import BatchRunner, refuse
from layertap.service.engine.execute.decode import refuse_here, try_to_decode
from layertap.service.engine.execute.model_calls import CallOutcome, ModelFunction, call_model
from layertap.service.engine.execute.processes.worker_pool import WorkerPool
from layertap.service.engine.execute.threads import WorkerThread, start_single_threaded, wrap_error
from layertap.service.engine.rows import ItemAttempts
from layertap.service.inputs.items import LocalItem, TextItem
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
ITEM_CHARACTERS = 64  # what a text costs beside its own
MAX_CHARACTERS = 2**17  # of texts that this process tokenizes: a few tens of milliseconds
HANG_MARGIN_S = 5.0  # beyond the deadline of a request that came when the work began
Extend = Callable[[], Batch | None]  # lets waiting rows join a batch that was started; returns them as a batch


class Decoder:
    """Decodes items in threads of this process, where it takes turns with other models' forwards.

    ``max_items``: the most per call. ``pool`` has the threads; ``workers``: the processes that it uses, if any.
    """

    max_items = 1
    workers: WorkerPool | None = None

    def __init__(self, settings: Settings, threads: int) -> None:
        self._settings = settings
        self.pool = ThreadPoolExecutor(threads, "decode", initializer=start_single_threaded)

    def find_workers(self, items: Sequence[LocalItem], inputs: ModelInputs) -> Mapping[str, int] | None:
        """How many workers are idle, by device, one of which decodes these items; None if threads decode them."""

    def count_characters(self, items: Sequence[LocalItem], inputs: ModelInputs) -> int | None:
        """The characters of texts that ``decode_here`` may tokenize; None if others must decode some of the items."""
        text = inputs.text
        if text is None or text.encode is None or text.encode is refuse_here or not text.is_fast:
            return None
        characters = 0
        for item in items:
            if not isinstance(item, TextItem) or item.messages or item.prompt in text.slow_prompts:
                return None
            prompt = text.default_prompt if item.prompt is None else text.prompts[item.prompt]
            characters += ITEM_CHARACTERS + len(prompt) + len(item.text) + len(item.pair or "")
        return characters if characters <= MAX_CHARACTERS else None

    def decode_here(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """The rows or errors of items, decoded in the calling thread."""
        return [try_to_decode(item, inputs, self._settings) for item in items]

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Decode items: their rows or their errors.

        If an item kills a process, the others may have no attempts: retry each of them alone. ModelLostError,
        UnavailableError.
        """
        return await asyncio.get_running_loop().run_in_executor(self.pool, self.decode_here, items, inputs)


class Executor(ABC):
    """Runs a model in one or several replicas. For the event loop only, except its creation.

    ``model``: the model's description; ``devices``: the device name of each replica; ``idle``: how many of them are
    idle now, by device. ``decode``, ``decode_here`` and ``count_characters`` are its decoder's; ``max_decode_items``:
    the most per call. ``decodes_batches``: whether a batch may contain encoded pictures.
    """

    decodes_batches = False

    def __init__(self, model: ModelInfo, devices: Sequence[str], decoder: Decoder) -> None:
        self.model = model
        self.devices = tuple(devices)
        self.idle = dict.fromkeys(devices, 0)
        self.decode, self.decode_here = decoder.decode, decoder.decode_here
        self.count_characters, self.find_decoders = decoder.count_characters, decoder.find_workers
        self.max_decode_items = decoder.max_items
        self._pool = decoder.pool
        self._workers = decoder.workers

    @property
    def memory_bytes(self) -> int:
        """Bytes that the model takes: on all devices, or in its host after loading, and in its workers now."""
        workers = self._workers.host.measure_worker_bytes() if self._workers is not None else 0
        return (self.model.process_bytes or self.model.memory_bytes) + workers

    def start(self, on_idle: Callable[[], None]) -> None:
        """Begin to answer; ``on_idle`` is called when a new, idle process is added."""
        if self._workers is not None:
            self._workers.start(on_idle)

    @abstractmethod
    def run(self, batch: Batch, extend: Extend) -> asyncio.Future[BatchResult]:
        """Run a batch on an idle replica of its device: in one forward, or in several if that fails.

        The replica is no longer idle when this returns. An executor that decodes a batch's pictures calls ``extend``
        before the forward until no rows join. Errors are in the result: the future never fails. A batch that hangs
        has a failure for its result.
        """

    @abstractmethod
    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """Call a picklable function with a picklable result on the next idle replica; if cancelled, it is ended.

        OverdueError once it has run for so many seconds; ForwardError if it ends its process, ModelLostError,
        UnavailableError. A call that hangs has a failure for its outcome.
        """

    async def close(self) -> None:
        """Release the model; once this returns, none of its code runs but what hangs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            await self._workers.close()

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Note whether rows of the model wait that are in no batch yet; called when that changes."""
        if self._workers is not None:  # they check it after decoding a batch's pictures
            self._workers.note_waiting_rows(rows_wait)

    async def wait_until_lost(self) -> None:
        """Return once processes that the model needs have ended; never if it has none."""
        await (self._workers.lost if self._workers is not None else asyncio.Event()).wait()

    async def restart(self) -> None:
        """Start these processes again; LoadError if that fails or gives another model."""
        if self._workers is not None:
            await self._workers.restart()


class InProcessExecutor(Executor):
    """Runs forwards in one thread per replica, on one device or several. Batches come decoded.

    Nothing can end a thread: what it runs hangs once nobody can wait for it any more. A replica whose function hangs
    is idle again only once that has ended after all.
    """

    def __init__(self, model: LoadedModel, settings: Settings, decoder: Decoder | None = None) -> None:
        """Without ``decoder``, threads decode."""
        parts = model.by_device or {str(model.device): model}
        self._replicas = [(part, replica) for part in parts.values() for replica in part.replicas]
        devices = [name for name, part in parts.items() for _ in part.replicas]
        super().__init__(model, devices, decoder or Decoder(settings, settings.cpu_threads))
        self._check_shared = settings.check_shared
        self._longest_s = settings.deadline_s + HANG_MARGIN_S
        self._threads: list[WorkerThread] = []
        self._running: list[int] = []  # functions of each thread

    def start(self, on_idle: Callable[[], None]) -> None:
        """Start the threads.

        None of them loaded the model: a thread that computed on all cores keeps helper threads, and libgomp stops
        spinning when these outnumber the cores, which slows down all other models' rows that use all cores.
        """
        self._threads = [
            WorkerThread(f"model-{number}-{self.model.spec.name}", partial(_begin, part.device))
            for number, (part, _) in enumerate(self._replicas)
        ]
        self._running = [0] * len(self._threads)
        for device in self.devices:
            self.idle[device] += 1
        super().start(on_idle)

    def run(self, batch: Batch, extend: Extend) -> asyncio.Future[BatchResult]:
        """Run a decoded batch in the thread of the device's first idle replica."""
        del extend
        idle = zip(self.devices, self._running, strict=True)
        number = next(number for number, each in enumerate(idle) if each == (batch.device, 0))
        loop = asyncio.get_running_loop()
        result: asyncio.Future[BatchResult] = loop.create_future()
        ended: asyncio.Future[Any] = loop.create_future()

        def settle(found: BatchResult | None, error: Exception | None) -> None:
            late.cancel()
            self._count(number, -1)
            if not result.done():  # cancelled with the event loop, or it hung
                result.set_result(found if found is not None else fail_batch(batch, error))
            ended.set_result(None)

        def give_up() -> None:
            if not result.done():
                result.set_result(BatchResult(failure=self._describe_hang(ended)))

        self._count(number, 1)
        late = loop.call_later(self._longest_s, give_up)
        self._threads[number].post(BatchRunner(*self._replicas[number], batch, self._check_shared).run, settle)
        return result

    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """Call the function in the first replica's thread, after its queued tasks; it is ended between modules."""
        cancelled = threading.Event()

        def call() -> CallOutcome:
            end = time.monotonic() + seconds
            return call_model(*self._replicas[0], function, lambda: cancelled.is_set() or time.monotonic() > end)

        self._count(0, 1)
        called = self._threads[0].run(call)
        called.add_done_callback(lambda _: self._count(0, -1))
        hung_at = time.monotonic() + self._longest_s
        try:
            return await asyncio.shield(called)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([called], timeout=max(hung_at - time.monotonic(), 0.0))
            if called.done():
                raise
            return CallOutcome(None, self._describe_hang(called))

    async def close(self) -> None:
        """End the workers, and the threads once they have run their functions; those that hang are abandoned."""
        await super().close()
        for thread, running in zip(self._threads, self._running, strict=True):
            if running:
                thread.shutdown()
            else:
                await thread.close()

    def _describe_hang(self, ended: asyncio.Future[Any]) -> LastingFailure:
        return LastingFailure(f"a forward has not ended after {self._longest_s:g} s", ended=ended)

    def _count(self, number: int, change: int) -> None:
        """Count the functions that a replica's thread runs or will run: without any it is idle."""
        running, self._running[number] = self._running[number], self._running[number] + change
        self.idle[self.devices[number]] += (not self._running[number]) - (not running)


def fail_batch(batch: Batch, error: Exception | None) -> BatchResult:
    """The result of a batch that could not be run, for no reason that an executor knows."""
    log.error("a batch failed", exc_info=error, extra={"fields": {"model": batch.key.name}})
    return refuse(batch, error if isinstance(error, LayertapError) else wrap_error(error or RuntimeError()))


def _begin(device: torch.device) -> None:
    """Set up a replica's thread."""
    start_single_threaded()
    transfer.use_own_stream(device)
