"""Runs a model on several devices: each has replicas of its own, whose threads take batches from one queue."""

from __future__ import annotations

from collections.abc import Sequence

from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.model_info import ModelInfo
from layertap.service.engine.execute.executor import CallOutcome, Executor, Extend, ModelFunction
from layertap.service.engine.execute.forward_batch import BatchOutcome, ForwardBatch
from layertap.service.engine.rows.rows import ItemAttempts
from layertap.service.inputs.items import LocalItem


class MultiDeviceExecutor:
    """An executor for each device; the first one decodes, and is asked what is asked of the model."""

    def __init__(self, model: ModelInfo, executors: Sequence[Executor]) -> None:
        self.model = model
        self._executors = tuple(executors)
        # What a replica is called here: whose it is, and its number there.
        self._places = [(executor, number) for executor in executors for number in range(executor.replicas)]
        self.replicas = len(self._places)
        self.devices = tuple(device for executor in executors for device in executor.devices)
        self.decodes_batches = False
        self.max_decode_items = executors[0].max_decode_items

    @property
    def memory_bytes(self) -> int:
        """What the model takes on all devices."""
        return sum(executor.memory_bytes for executor in self._executors)

    def start_thread(self, replica: int) -> None:
        """Prepare a thread that will use a replica."""
        executor, number = self._places[replica]
        executor.start_thread(number)

    def run_batch(self, replica: int, batch: ForwardBatch, extend: Extend) -> BatchOutcome:
        """The batch on the device of its replica."""
        executor, number = self._places[replica]
        return executor.run_batch(number, batch, extend)

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Nothing: no batch grows here."""

    def call(self, function: ModelFunction) -> CallOutcome:
        """The function, on the first device."""
        return self._executors[0].call(function)

    def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """The items' rows, as the first device's executor makes them."""
        return self._executors[0].decode(items, inputs)

    def close(self) -> None:
        """Let go of the model on all devices."""
        for executor in self._executors:
            executor.close()
