"""The fork server, from which hosts are forked: the server's view of it and of the hosts; at the end, its own code.

It has imported the libraries that hosts need, and runs one thread of Python.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from layertap.models.errors import LoadError
from layertap.service.engine.execute.processes import forking
from layertap.service.engine.execute.processes.channel import Channel, connect
from layertap.service.engine.execute.processes.forking import fork, leave_signals_to_server, wait_for_child
from layertap.service.engine.execute.processes.host import run_model_host
from layertap.service.engine.execute.processes.messages import HostOptions

FAILED = "the process that starts models' processes failed"
# It gets the server's search path, without the working directory in front; signals are ignored from the start.
RUN = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from {forking.__name__} import run_and_exit
from {__name__} import run
run_and_exit(lambda: run(int(sys.argv[1])), {FAILED!r})
"""
STARTS = 2  # the fork server may have died since its last use
START_SECONDS = 300.0  # for a fork server that imports libraries first, on a busy machine
END_SECONDS = 60.0  # for a process that has been killed
DESCRIPTORS = Path("/proc/self/fd")
STDERR = 2
IMPORTS: Mapping[str, Callable[[], object]] = {  # the libraries that hosts need, by the kind of their model's source
    "torchvision": lambda: import_module("torchvision.models"),
    "timm": lambda: import_module("timm"),
    "transformers": lambda: import_module("transformers.models.auto.modeling_auto"),
}


class ForkServer:
    """The process that starts hosts; any thread may use it. If it dies, or does not answer in time, it is ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._kill: Callable[[], object] = _do_nothing  # and wait for its end

    def ask(self, message: object, timeout: float, descriptors: Sequence[int] = ()) -> Any:
        """The answer to a message, within ``timeout`` seconds; EOFError."""
        with self._lock:
            try:
                if self._channel is None:
                    raise EOFError("the fork server has ended")
                return self._channel.ask(message, timeout, descriptors)
            except (EOFError, TimeoutError) as error:
                self._close()  # a late answer would be taken for the next one
                raise EOFError("the fork server does not answer") from error

    def start(self, start: Callable[[socket.socket], Callable[[], object]]) -> None:
        """Start it if it does not run: ``start`` is given its end of the connection; returns what kills it."""
        with self._lock:
            if self._channel is None:
                channel, connection = connect()
                with closing(connection):
                    self._kill = start(connection)
                self._channel = channel

    def close(self) -> None:
        """End the fork server and its hosts, also while it is asked."""
        self._kill()
        with self._lock:
            self._close()

    def forget(self) -> None:
        """Close this end in a forked process, which has no other threads; the parent goes on using the fork server."""
        self._lock = threading.Lock()
        self._kill = _do_nothing
        self._close()

    def _close(self) -> None:
        self._kill()  # also a stopped process
        self._kill = _do_nothing
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class HostProcess:
    """A host's process; whoever started it ends it. ``descriptor`` becomes readable when it ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.descriptor = os.pidfd_open(pid)  # only ``end`` waits for the process, so the pid is not reused before

    def kill(self) -> None:
        """Kill the process; any thread may, also during ``end``."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def end(self, seconds: float = 0.0) -> int | None:
        """The exit status; kills the process after ``seconds``. None if the status is unknown."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
        self.kill()
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)
        with suppress(EOFError, OSError):
            status: int | None = _server.ask(self._pid, END_SECONDS)
            return status
        return None


def _do_nothing() -> None:
    """Kills no process."""


_server = ForkServer()
atexit.register(_server.close)
os.register_at_fork(after_in_child=_server.forget)


def fork_this_process(source: str = "") -> None:
    """Fork the fork server from this process, so that imported libraries are loaded and stored once.

    It begins to import the libraries that a host of the model ``source`` needs. This process must have one thread of
    Python and must not have computed on several threads; the fork server ends with this thread.
    """
    _server.start(partial(_fork, source))


def start_host(connection: socket.socket, options: HostOptions) -> HostProcess:
    """Start a host, which loads a model and reports on ``connection``; LoadError if it can't be started."""
    for _ in range(STARTS):
        try:
            _server.start(_start_python)
            started: int | LoadError = _server.ask(options, START_SECONDS, [connection.fileno()])
            if isinstance(started, LoadError):
                raise started
            return HostProcess(started)
        except EOFError:
            continue
        except OSError as error:
            raise LoadError(f"no process can be started to load it ({error.strerror})") from error
    raise LoadError("no process can be started to load it")


def _fork(source: str, connection: socket.socket) -> Callable[[], object]:
    """Fork this process."""
    pid = fork(partial(run, connection.fileno(), source), FAILED)

    def kill() -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    return kill


def _start_python(connection: socket.socket) -> Callable[[], object]:
    """Start a new Python process; this one may have any number of threads."""
    number = connection.fileno()
    process = subprocess.Popen(  # noqa: S603  (this Python, and a number)
        [sys.executable, "-c", RUN, str(number), *sys.path], stdin=subprocess.DEVNULL, pass_fds=[number]
    )

    def kill() -> None:
        process.kill()
        process.wait()

    return kill


_imported: set[str] = set()


def run(descriptor: int, source: str = "") -> None:
    """Start hosts until the server closes the connection, which is the socket ``descriptor``.

    The libraries that a host of the model ``source`` needs are imported first.
    """
    leave_signals_to_server()
    # A collection would write to shared pages, which copies them, and might close a descriptor whose number is
    # already reused here.
    gc.freeze()
    gc.enable()
    for other in [int(each.name) for each in DESCRIPTORS.iterdir()]:
        if other > STDERR and other != descriptor:
            with suppress(OSError):  # the descriptor of the directory itself, closed by now
                os.close(other)
    _import_library(source)
    with suppress(EOFError):
        _serve(Channel(socket.socket(fileno=descriptor)))


def _serve(channel: Channel) -> None:
    while True:
        message, descriptors = channel.receive_with_descriptors()
        if isinstance(message, HostOptions):
            _import_library(message.spec.source)
            channel.send(_start_host(channel, descriptors[0], message))
        elif isinstance(message, int):
            channel.send(wait_for_child(message))


def _import_library(source: str) -> None:
    """Import the library of a model's source once, for all hosts; if it is broken, only hosts that need it fail."""
    kind = source.partition(":")[0]
    if kind in IMPORTS and kind not in _imported:
        _imported.add(kind)
        gc.disable()  # collections during imports take a fifth of the time
        with suppress(Exception):
            IMPORTS[kind]()
        gc.freeze()
        gc.enable()


def _start_host(channel: Channel, connection: int, options: HostOptions) -> int | LoadError:
    """A new host's pid, or the error; other models' hosts go on."""
    try:
        return fork(partial(_run_host, channel, connection, options), "a model's process failed", options.spec.name)
    except OSError as error:
        return LoadError(f"no process can be started to load it ({error.strerror})")
    finally:
        os.close(connection)


def _run_host(channel: Channel, connection: int, options: HostOptions) -> None:
    channel.close()
    run_model_host(socket.socket(fileno=connection), options)
