"""A model's host and its workers as the server sees them: started, asked, ended."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from layertap.models.devices.memory import measure_private_bytes
from layertap.models.errors import IN_THE_LOG, LayertapError, LoadError, label_failures
from layertap.models.model_info import ModelInfo
from layertap.models.turns import build_beside, take_turn
from layertap.service.engine.batch import Batch, BatchFailures, BatchResult, SliceResult
from layertap.service.engine.execute.executor import Extend
from layertap.service.engine.execute.processes.channel import LoopChannel, UnsentError, connect
from layertap.service.engine.execute.processes.fork_server import HostProcess, start_host
from layertap.service.engine.execute.processes.messages import (
    BatchDecoded,
    HostOptions,
    StartWorker,
    TakeTurn,
    ToWorker,
    TurnEnded,
    WaitForProcess,
)
from layertap.service.engine.execute.processes.progress import Progress, create_progress
from layertap.service.engine.execute.processes.references import ServerReferences
from layertap.service.types import RestartReason

GRACE_SECONDS = 1.0  # beyond the moment at which nobody waits any more
START_SECONDS = 60.0  # for a copy of a process to say that it is ready, on a machine that does much else
LOAD_SECONDS = 3600.0  # for a host to load its model, which may be downloaded first
MIN_RELOAD_SECONDS = 120.0
RELOAD_FACTOR = 10.0  # loading again may take so many times what it took at first
OnRestart = Callable[[str, RestartReason], None]
SIGNALS: Mapping[int, RestartReason] = {signal.SIGALRM: "decode_timeout", signal.SIGKILL: "killed"}


@dataclass(eq=False)
class WorkerDiedError(Exception):
    """A worker ended, or was ended, before it answered.

    ``taken``: it may have died of the message; else it was dead before. ``timed_out``: it was given all the time that
    there was. ``decoding`` is the number of the item that it decoded then, and ``decode_seconds`` for how long; -1
    where it decoded none. ``failures`` had gone wrong in its batch.
    """

    taken: bool
    timed_out: bool
    decoding: int
    decode_seconds: float
    failures: BatchFailures


def find_reason(status: int | None) -> RestartReason:
    """Why a worker ended that the server has not ended."""
    if status is None:
        return "unknown"
    return SIGNALS.get(-status, "crash") if status < 0 else "exit"


@dataclass(frozen=True)
class StartedWorker:
    """A worker that has just been started: its process's number, the connection to it, and what it tells."""

    pid: int
    connection: socket.socket
    progress: Progress


