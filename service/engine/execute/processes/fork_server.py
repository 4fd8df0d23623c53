"""The process that hosts are forked from: it has imported what they need, and has one thread of Python."""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from layertap.models.errors import LoadError
from layertap.models.spec import ModelSpec
from layertap.service.engine.execute.processes.channel import Channel
from layertap.service.engine.execute.processes.limits import leave_signals_to_server
from layertap.service.engine.execute.processes.messages import (
    HostOptions,
    ProcessEnded,
    ProcessStarted,
    StartHost,
    WaitForProcess,
)
from layertap.service.engine.execute.processes.model_host import run_model_host

log = logging.getLogger("layertap")
DESCRIPTORS = Path("/proc/self/fd")
STDERR = 2
IMPORTS: Mapping[str, Callable[[], object]] = {  # what hosts need, by the kind of their model's source
    "torchvision": lambda: import_module("torchvision.models"),
    "timm": lambda: import_module("timm"),
    "transformers": lambda: import_module("transformers.models.auto.modeling_auto"),
}
_imported: set[str] = set()


def run(descriptor: int) -> NoReturn:
    """Start hosts until the server closes the connection, which is the socket of this number."""
    status = 1
    try:
        leave_signals_to_server()
        gc.collect()  # what is collected later must not close what has such a number then
        for other in [int(each.name) for each in DESCRIPTORS.iterdir()]:
            if other > STDERR and other != descriptor:
                with suppress(OSError):  # of the one that listed them
                    os.close(other)
        gc.freeze()  # a collector that writes to what is shared would make copies of it
        with suppress(EOFError):
            _serve(Channel(socket.socket(fileno=descriptor)))
        status = 0
    except BaseException:
        log.critical("the process that starts models' processes failed", exc_info=True)
    finally:
        os._exit(status)  # it has nothing to tidy up, and libraries would write on the terminal while they end


def _serve(channel: Channel) -> None:
    while True:
        message, descriptors = channel.receive_with_descriptors()
        if isinstance(message, StartHost):
            _import_library(message.options.spec)
            channel.send(_start_host(channel, descriptors[0], message.options))
        elif isinstance(message, WaitForProcess):
            _, status = os.waitpid(message.pid, 0)
            channel.send(ProcessEnded(os.waitstatus_to_exitcode(status)))


def _import_library(spec: ModelSpec) -> None:
    """Import what a model's host needs, once for all; a broken library stops no host but those that need it."""
    kind = spec.source.partition(":")[0]
    if kind in IMPORTS and kind not in _imported:
        _imported.add(kind)
        with suppress(Exception):
            IMPORTS[kind]()
        gc.collect()
        gc.freeze()


def _start_host(channel: Channel, connection: int, options: HostOptions) -> ProcessStarted | LoadError:
    """A new host, or why there is none: other models' hosts go on."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        return LoadError(f"no process can be started to load it ({error.strerror})")
    finally:
        if os.getpid() == parent:
            os.close(connection)
    if pid == 0:
        channel.close()
        _run_host_and_exit(connection, options, parent)
    return ProcessStarted(pid)


def _run_host_and_exit(connection: int, options: HostOptions, parent: int) -> NoReturn:
    status = 1
    try:
        run_model_host(socket.socket(fileno=connection), options, parent)
        status = 0
    except BaseException:
        log.critical("a model's process failed", exc_info=True, extra={"fields": {"model": options.spec.name}})
    finally:
        os._exit(status)
