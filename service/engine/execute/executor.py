"""Where a model's forwards and functions run and its inputs are decoded: here in threads, on one device or several.

``processes/executors.py`` has the executor whose forwards run in worker processes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from layertap.models.devices import transfer
from layertap.models.errors import LayertapError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.loaded_model import LoadedModel, MultiDeviceModel
from layertap.models.model_catalogs import ModelCatalogs
from layertap.models.model_info import ModelInfo
from layertap.models.replica import Replica
from layertap.service.engine.batch import Batch, BatchResult
from layertap.service.engine.execute.batch_runner import BatchRunner, find_lasting_failure
from layertap.service.engine.execute.threads import WorkerThread, start_single_threaded, wrap_error
from layertap.service.engine.rows.rows import ItemAttempts, try_to_decode
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings

T = TypeVar("T")
P = ParamSpec("P")
ModelFunction = Callable[[LoadedModel], Any]
Extend = Callable[[], Batch | None]  # has what waits join a batch that was started; what joins, as a batch


class ModelLostError(Exception):
    """The process that had loaded the model has ended: what was asked of it may be asked again once it is back."""


@dataclass(frozen=True)
class CallOutcome:
    """What a function of the model gave, or raised; ``failure`` says why nothing can be answered any more."""

    result: Any | LayertapError | RuntimeError
    failure: str = ""


class Executor(ABC):
    """Runs what a model computes, in so many replicas at once. For the event loop only, but for its creation.

    ``model``: what is known of the model; ``devices``: where each replica runs, by name. ``decodes_batches``: whether a
    batch may have pictures that are still encoded. ``max_decode_items``: how many items it decodes at a time, at most.
    """

    model: ModelInfo
    devices: tuple[str, ...]
    decodes_batches = False
    max_decode_items = 1

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """What the model takes in memory, with processes that it has; any thread may ask."""

    @abstractmethod
    def start(self, on_idle: Callable[[], None]) -> None:
        """Begin to answer; ``on_idle`` is called when there is a new replica, which is idle."""

    @abstractmethod
    def count_idle(self) -> Mapping[str, int]:
        """How many replicas are idle, by device."""

    @abstractmethod
    def run(self, batch: Batch, extend: Extend) -> Awaitable[BatchResult]:
        """One forward for all rows of a batch, or more where it can't be done in one, in an idle replica of its device.

        The replica is idle no more once this returns. Whoever decodes pictures of a batch calls ``extend`` before its
        forward, until nothing joins it. What goes wrong is in the result.
        """

    @abstractmethod
    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """A function of the model, on a replica once that is idle; it can be pickled, as its result can.

        It may be ended after so many seconds. ForwardError where it ends its process, ModelLostError, UnavailableError.
        """

    @abstractmethod
    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Items as rows, or why there are none.

        Of several items some may have no attempts: another one killed their process. They are to be sent again, alone.
        ModelLostError, UnavailableError.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of the model; nothing of it runs any more once this returns."""

    def note_waiting_rows(self, rows_wait: bool) -> None:  # noqa: B027  (of no use where no batch grows)
        """Know whether rows of the model are in no batch yet."""

    async def wait_until_lost(self) -> None:
        """Return once the model is not there any more, since its process has ended: never where that is this one."""
        await asyncio.Event().wait()

    async def restart(self) -> None:  # noqa: B027  (of no use where the model is not lost)
        """Load a model that was lost again; LoadError where it can't be, or is another one now."""


class InProcessExecutor(Executor):
    """Forwards in a thread for each replica, on one device or several; decoding in a pool of threads.

    Batches come decoded: decoding here takes turns with other models' forwards.
    """

    def __init__(self, model: LoadedModel | MultiDeviceModel, settings: Settings) -> None:
        self.model = model
        parts = {str(model.device): model} if isinstance(model, LoadedModel) else model.by_device
        self.devices = tuple(name for name, part in parts.items() for _ in part.replicas)
        self._settings = settings
        self._replicas = [(part, replica) for part in parts.values() for replica in part.replicas]
        self._pool = ThreadPoolExecutor(settings.cpu_threads, "decode", initializer=start_single_threaded)
        self._threads: list[WorkerThread] = []

    @property
    def memory_bytes(self) -> int:
        """The weights and buffers, on all devices."""
        return self.model.memory_bytes

    def start(self, on_idle: Callable[[], None]) -> None:
        """Start the threads.

        None of them is the one that loaded the model: one that computed on all cores keeps helpers, and libgomp lets
        none spin where there are more of these than cores, which makes every other model's rows on all cores slower.
        """
        del on_idle  # no replica is new later
        self._threads = [
            WorkerThread(f"model-{number}-{self.model.spec.name}", partial(_begin, part.device))
            for number, (part, _) in enumerate(self._replicas)
        ]

    def count_idle(self) -> Mapping[str, int]:
        """The threads of each device that have nothing to do."""
        return Counter(self.devices[number] for number in self._list_idle())

    def run(self, batch: Batch, extend: Extend) -> Awaitable[BatchResult]:
        """The batch as it is, in the thread of its device's first idle replica: its rows are decoded."""
        del extend
        number = next(number for number in self._list_idle() if self.devices[number] == batch.device)
        return self._threads[number].run(BatchRunner(*self._replicas[number], batch).run)

    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """The function, in the first replica's thread, after what that does; a thread can't be ended."""
        del seconds
        return await self._threads[0].run(partial(call_model, *self._replicas[0], function))

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """The items' rows, in a thread of the pool."""

        def decode() -> ItemAttempts:
            return [try_to_decode(item, inputs, self._settings) for item in items]

        return await asyncio.get_running_loop().run_in_executor(self._pool, decode)

    async def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            await thread.close()

    def _list_idle(self) -> list[int]:
        return [number for number, thread in enumerate(self._threads) if thread.is_idle]


def _begin(device: torch.device) -> None:
    """Begin a replica's thread."""
    start_single_threaded()
    transfer.use_own_stream(device)


def call_model(model: LoadedModel, replica: Replica, function: ModelFunction) -> CallOutcome:
    """Call a function of a model in its replica's thread; it has its result once the device has computed it."""
    try:
        result = function(model)
        transfer.synchronize_stream(model.device)  # threads with other streams may use the result
    except LayertapError as error:
        return CallOutcome(error)
    except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio has its own
        wrapped = wrap_error(error)
        return CallOutcome(wrapped, find_lasting_failure(wrapped, model, replica))
    return CallOutcome(result)


def ask_catalogs(
    model: LoadedModel, method: Callable[Concatenate[ModelCatalogs, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What a method of the model's catalogues gives, or raises, that runs it."""
    return method(model.catalogs, *args, **kwargs)
