"""A model's host as the server sees it: the process that loads the model and starts workers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from layertap.models.devices.memory import measure_private_bytes
from layertap.models.errors import LayertapError, LoadError, label_failures
from layertap.models.model_info import ModelInfo
from layertap.models.turns import build_beside, take_turn
from layertap.service.engine.execute.processes.channel import connect
from layertap.service.engine.execute.processes.fork_server import HostProcess, start_host
from layertap.service.engine.execute.processes.messages import HostOptions, StartWorker, Turn, WaitForProcess
from layertap.service.engine.execute.processes.progress import Progress, create_progress
from layertap.service.types import RestartReason

START_SECONDS = 60.0  # for a copy of a process to say that it is ready, on a machine that does much else
LOAD_SECONDS = 3600.0  # for a host to load its model, which may be downloaded first
MIN_RELOAD_SECONDS = 120.0
RELOAD_FACTOR = 10.0  # loading again may take so many times what it took at first
OnRestart = Callable[[str, RestartReason], None]


@dataclass(frozen=True)
class StartedWorker:
    """A worker that has just been started: its process's number, the connection to it, and what it tells."""

    pid: int
    connection: socket.socket
    progress: Progress


class ModelHost:
    """The process that has loaded a model, or only decodes for one, and starts workers.

    ``workers`` are those that it has started, by their processes' numbers, until they have been waited for. Its methods
    wait for the process: they belong into threads, of which any may call them.
    """

    def __init__(self, options: HostOptions, on_restart: OnRestart) -> None:
        """``on_restart`` is called with the model's name and why a worker was replaced."""
        self.on_restart = on_restart
        self.workers: dict[int, StartedWorker] = {}
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
            for worker in list(self.workers.values()):  # of the host before; other threads still wait for some
                worker.connection.close()
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
                started = self.workers[pid] = StartedWorker(pid, channel.connection, progress)
                channel.receive(START_SECONDS)  # it is ready
                return started
            except BaseException:
                channel.close()
                raise
        except (EOFError, OSError) as error:
            if pid is not None:  # its connection is closed, so that it ends
                self.wait_for_worker(pid)
            raise _refuse(f"no worker of model {self.name} can be started") from error

    def wait_for_worker(self, pid: int) -> int | None:
        """The exit status of a worker that ends; None where nobody knows."""
        status: int | None = None
        with suppress(EOFError, OSError):
            status = self._ask(WaitForProcess(pid))
        self.workers.pop(pid, None)
        return status

    def measure_worker_bytes(self) -> int:
        """Memory of the workers that no other process has."""
        return sum(map(measure_private_bytes, list(self.workers)))

    def take_descriptor(self) -> int | None:
        """A descriptor that can be read once the process has ended, from now on the caller's; None where it has."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    def close(self) -> None:
        """End the process, after its workers, which nobody asks any more: none is started from now on."""
        self._closed = True
        if self._lock.locked() and self._process is not None:  # it loads: nobody waits for that any more
            self._process.kill()
        for worker in list(self.workers.values()):
            worker.connection.close()  # of one that was started when the server began to end, too
            self.wait_for_worker(worker.pid)  # as long as the host can: nobody else would where this is PID 1
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
                if not isinstance(message, Turn):
                    answer: ModelInfo | LayertapError | None = message
                    return answer
                turn.close()
                if message.wanted:
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
        self.workers.clear()


def _refuse(detail: str) -> LoadError:
    """What may pass: a process was killed, does not answer, or could not be started."""
    refusal = LoadError(detail)
    refusal.kind = "killed"
    return refusal


def _identify(info: ModelInfo | None) -> object:
    """What must be the same of a model that is loaded again: its weights, and which of its warm plans have graphs."""
    return info and (info.identity, tuple(each is None for each in info.compiled))