class ModelHost:
    """The process that has loaded a model, or only decodes for one, and starts workers.

    ``workers`` are those that the event loop asks. The other methods wait for the process: they belong into threads,
    of which any may call them.
    """

    def __init__(self, options: HostOptions, on_restart: OnRestart) -> None:
        """``on_restart`` is called with the model's name and why a worker was replaced."""
        self.on_restart = on_restart
        self.workers: list[WorkerProcess] = []
        self.name = options.spec.name
        self._options = options
        self._lock = threading.Lock()
        self._closed = False
        self._identity: object = None  # of the model as it was loaded first
        self._load_seconds = 0.0  # that this took
        self._descriptor: int | None = None
        self._channel, unused = connect()  # each process has one of its own
        unused.close()
        self._process: HostProcess | None = None

    def load(self) -> ModelInfo | None:
        """Start the process, and wait until it has loaded the model, if it is to.

        LoadError where it can't, or has loaded another model than before; of the kind "killed" where the process was
        killed, does not answer, or could not be started: that may pass.
        """
        with self._lock:
            if self._closed:
                raise LoadError(f"model {self.name} is unloaded")
            self._end()
            try:
                return self._load()
            except BaseException as error:
                self._end()
                if isinstance(error, OSError):  # no descriptor is left in this process
                    raise _refuse(f"no process can be started to load it ({error.strerror})") from error
                raise

    def start_worker(self) -> StartedWorker:
        """Start a worker; LoadError where the host is gone, or has no process for it."""
        if self._closed:
            raise LoadError(f"model {self.name} is unloaded")
        pid: int | None = None
        try:
            channel, connection = connect()
            try:
                with closing(connection):  # else it would not show here that the other end is gone
                    progress, memory = create_progress()
                    try:
                        pid = cast("int | None", self._ask(StartWorker(), (connection.fileno(), memory)))
                    finally:
                        os.close(memory)
                if pid is None:
                    raise OSError("the system allows no more processes")
                channel.receive(START_SECONDS)  # it is ready
                return StartedWorker(pid, channel.connection, progress)
            except BaseException:
                channel.close()
                raise
        except (EOFError, OSError) as error:
            if pid is not None:  # its connection is closed, so that it ends
                self.wait_for_worker(pid)
            raise _refuse(f"no worker of model {self.name} can be started", hint=IN_THE_LOG) from error

    def wait_for_worker(self, pid: int) -> int | None:
        """The exit status of a worker that ends; None where nobody knows."""
        with suppress(EOFError, OSError):
            status: int | None = self._ask(WaitForProcess(pid))
            return status
        return None

    def take_descriptor(self) -> int | None:
        """A descriptor that can be read once the process has ended, from now on the caller's; None where it has."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    def measure_worker_bytes(self) -> int:
        """Memory of the workers that no other process has."""
        return sum(measure_private_bytes(worker.pid) for worker in list(self.workers))

    def close(self, workers: Sequence[int] = ()) -> None:
        """End the process, and with it its workers, those of these numbers before: none is started any more."""
        self._closed = True
        if self._lock.locked() and self._process is not None:  # it loads: nobody waits for that any more
            self._process.kill()
        for pid in workers:  # while there is somebody who waits for them: nobody else would where this is PID 1
            self.wait_for_worker(pid)
        with self._lock:
            self._end()

    def _load(self) -> ModelInfo | None:
        self._channel, connection = connect()
        started = time.monotonic()
        again = self._load_seconds > 0.0
        seconds = max(MIN_RELOAD_SECONDS, RELOAD_FACTOR * self._load_seconds) if again else LOAD_SECONDS
        with closing(connection), label_failures("killed"):
            self._process = start_host(connection, replace(self._options, reload=again))
            if self._closed:  # meanwhile: whoever closed this found no process to end
                raise LoadError(f"model {self.name} is unloaded")
        try:
            answer = self._receive_model(started + seconds)
        except EOFError:
            status, self._process = self._process.end(START_SECONDS), None
            answer = _refuse(f"the process that loads it has ended (status {status})")
            answer.kind = "killed" if status in (None, -signal.SIGKILL) else "other"
        except TimeoutError:
            answer = _refuse(f"the process that loads it took more than {seconds:.0f} s")
        if isinstance(answer, LayertapError):
            raise answer
        identity = _identify(answer)
        if again and self._identity != identity:
            raise LoadError(
                "it is another model than before: its weights have changed, or the graphs of its warm plans"
            )
        self._identity, self._load_seconds = identity, self._load_seconds or time.monotonic() - started
        self._descriptor = os.dup(self._process.descriptor) if self._process is not None else None
        return answer

    def _receive_model(self, deadline: float) -> ModelInfo | LayertapError | None:
        """What the host says when it has loaded the model; before that it asks for turns with other models."""
        with ExitStack() as turn:
            if self._options.pictures is None:
                turn.enter_context(build_beside())  # until it wants to measure
            while True:
                message = self._channel.receive(max(deadline - time.monotonic(), 0.0))
                if not isinstance(message, (TakeTurn, TurnEnded)):
                    answer: ModelInfo | LayertapError | None = message
                    return answer
                turn.close()
                if isinstance(message, TakeTurn):
                    turn.enter_context(take_turn())
                    self._channel.send(None)

    def _ask(self, message: object, descriptors: Sequence[int] = ()) -> Any:
        """The process's answer; it is ended where it is gone or gives none in time: a later one would be mistaken."""
        with self._lock:
            try:
                return self._channel.ask(message, START_SECONDS, descriptors)
            except (EOFError, TimeoutError):
                self._end()
                raise

    def _end(self) -> None:
        self._channel.close()
        if (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)
        if self._process is not None:
            self._process.end()
            self._process = None


