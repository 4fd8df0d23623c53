"""Runs a model in the server's own process, and has its pictures decoded in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from layertap.models.errors import TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.loaded_model import LoadedModel
from layertap.models.multi_device_model import MultiDeviceModel
from layertap.service.engine.execute.executor import InProcessExecutor
from layertap.service.engine.execute.processes.messages import HostOptions
from layertap.service.engine.execute.processes.worker_pool import MAX_DECODE_ITEMS, WorkerPool, choose_worker_bytes
from layertap.service.engine.execute.processes.worker_process import ModelHost, OnRestart
from layertap.service.engine.rows.rows import Attempt, ItemAttempts, decode_on_device, try_to_decode
from layertap.service.inputs.items import ImageItem, LocalItem
from layertap.service.settings import Settings


class DecodingExecutor(InProcessExecutor):
    """For a model that takes pictures, on whatever device. What its GPU decodes is decoded there, as without workers.

    Texts become tokens here: a tokenizer can't be sent to another process.
    """

    max_decode_items = MAX_DECODE_ITEMS

    def __init__(self, model: LoadedModel | MultiDeviceModel, settings: Settings, on_restart: OnRestart) -> None:
        """Start the workers; LoadError where they can't be started. ``on_restart`` as for ``ModelHost``."""
        super().__init__(model, settings)
        pictures = replace(model.model_inputs.pictures, text=None, decoder=None)
        options = HostOptions(model.spec, settings, (), choose_worker_bytes(settings), plans=None, pictures=pictures)
        host = ModelHost(options, on_restart)
        host.load()
        self._workers = WorkerPool(host, settings)
        self._host = host

    @property
    def memory_bytes(self) -> int:
        """The weights and buffers, wherever they are, and what the workers have now."""
        return super().memory_bytes + self._host.measure_worker_bytes()

    def start(self, on_idle: Callable[[], None]) -> None:
        """Start the threads, and begin to ask the workers."""
        super().start(on_idle)
        self._workers.start()

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Pictures on the GPU or in a worker, all else in a thread."""
        own = inputs is self.model.model_inputs
        if own and inputs.decoder is None and all(isinstance(item, ImageItem) for item in items):
            return await self._workers.decode(items)
        decode = partial(self._decode_here, items, inputs, own)
        decoded = await asyncio.get_running_loop().run_in_executor(self._pool, decode)
        return await self._workers.complete(items, decoded)

    async def wait_until_lost(self) -> None:
        """Return once the process that starts workers has ended."""
        await self._workers.wait_until_lost()

    async def restart(self) -> None:
        """Start the workers again; LoadError."""
        await self._workers.restart()

    async def close(self) -> None:
        """End the threads and the workers."""
        await super().close()
        await self._workers.close()

    def _decode_here(
        self, items: Sequence[LocalItem], inputs: ModelInputs, own: bool
    ) -> list[Sequence[Attempt] | None]:
        """What is made of items in this process; None for each that a worker is to decode."""
        return [
            self._decode_on_device(item, inputs)
            if own and isinstance(item, ImageItem)
            else try_to_decode(item, inputs, self._settings)
            for item in items
        ]

    def _decode_on_device(self, item: ImageItem, inputs: ModelInputs) -> Sequence[Attempt] | None:
        try:
            row = decode_on_device(item, inputs, self._settings)
        except TooLargeError as error:
            return [error]
        return None if row is None else [{inputs.pictures.specs[0].name: row}]
