"""Processes of hosts as the server sees them, and of the fork server that starts them."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import partial

from layertap.models.errors import IN_THE_LOG, LoadError
from layertap.models.spec import ModelSpec
from layertap.service.workers import fork_server
from layertap.service.workers.channel import Channel, connect
from layertap.service.workers.limits import end_with_parent
from layertap.service.workers.messages import (
    HostOptions,
    ImportLibraries,
    ProcessEnded,
    ProcessStarted,
    StartHost,
    WaitForProcess,
)

# It has the server's search path, and not the working directory before all else; signals are ignored from the first.
RUN = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from {fork_server.__name__} import run
run(int(sys.argv[1]))
"""
STARTS = 2  # the fork server may have died since it was used last


class ForkServer:
    """The process that starts hosts; any thread may use it. EOFError where it is gone."""

    def __init__(self, channel: Channel, wait: Callable[[], object]) -> None:
        """``wait`` returns when the process has ended."""
        self._channel = channel
        self._wait = wait
        self._lock = threading.Lock()

    def import_libraries(self, kinds: frozenset[str]) -> None:
        """Have it import what hosts of models from such sources need; the server goes on meanwhile."""
        with self._lock:
            self._channel.send(ImportLibraries(kinds))

    def start_host(self, connection: socket.socket, options: HostOptions) -> int:
        """Start a host, and return its process's number; LoadError where the system allows no more processes."""
        with self._lock:
            self._channel.send(StartHost(options), [connection.fileno()])
            started: ProcessStarted | LoadError = self._channel.receive()
        if isinstance(started, LoadError):
            raise started
        return started.pid

    def wait_for_host(self, pid: int) -> int | None:
        """The exit status of a host that has ended; None where nobody knows."""
        with self._lock:
            self._channel.send(WaitForProcess(pid))
            ended: ProcessEnded = self._channel.receive()
        return ended.status

    def close(self) -> None:
        """End it, and with it its hosts."""
        self._channel.close()
        self._wait()


class HostProcess:
    """A host's process; whoever started it ends it."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self._pid = pid
        self._descriptor = os.pidfd_open(pid)  # nobody waits for it before ``end`` does: the number is still its own

    def end(self, seconds: float = 0.0) -> int | None:
        """Its exit status; it is killed if it has not ended in so many seconds. None where nobody knows."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        os.close(self._descriptor)
        with suppress(EOFError):
            return self._server.wait_for_host(self._pid)
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


_servers = _ForkServers()
atexit.register(_servers.close)


def fork_this_process() -> None:
    """Have the fork server be a copy of this process: nothing is imported twice, and what is imported is stored once.

    This process must have one thread of Python, and must have computed nothing on several threads; the other ends with
    this thread.
    """
    _servers.get(_fork)


def start_fork_server(specs: Iterable[ModelSpec]) -> None:
    """Have a fork server that imports what these models need, those that are wanted from the start."""
    kinds = frozenset(spec.source.partition(":")[0] for spec in specs if spec.load == "startup")
    with suppress(EOFError):  # whoever starts a host starts another one
        _servers.get(_start_python).import_libraries(kinds)


def start_host(connection: socket.socket, options: HostOptions) -> HostProcess:
    """A new host, which loads a model and says so over this connection; LoadError where it can't be started."""
    for _ in range(STARTS):
        server = _servers.get(_start_python)
        try:
            return HostProcess(server, server.start_host(connection, options))
        except EOFError:
            _servers.close(server)
        except OSError as error:
            raise LoadError(f"no process can be started to load it ({error.strerror})") from error
    raise LoadError("no process can be started to load it", hint=IN_THE_LOG)


def _fork() -> ForkServer:
    channel, connection = connect()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            end_with_parent(parent)
            fork_server.run(connection.fileno())
        finally:
            os._exit(1)
    connection.close()
    return ForkServer(channel, partial(os.waitpid, pid, 0))


def _start_python() -> ForkServer:
    """A Python of its own, wherever this process is with its threads."""
    channel, connection = connect()
    with closing(connection):
        number = connection.fileno()
        process = subprocess.Popen(  # noqa: S603  (this Python, and a number)
            [sys.executable, "-c", RUN, str(number), *sys.path], stdin=subprocess.DEVNULL, pass_fds=[number]
        )
    return ForkServer(channel, process.wait)
