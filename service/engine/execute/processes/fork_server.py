"""The process that hosts are forked from: it has imported what they need, and has one thread of Python."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from layertap.models.errors import LoadError
from layertap.models.spec import ModelSpec
from layertap.service.engine.execute.processes.channel import Channel
from layertap.service.engine.execute.processes.forking import fork, leave_signals_to_server, wait_for_child
from layertap.service.engine.execute.processes.messages import HostOptions, StartHost, WaitForProcess
from layertap.service.engine.execute.processes.model_host import run_model_host

DESCRIPTORS = Path("/proc/self/fd")
STDERR = 2
IMPORTS: Mapping[str, Callable[[], object]] = {  # what hosts need, by the kind of their model's source
    "torchvision": lambda: import_module("torchvision.models"),
    "timm": lambda: import_module("timm"),
    "transformers": lambda: import_module("transformers.models.auto.modeling_auto"),
}
_imported: set[str] = set()


def run(descriptor: int) -> None:
    """Start hosts until the server closes the connection, which is the socket of this number."""
    leave_signals_to_server()
    gc.collect()  # what is collected later must not close what has such a number then
    for other in [int(each.name) for each in DESCRIPTORS.iterdir()]:
        if other > STDERR and other != descriptor:
            with suppress(OSError):  # of the one that listed them
                os.close(other)
    gc.freeze()  # a collector that writes to what is shared would make copies of it
    with suppress(EOFError):
        _serve(Channel(socket.socket(fileno=descriptor)))


def _serve(channel: Channel) -> None:
    while True:
        message, descriptors = channel.receive_with_descriptors()
        if isinstance(message, StartHost):
            _import_library(message.options.spec)
            channel.send(_start_host(channel, descriptors[0], message.options))
        elif isinstance(message, WaitForProcess):
            channel.send(wait_for_child(message.pid))


def _import_library(spec: ModelSpec) -> None:
    """Import what a model's host needs, once for all; a broken library stops no host but those that need it."""
    kind = spec.source.partition(":")[0]
    if kind in IMPORTS and kind not in _imported:
        _imported.add(kind)
        with suppress(Exception):
            IMPORTS[kind]()
        gc.collect()
        gc.freeze()


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