def _refuse(detail: str, hint: str = "") -> LoadError:
    """What may pass: a process was killed, does not answer, or could not be started."""
    refusal = LoadError(detail, hint=hint)
    refusal.kind = "killed"
    return refusal


def _identify(info: ModelInfo | None) -> object:
    """What must be the same of a model that is loaded again: its weights, and which of its warm plans have graphs."""
    return info and (info.identity, tuple(each is None for each in info.compiled))


class WorkerProcess:
    """A worker as the event loop asks it, one message at a time.

    ``pid`` is its process's number, and ``progress`` what it tells without a message.
    """

    def __init__(self, started: StartedWorker, on_lost: Callable[[WorkerProcess], None]) -> None:
        """``on_lost`` is called with it when it has died."""
        self.pid = started.pid
        self.progress = started.progress
        self._process: int | None = None  # a descriptor: its number may be another process's by now
        with suppress(ProcessLookupError):  # it has died since: the next message tells
            self._process = os.pidfd_open(self.pid)
        self._references = ServerReferences()
        self._channel = LoopChannel(started.connection, self._references, lambda: on_lost(self))

    @property
    def is_closed(self) -> bool:
        """Whether it was ended."""
        return self._channel.is_closed

    async def ask(self, message: ToWorker, deadline: float, extend: Extend = lambda: None) -> Any:
        """Its answer; WorkerDiedError where it has died, or has not answered at a moment on the monotonic clock.

        ``extend`` gives what joins a batch whose pictures are decoded. UnsentError where it has not got the message,
        and is well. After any other error it may be in the midst of an answer, and is of no use any more.
        """
        taken, results = self.progress.taken, list[SliceResult]()
        if self._references.is_full:  # not between a batch and what joins it: the worker answers for both
            self._references.clear()
        try:
            async with asyncio.timeout_at(_to_loop_time(deadline)) as limit:
                await self._channel.send(message)
                while True:
                    answer = await self._channel.receive()
                    if isinstance(answer, BatchDecoded):
                        more = extend()
                        await self._send_more(more or cast("Batch", message).take(()))
                        if more is not None:
                            deadline = max(deadline, more.deadline + GRACE_SECONDS)
                            limit.reschedule(_to_loop_time(deadline))
                    elif isinstance(answer, BatchResult) and answer.more:
                        results += answer.results
                    else:
                        break
        except (EOFError, TimeoutError) as error:
            decoding, since = self.progress.item, self.progress.since
            raise WorkerDiedError(
                taken=self.progress.taken > taken,
                timed_out=isinstance(error, TimeoutError),
                decoding=decoding,
                decode_seconds=time.monotonic() - since if decoding >= 0 else 0.0,
                failures=self.progress.failures,
            ) from error
        except UnsentError:  # the specs of the message did not reach the worker
            self._references.clear()
            raise
        return replace(answer, results=[*results, *answer.results]) if results else answer

    async def _send_more(self, more: Batch) -> None:
        try:
            await self._channel.send(more)
        except UnsentError as error:  # the worker waits for it
            raise OSError(str(error)) from error

    def close(self) -> None:
        """End the process, whatever it does."""
        self._channel.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = None


def _to_loop_time(deadline: float) -> float | None:
    """A moment on the monotonic clock on the event loop's; None where it never comes."""
    return None if math.isinf(deadline) else asyncio.get_running_loop().time() + deadline - time.monotonic()
