"""Executors run a model's forwards and functions and decode its inputs: here in threads, on one or several devices.

``processes/executors.py`` has the executors that use worker processes.
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
from layertap.service.engine.execute.decode import try_to_decode
from layertap.service.engine.execute.threads import WorkerThread, start_single_threaded, wrap_error
from layertap.service.engine.rows import ItemAttempts
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings

T = TypeVar("T")
P = ParamSpec("P")
ModelFunction = Callable[[LoadedModel], Any]
Extend = Callable[[], Batch | None]  # lets waiting rows join a batch that was started; returns them as a batch


class ModelLostError(Exception):
    """The process that had loaded the model has ended: retry once the model is loaded again."""


@dataclass(frozen=True)
class CallOutcome:
    """What a function of the model returned or raised; ``failure``: why this process can't answer any more, if so."""

    result: Any | LayertapError | RuntimeError
    failure: str = ""


class Executor(ABC):
    """Runs a model in one or several replicas. For the event loop only, except its creation.

    ``model``: the model's description; ``devices``: the device name of each replica. ``decodes_batches``: whether a
    batch may contain encoded pictures. ``max_decode_items``: the most items per call of ``decode``.
    """

    model: ModelInfo
    devices: tuple[str, ...]
    decodes_batches = False
    max_decode_items = 1

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that the model takes, its worker processes included; any thread may ask."""

    @abstractmethod
    def start(self, on_idle: Callable[[], None]) -> None:
        """Begin to answer; ``on_idle`` is called when a new, idle replica is added."""

    @abstractmethod
    def count_idle(self) -> Mapping[str, int]:
        """The number of idle replicas on each device."""

    @abstractmethod
    def run(self, batch: Batch, extend: Extend) -> Awaitable[BatchResult]:
        """Run a batch on an idle replica of its device: in one forward, or in several if that fails.

        The replica is no longer idle when this returns. An executor that decodes a batch's pictures calls ``extend``
        before the forward until no rows join. Errors are in the result.
        """

    @abstractmethod
    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """Call a picklable function with a picklable result on the next idle replica.

        It may be stopped after so many seconds. ForwardError if it ends its process, ModelLostError, UnavailableError.
        """

    @abstractmethod
    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Decode items: their rows or their errors.

        If an item kills the process, the others may have no attempts: retry each of them alone. ModelLostError,
        UnavailableError.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the model; none of its code runs once this returns."""

    def note_waiting_rows(self, rows_wait: bool) -> None:  # noqa: B027  (only for batches that can grow)
        """Note whether rows of the model wait that are in no batch yet."""

    async def wait_until_lost(self) -> None:
        """Return once the model is lost because its process has ended; never if it is in this process."""
        await asyncio.Event().wait()

    async def restart(self) -> None:  # noqa: B027  (only for models that can be lost)
        """Load a lost model again; LoadError if that fails or gives another model."""


class InProcessExecutor(Executor):
    """Runs forwards in one thread per replica, on one device or several; decodes in a thread pool.

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

        None of them loaded the model: a thread that computed on all cores keeps helper threads, and libgomp stops
        spinning when these outnumber the cores, which slows down all other models' rows that use all cores.
        """
        del on_idle  # no replica is added later
        self._threads = [
            WorkerThread(f"model-{number}-{self.model.spec.name}", partial(_begin, part.device))
            for number, (part, _) in enumerate(self._replicas)
        ]

    def count_idle(self) -> Mapping[str, int]:
        """The number of idle threads for each device."""
        return Counter(self.devices[number] for number in self._list_idle())

    def run(self, batch: Batch, extend: Extend) -> Awaitable[BatchResult]:
        """Run a decoded batch in the thread of the device's first idle replica."""
        del extend
        number = next(number for number in self._list_idle() if self.devices[number] == batch.device)
        return self._threads[number].run(BatchRunner(*self._replicas[number], batch, self._settings.check_shared).run)

    async def call(self, function: ModelFunction, seconds: float) -> CallOutcome:
        """Call the function in the first replica's thread, after its queued tasks; a thread can't be stopped."""
        del seconds
        return await self._threads[0].run(partial(call_model, *self._replicas[0], function))

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Decode the items in a thread of the pool."""

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
    """Set up a replica's thread."""
    start_single_threaded()
    transfer.use_own_stream(device)


def call_model(model: LoadedModel, replica: Replica, function: ModelFunction) -> CallOutcome:
    """Call a function of a model in its replica's thread; returns once the device has computed the result."""
    try:
        result = function(model)
        transfer.synchronize_stream(model.device)  # threads with other streams may use the result
    except LayertapError as error:
        return CallOutcome(error)
    except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio uses these
        wrapped = wrap_error(error)
        return CallOutcome(wrapped, find_lasting_failure(wrapped, model, replica))
    return CallOutcome(result)


def ask_catalogs(
    model: LoadedModel, method: Callable[Concatenate[ModelCatalogs, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a method of the model's catalogues."""
    return method(model.catalogs, *args, **kwargs)
