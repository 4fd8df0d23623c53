"""The event loop's end of a worker."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from layertap.service.engine.execute.processes.channel import MAX_PACKET_BYTES, Channel, pack, share
from layertap.service.engine.execute.processes.forking import Cause
from layertap.service.engine.execute.processes.progress import Progress
from layertap.service.engine.execute.processes.wire import SentSpecs, ToWorker
from layertap.service.errors import UnavailableError
from layertap.service.types import RestartReason

RETRY_SECONDS = 5.0
GRACE_SECONDS = 1.0  # after the deadline
KILLED_RETRIES = 4  # how often a message is sent again, alone, whose workers are killed from outside
Ended = RestartReason | Literal[""]  # why a worker has ended, if it has; "unknown" if it was not the server
OnFree = Callable[["WorkerProcess", Ended, "PendingMessage | None", Any], None]


class ModelLostError(Exception):
    """The process that was asked had ended before: ask again once the model is loaded, or another worker."""


@dataclass(eq=False)
class WorkerDiedError(Exception):
    """A worker ended, or was killed, before it answered.

    ``cause``: why; "timeout" if the server ended it. ``taken``: it had read the message. ``decoding``: the number of
    the item that it was decoding, and ``decode_seconds`` for how long; -1 if it was decoding none.
    """

    cause: Cause | Literal["timeout"]
    taken: bool
    decoding: int
    decode_seconds: float

    def may_retry(self, deaths: int) -> bool:
        """Whether to send the message again, alone, if ``deaths`` workers had died of it before this one."""
        return deaths < (KILLED_RETRIES if self.cause == "killed" else 1)


def killed_error() -> UnavailableError:
    """The error for a message whose workers were killed from outside, again and again."""
    detail = f"the process that computes the answer was killed {1 + KILLED_RETRIES} times"
    return UnavailableError(detail, hint="something outside of the server kills it", retry_after=RETRY_SECONDS)


class PendingMessage:
    """A message to a worker, which has so many ``seconds`` to answer, and its outcome.

    ``result``: the answer, or the error why there is none: WorkerDiedError if the worker dies, or is ended;
    ModelLostError if it was dead before, or the host has ended; UnavailableError if the message can't be sent, or the
    answer can't be received. ``deadline``: once it is sent, when the worker is ended, on the clock of
    ``time.monotonic``.
    """

    deadline = math.inf

    def __init__(self, message: ToWorker, seconds: float) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._message = message
        self._seconds = seconds

    def pack(self, specs: SentSpecs) -> ToWorker:
        """The message, for a worker that knows these specs, which gets it now."""
        del specs
        self.deadline = time.monotonic() + self._seconds
        return self._message

    def follow(self, kind: str, answer: Any) -> Any:
        """Take what the worker sends before its answer; returns the reply to "decoded"."""
        raise NotImplementedError

    def settle(self, outcome: Any) -> None:
        """Set the result to the worker's answer, or to an error."""
        if self.result.done():  # its caller has gone
            return
        if isinstance(outcome, Exception):
            self.result.set_exception(outcome)
        else:
            self.result.set_result(outcome)


class WorkerProcess:
    """A worker, which answers one message at a time. For the event loop only, except its creation.

    ``pid``: its process; ``channel``: the connection to it; ``progress``: its shared state.
    """

    def __init__(self, pid: int, channel: Channel, progress: Progress) -> None:
        self.pid = pid
        self.channel = channel
        self.progress = progress
        self._specs = SentSpecs()
        self._pending: PendingMessage | None = None
        self._taken = 0  # messages, before that one

    def start(self, on_free: OnFree) -> None:
        """Begin to take messages; ``on_free`` is called with each answered one, and when the process ends.

        It gets why the process has ended, or "", and the message, if any, which it settles, with its outcome.
        """
        self._on_free = on_free
        self._loop = asyncio.get_running_loop()
        self.channel.connection.setblocking(False)
        self._loop.add_reader(self.channel.connection, self._read)

    def ask(self, pending: PendingMessage) -> None:
        """Send a message; it is settled once, even if it can't be sent."""
        self._pending, self._taken = pending, self.progress.taken
        try:
            self._send(pending.pack(self._specs))
        except Exception as error:
            self._fail(error)

    def expire(self) -> None:
        """End it if its message has missed the deadline."""
        if self._pending is not None and self._pending.deadline + GRACE_SECONDS <= time.monotonic():
            self._finish(self._describe_death("timeout"), "timeout")

    def close(self) -> None:
        """Hang up on the process; the message that it has, if any, gets a ModelLostError."""
        self._loop.remove_reader(self.channel.connection)
        self.channel.close()
        if self._pending is not None:
            self._pending.settle(ModelLostError())
            self._pending = None

    def _send(self, message: object) -> None:
        """Send a message: now, or once it is copied into shared memory."""
        parts, size = pack(message, self._specs.reducers)
        if size <= MAX_PACKET_BYTES:
            self.channel.write(parts)
        else:
            self._loop.run_in_executor(None, share, parts).add_done_callback(self._send_memory)

    def _send_memory(self, sharing: asyncio.Future[int]) -> None:
        try:
            self.channel.write_memory(sharing.result())
        except Exception as error:
            self._fail(error)

    def _read(self) -> None:
        """Take what has arrived; called by the loop."""
        try:
            (kind, answer), _ = self.channel.read()
            if kind in ("answer", "end"):
                self._finish(answer, "" if kind == "answer" else "failure")
            elif self._pending is not None:
                reply = self._pending.follow(kind, answer)
                if kind == "decoded":
                    self._send(reply)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The worker has died, or can't be asked: its message was not sent, or its answer is lost."""
        taken = self.progress.taken > self._taken
        if isinstance(error, EOFError):
            self._finish(self._describe_death("crash"), "unknown")
            return
        detail = "an answer could not be received"
        if not taken:
            self._specs.clear()  # the message's did not reach the worker
            reason = error.strerror if isinstance(error, OSError) else "no memory"
            detail = f"nothing can be passed to a worker ({reason})"
        if isinstance(error, (OSError, MemoryError)):
            refusal: Exception = UnavailableError(detail, retry_after=RETRY_SECONDS)
            refusal.__cause__ = error
        else:
            refusal = error
        self._finish(refusal, "failure" if taken else "")

    def _describe_death(self, cause: Cause | Literal["timeout"]) -> WorkerDiedError | ModelLostError:
        taken, decoding, since = self.progress.taken > self._taken, self.progress.item, self.progress.since
        if not taken and cause != "timeout":
            return ModelLostError()
        return WorkerDiedError(cause, taken, decoding, time.monotonic() - since if decoding >= 0 else 0.0)

    def _finish(self, outcome: Any, ended: Ended) -> None:
        """Be free for the next message, or be replaced."""
        pending, self._pending = self._pending, None
        unasked: Ended = "" if pending is not None else "failure"  # an answer without a question
        self._on_free(self, ended or unasked, pending, outcome)
