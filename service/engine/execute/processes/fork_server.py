"""Fork servers, from which hosts are forked: how they start, and at the end their own code.

The first has imported torch; each of the others also a library, so that models wait for no import but their own. They
run one thread of Python.
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
from layertap.service.engine.execute.processes.forking import Adoption, Forker
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
    """The fork servers of this process, by their library, or ""; a new one replaces one that dies."""

    def __init__(self) -> None:
        self._current: dict[str, Forker] = {}
        self.forget()

    def fork(self, library: str, task: HostOptions | str, name: str = "") -> Forker:
        """A child of this process, forked by a fork server, that does a task; EOFError, OSError.

        The task: that of a host, or the library of a further fork server.
        """
        server = self.get(library, partial(self.fork, "", library) if library else partial(_start, _start_python))
        channel, connection = connect()
        with ExitStack() as failed:
            failed.callback(channel.close)
            with closing(connection), self._adoption.adopt():
                pid = server.fork(name, [connection.fileno()], START_SECONDS)
            forker = Forker(channel, partial(forking.end_child, pid))
            failed.callback(forker.close)
            channel.send(task)
            failed.pop_all()
        return forker

    def get(self, library: str, start: Callable[[], Forker]) -> Forker:
        """The fork server of a library; ``start`` starts one."""
        with self._starting:
            server = self._current.get(library)
            if server is None or server.has_ended:
                if server is not None:
                    server.close()
                server = self._current[library] = start()
            return server

    def close(self) -> None:
        """End the fork servers; their hosts end with this process."""
        for server in list(self._current.values()):
            server.close()

    def forget(self) -> None:
        """Begin without fork servers, also in a forked process: its parent goes on using them."""
        self._starting = threading.RLock()
        self._adoption = Adoption()
        while self._current:
            self._current.popitem()[1].channel.close()


_servers = _ForkServers()
atexit.register(_servers.close)
os.register_at_fork(after_in_child=_servers.forget)


def fork_this_process(source: str = "") -> None:
    """Fork the first fork server from this process, so that imported libraries are loaded and stored once.

    So is that of the library, if any, that a host of the model ``source`` needs: it begins to import it. This process
    must have one thread of Python and must not have computed on several threads; fork servers end with this thread.
    """
    for library in dict.fromkeys(("", _find_library(source))):
        _servers.get(library, partial(_start, partial(_fork_this_process, library)))


def start_host(options: HostOptions) -> Forker:
    """Start a host, which loads a model and reports on its channel; LoadError if it can't be started."""
    try:
        return _servers.fork(_find_library(options.spec.source), options, options.spec.name)
    except (EOFError, OSError) as error:
        reason = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise LoadError(f"no process can be started to load it{reason}") from error


def _find_library(source: str) -> str:
    """The library that a host of a model's source needs, or ""."""
    kind = source.partition(":")[0]
    return kind if kind in IMPORTS else ""


def _start(start: Callable[[int], int]) -> Forker:
    """A fork server; ``start`` starts it with the descriptor of its connection, and returns its pid."""
    channel, connection = connect()
    with ExitStack() as failed, closing(connection):
        failed.callback(channel.close)
        forker = Forker(channel, partial(forking.end_child, start(connection.fileno())))
        failed.pop_all()
    return forker


def _fork_this_process(library: str, descriptor: int) -> int:
    return forking.fork(partial(run, descriptor, library), FAILED)


def _start_python(descriptor: int) -> int:
    """Start a new Python process; this one may have any number of threads."""
    arguments = [sys.executable, "-c", RUN, str(descriptor), *sys.path]
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, descriptor, descriptor),  # the process inherits it
    ]
    return os.posix_spawn(sys.executable, arguments, os.environ, file_actions=files)


def run(descriptor: int, library: str = "") -> None:
    """Be a fork server until this process's parent closes the connection, which is the socket ``descriptor``."""
    # A collection would write to shared pages, which copies them, and might close a descriptor whose number is
    # already reused here.
    gc.freeze()
    gc.enable()
    os.closerange(STDERR + 1, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    _serve(Channel(socket.socket(fileno=descriptor)), os.getppid(), library)


def _serve(channel: Channel, parent: int, library: str) -> None:
    """Import a library, once for all its hosts; if it is broken, only they fail. Then start hosts."""
    if library:
        gc.disable()  # collections during imports take a fifth of the time
        with suppress(Exception):
            IMPORTS[library]()
        gc.freeze()
        gc.enable()
    with suppress(EOFError):
        begin = partial(_begin, parent)
        forking.fork_on_request(channel, forking.fork_for_parent, begin, "a model's process failed")


def _begin(parent: int, descriptor: int) -> None:
    """Do the task that the parent, which has adopted this process by then, sends."""
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        task = channel.receive()
    except EOFError:
        return
    forking.end_with_parent(parent)
    if isinstance(task, HostOptions):
        run_model_host(task, channel)
    else:
        _serve(channel, parent, task)
