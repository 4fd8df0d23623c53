"""A model's host and its workers as the server sees them: started, asked, replaced where they die."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

from layertap.models.devices.memory import measure_private_bytes
from layertap.models.errors import IN_THE_LOG, LayertapError, LoadError
from layertap.models.model_info import ModelInfo
from layertap.models.turns import build_beside, take_turn
from layertap.service.engine.execute.processes.channel import Channel, connect
from layertap.service.engine.execute.processes.host_process import HostProcess, start_host
from layertap.service.engine.execute.processes.messages import (
    ExtendBatch,
    FromWorker,
    Hello,
    HostOptions,
    ProcessEnded,
    ProcessStarted,
    StartWorker,
    TakeTurn,
    ToWorker,
    TurnEnded,
    TurnTaken,
    WaitForProcess,
)
from layertap.service.engine.execute.processes.progress import Progress, create_progress
from layertap.service.engine.execute.processes.sent_batch import SpecTable
from layertap.service.types import RestartReason

START_TRIES = 3
START_SECONDS = 60.0  # for a copy of a process to say that it is ready, on a machine that does much else
OnRestart = Callable[[str, RestartReason], None]
SIGNALS: Mapping[int, RestartReason] = {signal.SIGALRM: "decode_timeout", signal.SIGKILL: "killed"}
log = logging.getLogger("layertap")


class WorkerDiedError(Exception):
    """A worker ended, or was ended, before it answered.

    ``taken``: it may have died of the message; else it was dead before. ``timed_out``: it was given all the time that
    there was. ``decoding`` is the number of the item that it decoded then, and ``decode_seconds`` for how long; -1
    where it decoded none.
    """

    def __init__(self, *, taken: bool, timed_out: bool, decoding: int, decode_seconds: float) -> None:
        super().__init__("a worker died")
        self.taken = taken
        self.timed_out = timed_out
        self.decoding = decoding
        self.decode_seconds = decode_seconds


def find_reason(status: int | None) -> RestartReason:
    """Why a worker ended that nobody of ours has ended."""
    if status is None:
        return "unknown"
    return SIGNALS.get(-status, "crash") if status < 0 else "exit"


class ModelHost:
    """The process that has loaded a model, or only decodes for one, and starts workers; any thread may use it.

    ``workers`` are those that have been started; ``rows_wait`` is what ``note_waiting_rows`` said last.
    """

    def __init__(self, options: HostOptions, on_restart: OnRestart) -> None:
        """``on_restart`` is told the model's name, and why a worker was replaced, in any thread."""
        self.on_restart = on_restart
        self.workers: Sequence[WorkerProcess] = ()
        self.rows_wait = False
        self.name = options.spec.name
        self._options = options
        self._lock = threading.Lock()
        self._closed = False
        self._identity: object = None  # of the model as it was loaded first
        self._channel: Channel
        self._process: HostProcess | None = None

    def load(self) -> ModelInfo | Hello:
        """Start the process, and wait until it has loaded the model, if it is to; LoadError where it can't."""
        with self._lock:
            return self._load()

    def start_worker(self) -> tuple[int, Channel, Progress]:
        """Start a worker: its process's number, the connection to it, and what it decodes.

        Where the host died, it is loaded anew first; LoadError where that fails.
        """
        for _ in range(START_TRIES):
            progress, memory = create_progress()
            try:
                pid, channel = self._copy_host(memory)
            finally:
                os.close(memory)
            try:
                channel.receive(START_SECONDS)  # it is ready
            except (EOFError, OSError):
                channel.close()
                continue
            return pid, channel, progress
        raise LoadError(f"workers of model {self.name} end before they are ready", hint=IN_THE_LOG)

    def start_workers(self, count: int) -> list[WorkerProcess]:
        """Start so many workers; LoadError where they can't be started."""
        self.workers = [WorkerProcess(self) for _ in range(count)]
        return self.workers

    def wait_for_worker(self, pid: int) -> int | None:
        """The exit status of a worker that ends; None where nobody knows."""
        with self._lock:
            try:
                self._channel.send(WaitForProcess(pid), timeout=START_SECONDS)
                ended: ProcessEnded = self._channel.receive(START_SECONDS)
            except (EOFError, OSError):
                self._channel.close()  # what it answers later would be taken for another answer
                return None
        return ended.status

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Let the workers know whether rows of their model are in no batch yet."""
        if rows_wait != self.rows_wait:
            self.rows_wait = rows_wait
            for worker in self.workers:
                worker.note_waiting_rows(rows_wait)

    def measure_worker_bytes(self) -> int:
        """Memory of the workers that no other process has."""
        return sum(measure_private_bytes(worker.pid) for worker in self.workers)

    def close(self) -> None:
        """End the process, and with it its workers; none is started any more."""
        with self._lock:
            self._closed = True
        for worker in self.workers:  # while there is somebody who waits for them: nobody else would where this is PID 1
            worker.close()
            self.wait_for_worker(worker.pid)
            worker.forget()
        with self._lock:
            self._end()

    def _load(self) -> ModelInfo | Hello:
        self._channel, connection = connect()
        with closing(connection):
            try:
                self._process = start_host(connection, replace(self._options, reload=self._identity is not None))
            except LoadError:
                self._channel.close()
                raise
        try:
            answer = self._receive_model()
        except EOFError:
            status, self._process = self._process.end(START_SECONDS), None
            answer = LoadError(f"the process that loads it has ended (status {status})")
            answer.kind = "other"
        if isinstance(answer, LayertapError):
            self._end()
            raise answer
        info: ModelInfo | Hello = answer
        identity = _identify(info)
        if self._identity not in (None, identity):
            self._end()
            raise LoadError(
                "it is another model than before: its weights have changed, or the graphs of its warm plans",
                hint="unload it, then load it again",
            )
        self._identity = identity
        return info

    def _receive_model(self) -> ModelInfo | Hello | LayertapError:
        """What the host says when it has loaded the model; before that it asks for turns with other models."""
        with ExitStack() as turn:
            if self._options.pictures is None:
                turn.enter_context(build_beside())  # until it wants to measure
            while isinstance(message := self._channel.receive(), (TakeTurn, TurnEnded)):
                turn.close()
                if isinstance(message, TakeTurn):
                    turn.enter_context(take_turn())
                    self._channel.send(TurnTaken())
            answer: ModelInfo | Hello | LayertapError = message
            return answer

    def _copy_host(self, memory: int) -> tuple[int, Channel]:
        channel, connection = connect()
        try:
            with self._lock, closing(connection):
                return self._ask_for_copy(connection.fileno(), memory), channel
        except BaseException:
            channel.close()
            raise

    def _ask_for_copy(self, *descriptors: int) -> int:
        """The number of a new copy's process; the host is started anew where it died."""
        if self._closed:
            raise LoadError(f"model {self.name} is unloaded")
        try:
            return self._send_request(descriptors)
        except (EOFError, TimeoutError):
            log.warning("a model's process died, and is started anew", extra={"fields": {"model": self.name}})
            self._end()
            self._load()
            return self._send_request(descriptors)

    def _send_request(self, descriptors: Sequence[int]) -> int:
        self._channel.send(StartWorker(), descriptors)
        started: ProcessStarted = self._channel.receive(START_SECONDS)
        return started.pid

    def _end(self) -> None:
        self._channel.close()
        if self._process is not None:
            self._process.end()
            self._process = None


