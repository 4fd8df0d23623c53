"""The event loop's end of a worker."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from layertap.service.engine.execute.processes.channel import LARGE_BYTES, pack, share
from layertap.service.engine.execute.processes.model_host import StartedWorker
from layertap.service.engine.execute.processes.wire import SentSpecs, ToWorker
from layertap.service.errors import UnavailableError
from layertap.service.types import RestartReason

RETRY_SECONDS = 5.0
Settle = Callable[[Any], None]  # takes an answer, or the error why there is none
Follow = Callable[[str, Any], Any]  # takes what a worker sends before its answer; returns the reply to "decoded"
OnFree = Callable[["WorkerProcess", bool, RestartReason | None], None]


class ModelLostError(Exception):
    """The process that was asked had ended before: ask again once the model is loaded, or another worker."""


@dataclass(eq=False)
class WorkerDiedError(Exception):
    """A worker ended, or was killed, before it answered.

    ``taken``: it may have died because of the message, which it has read. ``timed_out``: it exceeded its time limit.
    ``decoding``: the number of the item that it was decoding, and ``decode_seconds`` for how long; -1 if it was
    decoding none.
    """

    taken: bool
    timed_out: bool
    decoding: int
    decode_seconds: float


class WorkerProcess:
    """A worker, which answers one message at a time.

    ``pid``: its process; ``progress``: its shared state; ``specs``: those it knows. ``deadline``: of its message, on
    the clock of ``time.monotonic``; infinite if it has none. ``is_closed``: whether it was ended.
    """

    def __init__(self, started: StartedWorker, on_free: OnFree) -> None:
        """``on_free`` is called before it settles a message, and when it dies: whether it has ended, and why if known.

        OSError if this process is out of descriptors.
        """
        self.pid = started.pid
        self.progress = started.progress
        self.specs = SentSpecs()
        self.deadline = math.inf
        self.is_closed = False
        self._on_free = on_free
        self._settle: Settle | None = None  # of the message that it has
        self._follow: Follow | None = None
        self._taken = 0  # messages, before that one
        self._is_sent = True
        self._process: int | None = None  # a pidfd: the pid may be another process's by now
        with suppress(ProcessLookupError):  # it has died already: the connection shows it
            self._process = os.pidfd_open(self.pid)
        self._channel = started.channel
        self._channel.connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.connection, self._read)

    def ask(self, message: ToWorker, settle: Settle, deadline: float, follow: Follow | None = None) -> None:
        """Send a message; ``settle`` is called once, with the answer or an error.

        WorkerDiedError if the worker dies, or is ended; ModelLostError if it was dead before, or the host has ended;
        UnavailableError if the message can't be sent, or the answer can't be received.
        """
        self._settle, self._follow, self.deadline = settle, follow, deadline
        self._taken, self._is_sent = self.progress.taken, False
        self._send(message)

    def expire(self) -> None:
        """End it: its message has missed the deadline."""
        self._finish(self._describe_death(timed_out=True), ended=True, reason="timeout")

    def close(self, error: Exception | None = None) -> None:
        """Kill the process; the message that it has, if any, gets the error."""
        if not self.is_closed:
            self.is_closed = True
            self._loop.remove_reader(self._channel.connection)
            self._loop.remove_writer(self._channel.connection)
            self._channel.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = None
        if error is not None:
            self._settle_with(error)

    def _send(self, message: object) -> None:
        """Send a message now, or once its large buffers are copied."""
        try:
            data, buffers = pack(message)
            if sum(map(len, buffers)) > LARGE_BYTES:
                sharing = self._loop.run_in_executor(None, share, buffers)
                sharing.add_done_callback(partial(self._write_shared, data))
            else:
                self._write(data, share(buffers) if buffers else None)
        except Exception as error:
            self._fail(error)

    def _write_shared(self, data: memoryview, sharing: asyncio.Future[int]) -> None:
        try:
            memory = sharing.result()
            if self.is_closed:
                os.close(memory)
                self._settle_with(ModelLostError())
            else:
                self._write(data, memory)
        except Exception as error:
            self._fail(error)

    def _write(self, data: memoryview, memory: int | None) -> None:
        self._is_sent = True
        if not self._channel.write(data, memory):  # the socket is full; most messages are smaller than it
            self._loop.add_writer(self._channel.connection, self._write_more)

    def _write_more(self) -> None:
        try:
            if self._channel.flush():
                self._loop.remove_writer(self._channel.connection)
        except Exception as error:
            self._fail(error)

    def _read(self) -> None:
        """Take what has arrived; called by the loop."""
        try:
            for kind, answer in self._channel.read():
                if kind == "answer":
                    self._finish(answer)
                elif kind == "end":
                    self._finish(answer, ended=True, reason="failure")
                elif self._follow is not None:
                    reply = self._follow(kind, answer)
                    if kind == "decoded":
                        self._send(reply)
        except BlockingIOError:
            pass
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The worker has died, or can't be asked: its message was not sent, or its answer is lost."""
        if isinstance(error, EOFError):
            self._finish(self._describe_death(), ended=True)
            return
        detail = "an answer could not be received"
        if not self._is_sent:
            self.specs.clear()  # the message's did not reach the worker
            reason = error.strerror if isinstance(error, OSError) else "no memory"
            detail = f"nothing can be passed to a worker ({reason})"
        if isinstance(error, (OSError, MemoryError)):
            refusal: Exception = UnavailableError(detail, retry_after=RETRY_SECONDS)
            refusal.__cause__ = error
        else:
            refusal = error
        self._finish(refusal, ended=self._is_sent, reason="failure")

    def _describe_death(self, *, timed_out: bool = False) -> WorkerDiedError | ModelLostError:
        taken, decoding, since = self.progress.taken > self._taken, self.progress.item, self.progress.since
        if not (taken or timed_out):
            return ModelLostError()
        return WorkerDiedError(taken, timed_out, decoding, time.monotonic() - since if decoding >= 0 else 0.0)

    def _finish(self, outcome: Any, *, ended: bool = False, reason: RestartReason | None = None) -> None:
        self.deadline = math.inf
        self._on_free(self, ended, reason)
        self._settle_with(outcome)

    def _settle_with(self, outcome: Any) -> None:
        settle, self._settle, self._follow = self._settle, None, None
        if settle is not None:
            settle(outcome)
