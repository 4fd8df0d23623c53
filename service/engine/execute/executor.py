"""Where a model's forwards run and what is sent to it is decoded: in threads of this process, on one device or several.

``processes/process_executor.py`` has the one whose forwards run in worker processes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from layertap.models.devices import transfer
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.loaded_model import LoadedModel
from layertap.models.model_info import ModelInfo
from layertap.service.engine.batch import Batch, BatchFailures, BatchResult
from layertap.service.engine.execute.batch_runner import BatchRunner, find_lasting_failure
from layertap.service.engine.execute.threads import Failed, WorkerThread, call_and_catch, start_single_threaded
from layertap.service.engine.rows.rows import ItemAttempts, try_to_decode
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings

ModelFunction = Callable[[LoadedModel], Any]


class ModelLostError(Exception):
    """The process that had loaded the model has ended: what was asked of it may be asked again once it is back."""


@dataclass(frozen=True)
class CallOutcome:
    """What a function of the model gave, or raised; ``failure`` says why nothing can be answered any more."""

    result: Any | Failed
    failure: str = ""


class RunningBatch:
    """A batch that has begun, and grows until its forward does; ``batch`` is what it has by now."""

    def __init__(self, batch: Batch, extend: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        """``extend`` gives the batch with what joins it now."""
        self.batch = batch
        self._extend = extend

    def extend(self) -> Batch | None:
        """What joins it now, as a batch; None where nothing does."""
        before = self.batch
        self.batch = self._extend(before)
        joining = self.batch.slices[len(before.slices) :]
        return replace(self.batch, slices=joining) if joining else None


class Executor(Protocol):
    """Runs what a model computes, in so many replicas at once. For the event loop only, but for its creation.

    ``on_idle`` is called when there is a new replica, which is idle.
    """

    on_idle: Callable[[], None]

    @property
    def model(self) -> ModelInfo:
        """What is known of the model."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Where each replica runs, by name."""

    @property
    def memory_bytes(self) -> int:
        """What the model takes in memory, with processes that it has; any thread may ask."""

    @property
    def decodes_batches(self) -> bool:
        """Whether a batch may have pictures that are still encoded."""

    @property
    def max_decode_items(self) -> int:
        """How many items it is given to decode at a time, at most."""

    def start(self) -> None:
        """Begin to answer."""

    def count_idle(self) -> Mapping[str, int]:
        """How many replicas are idle, by device."""

    def run(self, running: RunningBatch) -> Awaitable[BatchResult]:
        """One forward for all rows of a batch, or more where it can't be done in one, in an idle replica of its device.

        The replica is idle no more once this returns. Whoever decodes pictures of a batch asks what joins it before its
        forward, until nothing does. What goes wrong is in the result.
        """

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Know whether rows of the model are in no batch yet."""

    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """A function of the model, on a replica once that is idle; it can be pickled, as its result can.

        It may be ended after so many seconds. ModelLostError.
        """

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Items as rows, or why there are none.

        Of several items some may have no attempts: another one killed their process. They are to be sent again, alone.
        ModelLostError, UnavailableError.
        """

    async def wait_until_lost(self) -> None:
        """Return once the model is not there any more, since its process has ended."""

    async def restart(self) -> None:
        """Load a model that was lost again; LoadError where it can't be, or is another one now."""

    async def close(self) -> None:
        """Let go of the model; nothing of it runs any more once this returns."""


class ModelRunner:
    """Runs what a model in this process computes, in the calling thread; one thread at a time uses a replica."""

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self.model = model
        self._settings = settings

    def run(self, replica: int, batch: Batch, note: Callable[[BatchFailures], None] = lambda _: None) -> BatchResult:
        """The batch, or why not; ``note`` hears of each failure."""
        return BatchRunner(self.model, self.model.replicas[replica], batch, note).run()

    def call(self, replica: int, function: ModelFunction) -> CallOutcome:
        """What a function gives, once the device has computed it."""
        result = call_and_catch(partial(self._call, function))
        if isinstance(result, Exception):
            return CallOutcome(result, find_lasting_failure(result, self.model, self.model.replicas[replica]))
        return CallOutcome(result)

    def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """The items' rows; any thread may ask."""
        return [try_to_decode(item, inputs, self._settings) for item in items]

    def _call(self, function: ModelFunction) -> Any:
        result = function(self.model)
        if self.model.device.type == "cuda":
            transfer.synchronize_stream(self.model.device)  # threads with other streams may use the result
        return result


