"""A decoder in worker processes: an item that crashes, hangs or exhausts the memory of its worker is refused alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

from layertap.models.errors import InputError, LayertapError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.service.engine.execute.decode import decode_on_device, no_memory_error, try_to_decode
from layertap.service.engine.execute.executor import Decoder
from layertap.service.engine.execute.processes.worker_pool import WorkerPool
from layertap.service.engine.execute.processes.worker_process import RETRY_SECONDS, WorkerDiedError, killed_error
from layertap.service.engine.rows import Attempt, ItemAttempts
from layertap.service.errors import UnavailableError
from layertap.service.inputs.items import EncodedItem, LocalItem
from layertap.service.settings import Settings

MAX_DECODE_ITEMS = 8  # of a request in one message


class WorkerDecoder(Decoder):
    """Decodes items of some ``kinds`` in workers, unless a GPU decodes them; the rest in threads.

    ``known``: the inputs that the workers know; items of others are decoded here.
    """

    max_items = MAX_DECODE_ITEMS

    def __init__(
        self, workers: WorkerPool, settings: Settings, threads: int, known: ModelInputs, kinds: tuple[type, ...]
    ) -> None:
        super().__init__(settings, threads)
        self.workers: WorkerPool = workers
        self._known = known
        self._kinds = kinds

    def find_workers(self, items: Sequence[LocalItem], inputs: ModelInputs) -> Mapping[str, int] | None:
        """The workers, unless this process decodes all of the items, or all pictures on a GPU."""
        is_for_workers = inputs is self._known and inputs.decoder is None
        return self.workers.idle if is_for_workers and any(isinstance(item, self._kinds) for item in items) else None

    async def decode(self, items: Sequence[LocalItem], inputs: ModelInputs) -> ItemAttempts:
        """Decode items; one that kills workers is refused. Raises as ``Decoder.decode``."""
        for_workers = [inputs is self._known and isinstance(item, self._kinds) for item in items]

        def decode_here() -> list[Sequence[Attempt] | None]:
            return [self._decode_here(*each, inputs) for each in zip(items, for_workers, strict=True)]

        decoded: list[Sequence[Attempt] | None] = [None] * len(items)
        if inputs.decoder is not None or not all(for_workers):
            decoded = await asyncio.get_running_loop().run_in_executor(self.pool, decode_here)
        missing = [item for item, attempts in zip(items, decoded, strict=True) if attempts is None]
        more = iter(await self._decode(missing) if missing else ())
        return [next(more) if attempts is None else attempts for attempts in decoded]

    def refuse(self, error: WorkerDiedError) -> LayertapError:
        """The refusal of an item that killed a worker."""
        if self.is_out_of_time(error):
            limit = self._settings.decode_timeout_s
            return InputError(f"this input takes longer than {limit:g} s to decode", hint="send a smaller one")
        if error.cause == "memory":
            return no_memory_error()
        return InputError("this input ends the process that decodes it", hint="send it in another format")

    def is_out_of_time(self, error: WorkerDiedError) -> bool:
        """Whether a worker died because its item takes too long to decode, as it would in another worker."""
        return error.decode_seconds >= self._settings.decode_timeout_s

    def _decode_here(self, item: LocalItem, for_workers: bool, inputs: ModelInputs) -> Sequence[Attempt] | None:
        """The rows or error of an item that this process decodes; None if a worker decodes it."""
        if not for_workers:
            return try_to_decode(item, inputs, self._settings)
        try:
            row = decode_on_device(item, inputs, self._settings) if isinstance(item, EncodedItem) else None
        except TooLargeError as error:
            return [error]
        return None if row is None else [{inputs.pictures.specs[0].name: row}]

    async def _decode(self, items: Sequence[LocalItem], deaths: int = 0) -> ItemAttempts:
        """Decode items in a worker; an item that kills it is refused, at last, after ``deaths`` of others.

        Once a worker has died, the other items have no attempts: retry each of them alone. ModelLostError,
        UnavailableError.
        """
        try:
            seconds = len(items) * self._settings.decode_timeout_s
            return cast("ItemAttempts", await self.workers.ask(("decode", items), seconds))
        except WorkerDiedError as error:
            attempts: ItemAttempts = [[] for _ in items]
            blamed = error.decoding if len(items) > 1 else 0
            if blamed < 0:
                return attempts
            if error.may_retry(deaths) and not self.is_out_of_time(error):
                (attempts[blamed],) = await self._decode([items[blamed]], deaths + 1)
            elif error.cause == "killed":
                raise killed_error() from error
            elif error.taken:
                attempts[blamed] = [self.refuse(error)]
            else:
                raise UnavailableError("no worker takes this input", retry_after=RETRY_SECONDS) from error
            return attempts
