"""Workers of one model as threads of the server use them: any that is idle does what comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import LifoQueue
from typing import cast

import torch

from layertap.models.devices import memory
from layertap.models.errors import InputError, LoadError
from layertap.service.engine.execute.processes.channel import LargeBytes
from layertap.service.engine.execute.processes.messages import DecodedItems, DecodeItems, FromWorker, ToWorker
from layertap.service.engine.execute.processes.worker_process import ModelHost, WorkerDiedError, WorkerProcess
from layertap.service.engine.rows.rows import Attempt, ItemAttempts
from layertap.service.errors import UnavailableError
from layertap.service.inputs.items import ImageItem, LocalItem
from layertap.service.settings import MIN_WORKER_MEMORY_BYTES, Settings

MEMORY_SHARE = 0.5  # of what is free when a model is loaded: what its workers may take, each its part
GRACE_SECONDS = 1.0  # beyond the moment at which nobody waits any more
MAX_DECODE_ITEMS = 8  # of a request in one message
TRIES = 2  # a worker may die of something else
SEND_TRIES = 3
RETRY_SECONDS = 5.0


def choose_worker_bytes(settings: Settings) -> int:
    """How much memory each worker of a model that is loaded now may take."""
    if settings.worker_memory_bytes is not None:
        return settings.worker_memory_bytes
    free = memory.measure_available_bytes(torch.device("cpu"))
    return max(int(free * MEMORY_SHARE / settings.workers), MIN_WORKER_MEMORY_BYTES)


class WorkerPool:
    """As many workers as the settings say."""

    def __init__(self, host: ModelHost, settings: Settings) -> None:
        """Start them; LoadError where they can't be started."""
        self._host = host
        self._decode_seconds = settings.decode_timeout_s
        self._idle: LifoQueue[WorkerProcess] = LifoQueue()  # the one whose memory was used last comes first
        try:
            workers = host.start_workers(settings.workers)
        except BaseException:
            host.close()
            raise
        for worker in workers:
            self._idle.put(worker)

    @contextmanager
    def borrow(self) -> Iterator[WorkerProcess]:
        """A worker for the calling thread alone, waited for until one is idle."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def decode(self, items: Sequence[LocalItem], tries: int = TRIES) -> ItemAttempts:
        """What a worker makes of items; UnavailableError where there is none.

        One that so many die of is refused. Of the others there is nothing then: they are to be asked for alone.
        """
        message = DecodeItems([LargeBytes(each.data) if isinstance(each, ImageItem) else each for each in items])
        try:
            with self.borrow() as worker:
                answer = ask(worker, message, len(items) * self._decode_seconds + GRACE_SECONDS)
                return cast("DecodedItems", answer).attempts
        except LoadError as error:
            raise make_unavailable(error) from error
        except WorkerDiedError as error:
            attempts: ItemAttempts = [[] for _ in items]
            blamed = error.decoding if len(items) > 1 else 0
            if blamed >= 0:
                attempts[blamed] = self._decode_again(items[blamed], error, tries - 1)
            return attempts

    def _decode_again(self, item: LocalItem, error: WorkerDiedError, tries: int) -> Sequence[Attempt]:
        if tries and not self.is_out_of_time(error):
            return self.decode([item], tries)[0]
        return [self.make_refusal(error)]

    def complete(self, items: Sequence[LocalItem], decoded: Sequence[Sequence[Attempt] | None]) -> ItemAttempts:
        """What is made of items, those among it of which there is None by a worker."""
        missing = [item for item, attempts in zip(items, decoded, strict=True) if attempts is None]
        more = iter(self.decode(missing) if missing else ())
        return [next(more) if attempts is None else attempts for attempts in decoded]

    def make_refusal(self, error: WorkerDiedError) -> InputError:
        """Why an item that a worker died of is refused."""
        if self.is_out_of_time(error):
            limit = self._decode_seconds
            return InputError(f"this input takes longer than {limit:g} s to decode", hint="send a smaller one")
        return InputError("this input ends the process that decodes it", hint="send it in another format")

    def is_out_of_time(self, error: WorkerDiedError) -> bool:
        """Whether a worker died because it decoded too long, and another would."""
        return error.decode_seconds >= self._decode_seconds

    def close(self) -> None:
        """End all processes."""
        self._host.close()


def ask(worker: WorkerProcess, message: ToWorker | Callable[[], ToWorker], timeout: float | None) -> FromWorker:
    """A worker's answer; one that was dead before it had the message is replaced, and asked again."""
    for _ in range(SEND_TRIES):
        try:
            return worker.ask(message() if callable(message) else message, timeout)
        except WorkerDiedError as error:
            if error.taken or error.timed_out:
                raise
    raise LoadError("workers end before they are asked")


def make_unavailable(error: LoadError) -> UnavailableError:
    """What to tell whoever asks while no worker can be started; the next request tries again."""
    return UnavailableError(error.detail, hint=error.hint, retry_after=RETRY_SECONDS)
