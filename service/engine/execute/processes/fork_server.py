"""The process that hosts are forked from, and these, as the server sees them; at the end what it does itself.

It has imported what hosts need, and has one thread of Python.
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
from layertap.service.engine.execute.processes.messages import HostOptions, WaitForProcess

FAILED = "the process that starts models' processes failed"
# It has the server's search path, and not the working directory before all else; signals are ignored from the first.
RUN = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from {forking.__name__} import run_and_exit
from {__name__} import run
run_and_exit(lambda: run(int(sys.argv[1])), {FAILED!r})
"""
STARTS = 2  # the fork server may have died since it was used last
START_SECONDS = 300.0  # for a fork server that imports libraries first, on a machine that does much else
END_SECONDS = 60.0  # for a process that has been killed
DESCRIPTORS = Path("/proc/self/fd")
STDERR = 2
IMPORTS: Mapping[str, Callable[[], object]] = {  # what hosts need, by the kind of their model's source
    "torchvision": lambda: import_module("torchvision.models"),
    "timm": lambda: import_module("timm"),
    "transformers": lambda: import_module("transformers.models.auto.modeling_auto"),
}


class ForkServer:
    """The process that starts hosts; any thread may use it. EOFError where it is gone, or does not answer in time."""

    def __init__(self, channel: Channel, end: Callable[[], object]) -> None:
        """``end`` kills the process, and returns when it has ended."""
        self._channel = channel
        self._end = end
        self._lock = threading.Lock()

    def ask(self, message: object, timeout: float, descriptors: Sequence[int] = ()) -> Any:
        """Its answer within so many seconds."""
        with self._lock:
            try:
                return self._channel.ask(message, timeout, descriptors)
            except TimeoutError as error:
                self._channel.close()  # what it answers later would be taken for another answer
                raise EOFError("the fork server does not answer") from error

    def forget(self) -> None:
        """In a copy of the process that has started it: that one goes on using it."""
        self._channel.close()

    def close(self) -> None:
        """End it, and with it its hosts."""
        self._end()  # also one that is stopped, or that asks nobody whether it should
        self._channel.close()


class HostProcess:
    """A host's process; whoever started it ends it. ``descriptor`` can be read once it has ended."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self._pid = pid
        self.descriptor = os.pidfd_open(pid)  # nobody waits for it before ``end`` does: the number is still its own

    def kill(self) -> None:
        """End it at once; any thread may, also beside ``end``."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def end(self, seconds: float = 0.0) -> int | None:
        """Its exit status; it is killed if it has not ended in so many seconds. None where nobody knows."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
        self.kill()
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)
        with suppress(EOFError, OSError):
            status: int | None = self._server.ask(WaitForProcess(self._pid), END_SECONDS)
            return status
        return None


class _ForkServers:
    """The fork server of this process, and after its death the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: ForkServer | None = None

    def get(self, start: Callable[[], ForkServer]) -> ForkServer:
        with self._lock:
            self._current = self._current or start()
            return self._current

    def close(self, server: ForkServer | None = None) -> None:
        """End this one, or whichever there is."""
        with self._lock:
            if self._current is not None and server in (None, self._current):
                self._current.close()
                self._current = None

    def forget(self) -> None:
        """In a copy of this process: it has none, and whoever held the lock is not in it."""
        self._lock = threading.Lock()
        if self._current is not None:
            self._current.forget()
            self._current = None


_servers = _ForkServers()
atexit.register(_servers.close)
os.register_at_fork(after_in_child=_servers.forget)


def fork_this_process(source: str = "") -> None:
    """Have the fork server be a copy of this process: nothing is imported twice, and what is imported is stored once.

    It begins to import what a host of the model ``source`` needs. This process must have one thread of Python, and must
    have computed nothing on several threads; the other ends with this thread.
    """
    _servers.get(partial(_fork, source))


def start_host(connection: socket.socket, options: HostOptions) -> HostProcess:
    """A new host, which loads a model and says so over this connection; LoadError where it can't be started."""
    for _ in range(STARTS):
        server = _servers.get(_start_python)
        try:
            started: int | LoadError = server.ask(options, START_SECONDS, [connection.fileno()])
            if isinstance(started, LoadError):
                raise started
            return HostProcess(server, started)
        except EOFError:
            _servers.close(server)
        except OSError as error:
            raise LoadError(f"no process can be started to load it ({error.strerror})") from error
    raise LoadError("no process can be started to load it")


def _fork(source: str) -> ForkServer:
    """A copy of this process."""
    channel, connection = connect()
    with closing(connection):
        pid = fork(partial(run, connection.fileno(), source), FAILED)

    def end() -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    return ForkServer(channel, end)


def _start_python() -> ForkServer:
    """A Python of its own, wherever this process is with its threads."""
    channel, connection = connect()
    with closing(connection):
        number = connection.fileno()
        process = subprocess.Popen(  # noqa: S603  (this Python, and a number)
            [sys.executable, "-c", RUN, str(number), *sys.path], stdin=subprocess.DEVNULL, pass_fds=[number]
        )

    def end() -> None:
        process.kill()
        process.wait()

    return ForkServer(channel, end)


_imported: set[str] = set()


def run(descriptor: int, source: str = "") -> None:
    """Start hosts until the server closes the connection, which is the socket of this number.

    What a host of the model ``source`` needs is imported first.
    """
    leave_signals_to_server()
    # A collector that writes to what is shared would make copies of it, and close what has the number of a descriptor
    # that is closed here.
    gc.freeze()
    gc.enable()
    for other in [int(each.name) for each in DESCRIPTORS.iterdir()]:
        if other > STDERR and other != descriptor:
            with suppress(OSError):  # of the one that listed them
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
        elif isinstance(message, WaitForProcess):
            channel.send(wait_for_child(message.pid))


def _import_library(source: str) -> None:
    """Import what a model's host needs, once for all; a broken library stops no host but those that need it."""
    kind = source.partition(":")[0]
    if kind in IMPORTS and kind not in _imported:
        _imported.add(kind)
        gc.disable()  # it would look at what is imported again and again, for a fifth of the time
        with suppress(Exception):
            IMPORTS[kind]()
        gc.freeze()
        gc.enable()


def _start_host(channel: Channel, connection: int, options: HostOptions) -> int | LoadError:
    """A new host's number, or why there is none: other models' hosts go on."""
    try:
        return fork(partial(_run_host, channel, connection, options), "a model's process failed", options.spec.name)
    except OSError as error:
        return LoadError(f"no process can be started to load it ({error.strerror})")
    finally:
        os.close(connection)


def _run_host(channel: Channel, connection: int, options: HostOptions) -> None:
    channel.close()
    run_model_host(socket.socket(fileno=connection), options)
