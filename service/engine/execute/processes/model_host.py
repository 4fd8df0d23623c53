"""The server's view of a model's host: the process that loads the model and starts workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

from layertap.models.devices.memory import count_oom_kills, measure_private_bytes
from layertap.models.devices.turns import build_beside, take_turn
from layertap.models.errors import LayertapError, LoadError, label_failures
from layertap.models.run.fingerprint import get_proven_part
from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.execute.processes.channel import Channel, connect
from layertap.service.engine.execute.processes.fork_server import start_host
from layertap.service.engine.execute.processes.forking import Forker, find_cause
from layertap.service.engine.execute.processes.host import HostOptions
from layertap.service.engine.execute.processes.progress import create_progress
from layertap.service.engine.execute.processes.worker_process import WorkerProcess
from layertap.service.types import RestartReason

START_SECONDS = 60.0  # for a forked process to get ready, on a busy machine
LOAD_SECONDS = 3600.0  # for a host to load its model, including a download
MIN_RELOAD_SECONDS = 120.0
RELOAD_FACTOR = 10.0  # a reload may take so many times as long as the first load
OnRestart = Callable[[str, RestartReason], None]


class ModelHost:
    """The process that has loaded a model, or only decodes for one, and starts workers.

    ``forker``: the connection to it, another one once it is loaded again; ``workers``: the started ones, by pid, until
    they are ended. The methods block, so they belong in threads; any thread may call them, but ``load`` not beside
    itself.
    """

    def __init__(self, options: HostOptions, on_restart: OnRestart) -> None:
        """``on_restart`` is called with the model's name and why a worker was replaced."""
        self.on_restart = on_restart
        self.workers: dict[int, WorkerProcess] = {}
        self.name = options.spec.name
        self._options = options
        self.forker: Forker | None = None
        self._lock = threading.Lock()  # for whoever starts or ends the process
        self._closed = False
        self._identity: object = None  # of the model at its first load
        self._load_seconds = 0.0  # of the first load

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone; does not block."""
        return self.forker is None or self.forker.has_ended

    def load(self) -> ModelInfo | None:
        """Start the process, wait until it has loaded the model, if it has one to load, and start all workers.

        LoadError if it can't, or if the model has changed. A retry may help if it is of the kind "killed": the process
        was killed from outside, or could not be started; "memory": the system was out of memory; "lost": it was too
        slow.
        """
        with self._lock:
            self._end()
            try:
                info = self._load()
                for _ in range(self._options.settings.workers):
                    self.start_worker()
                return info
            except BaseException as error:
                self._end()
                if isinstance(error, OSError):  # this process is out of descriptors
                    detail = f"no process can be started to load it ({error.strerror})"
                    raise LoadError(detail, kind="killed") from error
                raise

    def start_worker(self, forker: Forker | None = None) -> WorkerProcess:
        """Start a worker of the process behind a ``forker``, or of the present one; LoadError if it can't."""
        if self._closed:
            raise LoadError(f"model {self.name} is unloaded")
        forker, pid = forker or self.forker, -1
        try:
            if forker is None:
                raise EOFError("the host has ended")
            channel, connection = connect()
            with ExitStack() as failed:
                failed.callback(channel.close)
                with closing(connection):  # else a closed other end would go unnoticed here
                    progress, memory = create_progress()
                    try:
                        pid = forker.fork(self.name, (connection.fileno(), memory), START_SECONDS)
                    finally:
                        os.close(memory)
                started = self.workers[pid] = WorkerProcess(pid, channel, progress)
                channel.receive(START_SECONDS)  # it is ready
                failed.pop_all()
                return started
        except (EOFError, OSError) as error:
            if pid >= 0:
                self.end_worker(pid)
            raise LoadError(f"no worker of model {self.name} can be started", kind="killed") from error

    def end_worker(self, pid: int) -> int | None:
        """Kill a worker, unless it has ended; the exit status, None if unknown."""
        forker = self.forker
        status = forker.end_process(pid) if forker is not None else None
        self.workers.pop(pid, None)
        return status

    def measure_worker_bytes(self) -> int:
        """Bytes of the workers that are not shared with other processes."""
        return sum(map(measure_private_bytes, list(self.workers)))

    def close(self) -> None:
        """End the workers, which nobody uses any more, and then the process; no worker starts from now on."""
        self._closed = True
        if self._lock.locked() and self.forker is not None:  # nobody waits for this load any more
            self.forker.kill()
        with self._lock:
            self._end()

    def _load(self) -> ModelInfo | None:
        started, oom_kills = time.monotonic(), count_oom_kills()
        again = self._options.earlier is not None
        seconds = max(MIN_RELOAD_SECONDS, RELOAD_FACTOR * self._load_seconds) if again else LOAD_SECONDS
        with label_failures("killed"):
            if not self._closed:
                self.forker = start_host(self._options)
            if self._closed or self.forker is None:  # meanwhile: ``close`` found no process to end
                raise LoadError(f"model {self.name} is unloaded")
        try:
            answer = self._receive_model(self.forker.channel, started + seconds)
        except EOFError:
            status = self.forker.close()
            cause = find_cause(status, oom_kills)
            detail = f"the process that loads it has ended (status {status})"
            if cause == "memory":
                detail = "the system ran out of memory, and ended the process that loads it"
            answer = LoadError(detail, kind="other" if cause == "crash" else cause)
        except TimeoutError:
            answer = LoadError(f"the process that loads it took more than {seconds:.0f} s", kind="lost")
        if isinstance(answer, LayertapError):
            raise answer
        identity = _identify(answer)
        if again and self._identity != identity:
            raise LoadError(
                "it is another model than before: its weights have changed, or the graphs of its warm plans"
            )
        if not again:
            self._identity, self._load_seconds = identity, time.monotonic() - started
            self._options = replace(self._options, earlier=answer.compiled if answer is not None else ())
        return answer

    def _receive_model(self, channel: Channel, deadline: float) -> ModelInfo | LayertapError | None:
        """The host's answer once it has loaded the model; until then, grant it turns with other models."""
        with ExitStack() as turn:
            if self._options.pictures is None:
                turn.enter_context(build_beside())  # until the host wants to measure
            while True:
                message = channel.receive(max(deadline - time.monotonic(), 0.0))
                if not isinstance(message, bool):
                    answer: ModelInfo | LayertapError | None = message
                    return answer
                turn.close()
                if message:
                    turn.enter_context(take_turn())
                    channel.send(True)

    def _end(self) -> None:
        """End the workers, while the process can wait for them, and then the process."""
        for worker in list(self.workers.values()):  # also one that started while the server began to shut down
            worker.channel.close()
            self.end_worker(worker.pid)
        if self.forker is not None:
            self.forker.close()
        self.forker = None


def _identify(info: ModelInfo | None) -> object:
    """What must not change when a model is reloaded: its weights, and which of its warm plans have graphs."""
    return info and (get_proven_part(info.identity), tuple(each is None for each in info.compiled))