class InProcessExecutor:
    """Forwards in a thread for each replica, decoding in a pool of threads."""

    def __init__(self, model: LoadedModel, settings: Settings, device: str | None = None) -> None:
        """``device`` is the name of the model's device, where that is not what torch calls it."""
        self.on_idle: Callable[[], None] = lambda: None
        self.model = model
        self.devices = (device or str(model.device),) * len(model.replicas)
        self.decodes_batches = False  # decoding here takes turns with other models' forwards
        self.max_decode_items = 1
        self.first_thread = 0  # its number, among those of the same model on all devices
        self._settings = settings
        self._runner = ModelRunner(model, settings)
        self._pool = ThreadPoolExecutor(settings.cpu_threads, "decode", initializer=start_single_threaded)
        self._threads: list[WorkerThread] = []
        self._idle: list[int] = []

    @property
    def memory_bytes(self) -> int:
        """The weights and buffers."""
        return self.model.memory_bytes

    def start(self) -> None:
        """Start the threads.

        None of them is the one that loaded the model: one that computed on all cores keeps helpers, and libgomp lets
        none spin where there are more of these than cores, which makes every other model's rows on all cores slower.
        """
        self._idle = list(range(len(self.devices)))
        names = (f"model-{self.first_thread + number}-{self.model.spec.name}" for number in self._idle)
        self._threads = [WorkerThread(name, self._begin) for name in names]

    def count_idle(self) -> Mapping[str, int]:
        """Its threads that have nothing to do, all on one device."""
        return {self.devices[0]: len(self._idle)}

    def run(self, running: RunningBatch) -> Awaitable[BatchResult]:
        """The batch as it is, in the thread of the first idle replica: its rows are decoded."""
        replica = min(self._idle)
        return self._work(replica, partial(self._runner.run, replica, running.batch))

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Nothing: no batch grows here."""

    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """The function, in the first replica's thread, after what that does; a thread can't be ended."""
        del seconds
        outcome: CallOutcome = await self._work(0, partial(self._runner.call, 0, function))
        return outcome

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """The items' rows, in a thread of the pool."""
        decode = partial(self._runner.decode, items, inputs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, decode)

    async def wait_until_lost(self) -> None:
        """Wait for ever: the model is there as long as this process."""
        await asyncio.Event().wait()

    async def restart(self) -> None:
        """Nothing: the model is there."""

    async def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        threads, self._threads = self._threads, []  # which know this executor: it shall not wait for the collector
        for thread in threads:
            await thread.close()

    def _begin(self) -> None:
        start_single_threaded()
        if self.model.device.type == "cuda":
            transfer.use_own_stream(self.model.device)

    def _work(self, replica: int, function: Callable[[], Any]) -> Awaitable[Any]:
        if replica in self._idle:
            self._idle.remove(replica)
        return self._wait(replica, self._threads[replica].run(function))

    async def _wait(self, replica: int, result: Awaitable[Any]) -> Any:
        thread = self._threads[replica]
        try:
            return await result
        finally:
            if thread.is_idle and replica not in self._idle:
                self._idle.append(replica)


class MultiDeviceExecutor:
    """An executor for each device, whose replicas take batches of one queue; the first one decodes, and is called."""

    def __init__(self, model: ModelInfo, executors: Mapping[str, InProcessExecutor]) -> None:
        """``executors`` by the names of their devices."""
        threads = 0
        for executor in executors.values():
            executor.first_thread, threads = threads, threads + len(executor.devices)
        self.model = model
        self._executors = dict(executors)
        self._first = next(iter(self._executors.values()))
        self.devices = tuple(device for each in self._executors.values() for device in each.devices)
        self.decodes_batches = False
        self.max_decode_items = self._first.max_decode_items

    @property
    def on_idle(self) -> Callable[[], None]:
        """What is called when a replica of any device has become idle."""
        return self._first.on_idle

    @on_idle.setter
    def on_idle(self, function: Callable[[], None]) -> None:
        for executor in self._executors.values():
            executor.on_idle = function

    @property
    def memory_bytes(self) -> int:
        """What the model takes on all devices."""
        return sum(executor.memory_bytes for executor in self._executors.values())

    def start(self) -> None:
        """Begin to answer on all devices."""
        for executor in self._executors.values():
            executor.start()

    def count_idle(self) -> Mapping[str, int]:
        """The idle replicas of each device."""
        idle = Counter[str]()
        for executor in self._executors.values():
            idle.update(executor.count_idle())
        return idle

    def run(self, running: RunningBatch) -> Awaitable[BatchResult]:
        """The batch on its device."""
        return self._executors[running.batch.device].run(running)

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Nothing: no batch grows here."""

    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """The function, on the first device."""
        return await self._first.call(function, seconds)

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """The items' rows, as the first device's executor makes them."""
        return await self._first.decode(items, inputs)

    async def wait_until_lost(self) -> None:
        """As the first device's executor."""
        await self._first.wait_until_lost()

    async def restart(self) -> None:
        """Load what was lost again."""
        await self._first.restart()

    async def close(self) -> None:
        """Let go of the model on all devices."""
        for executor in self._executors.values():
            await executor.close()
