"""The process that hosts are forked from: it has imported what they need, and has one thread of Python."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from layertap.service.workers.channel import Channel
from layertap.service.workers.limits import leave_signals_to_server
from layertap.service.workers.messages import (
    HostEnded,
    HostOptions,
    HostStarted,
    ImportLibraries,
    StartHost,
    WaitForHost,
)
from layertap.service.workers.model_host import run_model_host

IMPORTS: Mapping[str, Callable[[], object]] = {  # what hosts import, by the kind of their model's source
    "torchvision": lambda: import_module("torchvision.models"),
    "timm": lambda: import_module("timm"),
    "transformers": lambda: import_module("transformers.models.auto.modeling_auto"),
}


def run(descriptor: int) -> NoReturn:
    """Start hosts until the server closes the connection, which is the socket of this number."""
    status = 1
    try:
        leave_signals_to_server()
        gc.collect()  # what is collected later must not close what has such a number then
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        gc.freeze()  # a collector that writes to what is shared would make copies of it
        with suppress(EOFError):
            _serve(Channel(socket.socket(fileno=descriptor)))
        status = 0
    finally:
        os._exit(status)  # it has nothing to tidy up, and libraries would write on the terminal while they end


def _serve(channel: Channel) -> None:
    while True:
        message, descriptors = channel.receive_with_descriptors(1)
        if isinstance(message, ImportLibraries):
            _import_libraries(message.kinds)
        elif isinstance(message, StartHost):
            channel.send(HostStarted(_fork_host(channel, descriptors[0], message.options)))
        elif isinstance(message, WaitForHost):
            _, status = os.waitpid(message.pid, 0)
            channel.send(HostEnded(os.waitstatus_to_exitcode(status)))


def _import_libraries(kinds: Collection[str]) -> None:
    """Import what can be: a broken library stops no host but those that need it."""
    for kind in IMPORTS.keys() & kinds:
        with suppress(Exception):
            IMPORTS[kind]()
    gc.collect()
    gc.freeze()


def _fork_host(channel: Channel, connection: int, options: HostOptions) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            channel.close()
            run_model_host(socket.socket(fileno=connection), options, parent)
            status = 0
        finally:
            os._exit(status)
    os.close(connection)
    return pid
