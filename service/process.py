"""A server as a process: it ends with 0 when asked to, and by itself, with another status, where it can't go on."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import uvicorn

FAILED = 70  # as sysexits.h has it: an error of the software
LOOK_S = 0.1
LAST_S = 4.0  # for the last answers of a process that can't go on
CHILD_S = 1.0  # for a compiler to remove its files


class Server(uvicorn.Server):
    """Ends by itself where ``alive`` says no. ``on_end`` is called on the event loop when it begins to end."""

    def __init__(self, config: uvicorn.Config, alive: Callable[[], bool], on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._alive = alive
        self._on_end = on_end

    def work(self) -> NoReturn:
        """Serve until SIGTERM, SIGINT or a failure that lasts, then end the process."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        status = 0
        try:
            with suppress(KeyboardInterrupt):  # uvicorn drains, and raises again what it was asked to end by
                self.run()
        except SystemExit as ended:  # by SIGTERM, or because it could not start
            status = int(ended.code or 0)
        _leave(status if self._alive() else FAILED)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and wait for what was accepted."""
        self._on_end()
        await super().shutdown(sockets)

    def _watch(self) -> None:
        """In a thread of its own: the event loop may hang with the rest."""
        look = threading.Event()
        while self._alive():
            look.wait(LOOK_S)
        self.should_exit = True
        look.wait(LAST_S)
        _leave(FAILED)


def ends_with_0() -> None:
    """From now on SIGTERM ends this process with 0: it was asked to, and did."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def _leave(status: int) -> NoReturn:
    """End at once: a thread that still computes would abort the process, or hang it, while Python tidies up."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(CHILD_S)
        child.kill()
    logging.shutdown()
    os._exit(status)