def _identify(info: ModelInfo | Hello) -> object:
    """What must be the same of a model that is loaded anew: its weights, and which of its warm plans have graphs."""
    return None if isinstance(info, Hello) else (info.identity, tuple(each is None for each in info.compiled))


class WorkerProcess:
    """A worker, or the one that took its place; a thread at a time may ask it.

    ``pid`` is its number, ``specs`` are those that it knows, ``hooks`` those of ours that were on its model when it
    answered last.
    """

    def __init__(self, host: ModelHost) -> None:
        self.hooks = 0
        self._host = host
        self._process: int | None = None  # a descriptor: its number may be another process's by now
        self._channel: Channel
        self._progress: Progress
        self._start()

    def ask(self, message: ToWorker, timeout: float | None = None) -> FromWorker:
        """Its answer; WorkerDiedError where it dies, or is killed for it has not answered after so many seconds.

        Another one has taken its place then; LoadError where there is none.
        """
        taken = isinstance(message, ExtendBatch)  # what it belongs to is
        started = time.monotonic()
        try:
            self._channel.send(message, timeout=timeout)
            taken = True
            left = None if timeout is None else timeout - (time.monotonic() - started)
            answer: FromWorker = self._channel.receive(left)
        except (EOFError, TimeoutError) as error:
            decoding, since = self._progress.item
            seconds = time.monotonic() - since if decoding >= 0 else 0.0
            timed_out = isinstance(error, TimeoutError)
            self.replace("timeout" if timed_out else None)
            raise WorkerDiedError(
                taken=taken, timed_out=timed_out, decoding=decoding, decode_seconds=seconds
            ) from error
        except OSError as error:  # of this process; the worker is well
            self.specs = SpecTable()  # of those that the message had it may know none
            if isinstance(message, ExtendBatch):
                self.replace("failure")  # it would wait for ever
            raise LoadError(f"nothing can be passed to a worker ({error.strerror})") from error
        return answer

    def note_waiting_rows(self, rows_wait: bool) -> None:
        """Let it know whether rows are in no batch yet: else it need not ask what joins its own. Any thread may."""
        self._progress.rows_wait = rows_wait

    def replace(self, reason: RestartReason | None = None) -> None:
        """End the process and start another one; LoadError where that can't be done. None: it has ended by itself."""
        self.close()
        status = self._host.wait_for_worker(self.pid)
        reason = reason or find_reason(status)
        fields = {"model": self._host.name, "pid": self.pid, "reason": reason, "status": status}
        log.warning("a worker is replaced", extra={"fields": fields})
        self._host.on_restart(self._host.name, reason)
        self._start()

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = None

    def forget(self) -> None:
        """Let go of what the process decoded, once it has ended for good."""
        self._progress.close()

    def _start(self) -> None:
        self.specs = SpecTable()
        try:
            self.pid, self._channel, self._progress = self._host.start_worker()
            self.note_waiting_rows(self._host.rows_wait)
            with suppress(ProcessLookupError):  # it has died since: the next message tells
                self._process = os.pidfd_open(self.pid)
        except (EOFError, OSError) as error:
            raise LoadError(f"no worker of model {self._host.name} can be started", hint=IN_THE_LOG) from error
