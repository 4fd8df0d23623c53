"""The server's process: it ends with status 0 when asked to, and with another if it can't go on."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from socket import socket
from threading import Thread
from typing import NoReturn

import uvicorn
import uvloop

from layertap.service.engine.models.model_manager import ModelManager
from layertap.service.signals import release_hangups

log = logging.getLogger("layertap")
EXIT_FAILED = 70  # as sysexits.h has it: an error of the software
INTERVAL_S = 0.1
LAST_ANSWERS_S = 4.0  # for the last answers of a process that can't go on
LAST_REPLIES_S = 0.5  # at least, for connections in use to end with a reply
CHILD_END_S = 1.0  # for a compiler to remove its files


def run_until_stopped(
    config: uvicorn.Config,
    listeners: list[socket],
    manager: ModelManager,
    drain_delay_s: float,
    on_hangup: Callable[[], None] | None = None,
) -> NoReturn:
    """Serve until SIGTERM, SIGINT or a lasting failure, then end the process.

    Asked to end, it serves on for ``drain_delay_s``, without being ready, or until it is asked again: balancers need
    time to notice. Then it answers what it has accepted; another SIGINT ends that. ``on_hangup`` is called on the
    event loop at each SIGHUP.
    """
    asked = SimpleQueue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.put(number))
    # This thread sees signals and failures even if the event loop hangs; uvicorn takes signals in this one only.
    server, loop = uvicorn.Server(config), uvloop.new_event_loop()
    serving = Thread(target=loop.run_until_complete, args=[server.serve(listeners)], name="server", daemon=True)
    serving.start()
    while serving.is_alive() and not server.started:
        serving.join(INTERVAL_S / 10)
    if on_hangup is not None:
        signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(on_hangup))
        release_hangups()

    def wait(seconds: float) -> int | None:
        """The next signal that asks to end; None after these seconds, or if the server has ended or can't go on."""
        end = time.monotonic() + seconds
        while manager.alive and serving.is_alive() and time.monotonic() < end:
            with suppress(Empty):
                return asked.get(timeout=INTERVAL_S)
        return None

    if is_asked := wait(math.inf) is not None:
        if drain_delay_s:
            log.info("draining", extra={"fields": {"seconds": drain_delay_s}})
        manager.ending = True
        wait(max(drain_delay_s, LAST_REPLIES_S))
    log.info("stopping")
    loop.call_soon_threadsafe(manager.abort_loading)
    server.should_exit = True
    while wait(math.inf) not in (None, signal.SIGINT):
        pass
    if not manager.alive:
        serving.join(LAST_ANSWERS_S)
    # At once: a thread that still computes would abort the process, or hang it, while Python tidies up.
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(CHILD_END_S)
    logging.shutdown()
    os._exit(0 if is_asked and manager.alive else EXIT_FAILED)
