"""Where a model's forwards run and what is sent to it is decoded: here in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from layertap.models.devices import transfer
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.loaded_model import LoadedModel
from layertap.models.model_info import ModelInfo
from layertap.service.engine.execute.batch_runner import BatchRunner, find_lasting_failure
from layertap.service.engine.execute.forward_batch import BatchOutcome, ForwardBatch
from layertap.service.engine.execute.futures import Failed, call_and_catch
from layertap.service.engine.execute.threads import start_single_threaded
from layertap.service.engine.rows.rows import ItemAttempts, try_to_decode
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings

ModelFunction = Callable[[LoadedModel], Any]
Extend = Callable[[], ForwardBatch | None]


@dataclass(frozen=True)
class CallOutcome:
    """What a function of a model gave, or raised; ``failure`` says why nothing can be answered any more."""

    result: Any | Failed
    failure: str = ""


class Executor(Protocol):
    """Runs what a model computes, in so many replicas at once; each is used by a thread at a time.

    Nothing is raised: what went wrong is told in place of results.
    """

    @property
    def model(self) -> ModelInfo:
        """What is known of the model."""

    @property
    def replicas(self) -> int:
        """How many batches it runs at once."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Where each replica runs, by name."""

    @property
    def memory_bytes(self) -> int:
        """What the model takes in memory, with processes that it has."""

    @property
    def decodes_batches(self) -> bool:
        """Whether a batch may have pictures that are still encoded."""

    @property
    def max_decode_items(self) -> int:
        """How many items it is given to decode at a time, at most."""

    def start_thread(self, replica: int) -> None:
        """Prepare a thread that will use a replica; called in it."""

    def run_batch(self, replica: int, batch: ForwardBatch, extend: Extend) -> BatchOutcome:
        """One forward for all rows of a batch, or more where it can't be done in one.

        Whoever decodes pictures of a batch asks what may join it before its forward, until nothing does.
        """

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Know whether rows of the model are in no batch yet; any thread may tell."""

    def call(self, function: ModelFunction) -> CallOutcome:
        """A function of the model, on the first replica; one that can be pickled, as its result can."""

    def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Items as rows, or why there are none; any thread may ask.

        Of several some may have nothing at all: their process died of another one. They are to be asked for alone.
        """

    def close(self) -> None:
        """Let go of the model; nothing of it runs any more."""


class InProcessExecutor:
    """Forwards and decoding in the threads that ask for them."""

    def __init__(self, model: LoadedModel, settings: Settings, device: str | None = None) -> None:
        """``device`` is the name of the model's device, where that is not what torch calls it."""
        self.model = model
        self.replicas = len(model.replicas)
        self.devices = (device or str(model.device),) * self.replicas
        self.decodes_batches = False  # decoding here takes turns with other models' forwards
        self.max_decode_items = 1
        self._settings = settings

    @property
    def memory_bytes(self) -> int:
        """The weights and buffers."""
        return self.model.memory_bytes

    def start_thread(self, replica: int) -> None:
        """Prepare a thread that will use a replica: torch's operations in it use no other thread."""
        del replica  # all are on one device
        start_single_threaded()
        if self.model.device.type == "cuda":
            transfer.use_own_stream(self.model.device)

    def run_batch(self, replica: int, batch: ForwardBatch, extend: Extend) -> BatchOutcome:
        """The batch as it is, in the calling thread."""
        del extend  # its rows are decoded: the forward begins at once
        return BatchRunner(self.model, self.model.replicas[replica], batch).run()

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Nothing: no batch grows here."""

    def call(self, function: ModelFunction) -> CallOutcome:
        """The function, in the calling thread, until the device has done it."""
        result = call_and_catch(partial(self._call, function))
        if isinstance(result, Exception):
            return CallOutcome(result, find_lasting_failure(result, self.model, self.model.replicas[0]))
        return CallOutcome(result)

    def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """The items' rows, in the calling thread."""
        return [try_to_decode(item, inputs, self._settings) for item in items]

    def close(self) -> None:
        """Nothing: whoever holds the model lets go of it."""

    def _call(self, function: ModelFunction) -> Any:
        result = function(self.model)
        if self.model.device.type == "cuda":
            transfer.synchronize_stream(self.model.device)  # threads with other streams may use the result
        return result
