"""The fork server, from which hosts are forked: how it starts, and at the end its own code.

It has imported the libraries that hosts need, and runs one thread of Python.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib import import_module

from layertap.models.errors import LoadError
from layertap.service.engine.execute.processes import forking
from layertap.service.engine.execute.processes.channel import Channel, connect
from layertap.service.engine.execute.processes.forking import Forker
from layertap.service.engine.execute.processes.host import HostOptions, run_model_host

FAILED = "the process that starts models' processes failed"
# It gets the server's search path, without the working directory in front; signals are ignored from the start.
RUN = f"""
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from {forking.__name__} import run_and_exit
from {__name__} import run
run_and_exit(lambda: run(int(sys.argv[1])), {FAILED!r})
"""
START_SECONDS = 300.0  # for a fork server that imports libraries first, on a busy machine
STDERR = 2
IMPORTS: Mapping[str, Callable[[], object]] = {  # the libraries that hosts need, by the kind of their model's source
    "torchvision": lambda: import_module("torchvision.models"),
    "timm": lambda: import_module("timm"),
    "transformers": lambda: import_module("transformers.models.auto.modeling_auto"),
}


class _ForkServers:
    """The current fork server of this process; a new one replaces it if it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Forker | None = None

    def get(self, start: Callable[[int], int]) -> Forker:
        """The fork server; ``start`` starts one with the descriptor of its connection, and returns its pid."""
        with self._lock:
            if self._current is None or self._current.has_ended:
                self._end()
                channel, connection = connect()
                with ExitStack() as failed, closing(connection):
                    failed.callback(channel.close)
                    self._current = Forker(channel, partial(forking.end_child, start(connection.fileno())))
                    failed.pop_all()
            return self._current

    def close(self) -> None:
        """End the fork server and its hosts."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Close this end in a forked process, which has no other threads; the parent goes on using the fork server."""
        self._lock = threading.Lock()
        if self._current is not None:
            self._current.channel.close()
            self._current = None

    def _end(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None


_servers = _ForkServers()
atexit.register(_servers.close)
os.register_at_fork(after_in_child=_servers.forget)


def fork_this_process(source: str = "") -> None:
    """Fork the fork server from this process, so that imported libraries are loaded and stored once.

    It begins to import the libraries that a host of the model ``source`` needs. This process must have one thread of
    Python and must not have computed on several threads; the fork server ends with this thread.
    """
    _servers.get(lambda descriptor: forking.fork(partial(run, descriptor, source), FAILED))


def start_host(options: HostOptions) -> Forker:
    """Start a host, which loads a model and reports on its channel; LoadError if it can't be started."""
    channel, connection = connect()
    try:
        with closing(connection):
            server = _servers.get(_start_python)
            pid = server.fork(options, [connection.fileno()], START_SECONDS)
    except (EOFError, OSError) as error:
        channel.close()
        reason = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise LoadError(f"no process can be started to load it{reason}") from error
    return Forker(channel, partial(server.end_process, pid))


def _start_python(descriptor: int) -> int:
    """Start a new Python process; this one may have any number of threads."""
    arguments = [sys.executable, "-c", RUN, str(descriptor), *sys.path]
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, descriptor, descriptor),  # the process inherits it
    ]
    return os.posix_spawn(sys.executable, arguments, os.environ, file_actions=files)


def run(descriptor: int, source: str = "") -> None:
    """Start hosts until the server closes the connection, which is the socket ``descriptor``.

    The libraries that a host of the model ``source`` needs are imported first.
    """
    # A collection would write to shared pages, which copies them, and might close a descriptor whose number is
    # already reused here.
    gc.freeze()
    gc.enable()
    os.closerange(STDERR + 1, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    _import_library(source)
    with suppress(EOFError):
        channel = Channel(socket.socket(fileno=descriptor))
        forking.fork_on_request(channel, _prepare, run_model_host, "a model's process failed")


def _prepare(options: HostOptions) -> str:
    _import_library(options.spec.source)
    return options.spec.name


def _import_library(source: str) -> None:
    """Import the library of a model's source, once for all hosts; if it is broken, only hosts that need it fail."""
    kind = source.partition(":")[0]
    if kind in IMPORTS:
        gc.disable()  # collections during imports take a fifth of the time
        with suppress(Exception):
            IMPORTS[kind]()
        gc.freeze()
        gc.enable()
