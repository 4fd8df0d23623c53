"""Runs a model in the server's own process, and has its pictures decoded in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layertap.models.errors import TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.loaded_model import LoadedModel
from layertap.service.engine.execute.executor import InProcessExecutor
from layertap.service.engine.execute.processes.messages import HostOptions
from layertap.service.engine.execute.processes.worker_pool import MAX_DECODE_ITEMS, WorkerPool, choose_worker_bytes
from layertap.service.engine.execute.processes.worker_process import ModelHost, OnRestart
from layertap.service.engine.rows.rows import Attempt, ItemAttempts, decode_on_device
from layertap.service.inputs.items import ImageItem, LocalItem
from layertap.service.settings import Settings


class DecodingExecutor(InProcessExecutor):
    """For a model that takes pictures, on whatever device. What its GPU decodes is decoded there, as without workers.

    Texts are made into tokens here: a tokenizer can't be sent to another process.
    """

    def __init__(
        self, model: LoadedModel, settings: Settings, on_restart: OnRestart, device: str | None = None
    ) -> None:
        """Start the workers; LoadError where they can't be started. ``on_restart`` as for ``ModelHost``."""
        super().__init__(model, settings, device)
        pictures = replace(model.model_inputs.pictures, text=None, decoder=None)
        options = HostOptions(model.spec, settings, (), choose_worker_bytes(settings), plans=None, pictures=pictures)
        host = ModelHost(options, on_restart)
        host.load()
        self.max_decode_items = MAX_DECODE_ITEMS
        self._pool = WorkerPool(host, settings)
        self._host = host

    @property
    def memory_bytes(self) -> int:
        """The weights and buffers, wherever they are, and what the workers have now."""
        return super().memory_bytes + self._host.measure_worker_bytes()

    def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Pictures on the GPU or in a worker, all else in the calling thread."""
        return self._pool.complete(items, [self._decode_here(item, inputs) for item in items])

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _decode_here(self, item: LocalItem, inputs: ModelInputs) -> Sequence[Attempt] | None:
        """What is made of an item in this process; None where a worker is to decode it."""
        if not isinstance(item, ImageItem) or inputs is not self.model.model_inputs:
            return super().decode([item], inputs)[0]
        try:
            row = decode_on_device(item, inputs, self._settings)
        except TooLargeError as error:
            return [error]
        return None if row is None else [{inputs.pictures.specs[0].name: row}]
