"""A server as a process: it ends with status 0 when asked to, and by itself, with another, where it can't go on."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from layertap.service.http.sockets import UnixListener, format_url
from layertap.service.signals import release_hangups

log = logging.getLogger("layertap")
EXIT_FAILED = 70  # as sysexits.h has it: an error of the software
WATCH_INTERVAL_S = 0.1
LAST_ANSWERS_S = 4.0  # for the last answers of a process that can't go on
TICK_S = 0.1
# Of a delay at its end: connections in use move elsewhere, and none is closed under a request.
CLOSE_CONNECTIONS_S = 1.0
ACCEPT_S = 0.5  # for whoever has connected to come in, and connections in use to be told that they end
CLOSE_HEADER = (b"connection", b"close")
CHILD_END_S = 1.0  # for a compiler to remove its files


class Server(uvicorn.Server):
    """A uvicorn server that also ends by itself where ``alive`` says no.

    When it is asked to end it goes on serving for ``delay`` seconds, or until it is asked again: balancers need time
    to see that it is not ready any more. ``on_drain`` is called on the event loop when that begins, ``on_end`` when it
    stops accepting, ``on_hangup`` at each SIGHUP, which is the system's without it. Read against uvicorn 0.32 to 0.54.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        alive: Callable[[], bool],
        on_end: Callable[[], None],
        on_drain: Callable[[], None] = lambda: None,
        delay: float = 0.0,
        on_hangup: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._on_hangup = on_hangup
        self._alive = alive
        self._on_end = on_end
        self._on_drain = on_drain
        self._delay = delay
        self._drain_ended = not delay

    def run_until_stopped(self, listeners: Sequence[socket.socket] | None = None) -> NoReturn:
        """Serve until SIGTERM, SIGINT or a failure that lasts, then end the process."""
        # To the end: uvicorn puts back what it finds, which would end ``_exit_process`` too.
        for number in HANDLED_SIGNALS:
            signal.signal(number, self.handle_exit)
        threading.Thread(target=self._watch_alive, name="watch", daemon=True).start()
        status = 0
        try:
            self.run(list(listeners) if listeners else None)
        except SystemExit as error:  # it could not start
            status = int(error.code or 0)
        could_start = self.started or not self.lifespan.should_exit
        _exit_process(status if could_start and self._alive() else EXIT_FAILED)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say where."""
        await super().startup(sockets)
        if self._on_hangup is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
            release_hangups()
        config = self.config
        for listener in sockets or ():
            log.info("listening on %s", format_url(listener.getsockname(), "https" if config.is_ssl else "http"))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Go on as long as others may not know of it, then stop accepting, and wait for what was accepted."""
        await self._drain()
        log.info("stopping")
        await self._close_after_replies()
        for listener in sockets or ():
            if isinstance(listener, UnixListener):
                listener.remove_path()
        await asyncio.sleep(ACCEPT_S)
        self._on_end()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then neither cancels requests nor has the application end
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first begins the delay, the next one ends it; a later SIGINT cancels what is unanswered."""
        if self.should_exit and not self._drain_ended:
            self._drain_ended = True
        else:
            super().handle_exit(sig, frame)

    async def _drain(self) -> None:
        if self._drain_ended or not self._alive():
            return
        log.info("draining", extra={"fields": {"seconds": self._delay}})
        self._on_drain()
        closing_seconds = min(CLOSE_CONNECTIONS_S, self._delay / 2)
        await self._serve_for(self._delay - closing_seconds)
        await self._close_after_replies()
        await self._serve_for(closing_seconds)
        self._drain_ended = True

    async def _serve_for(self, seconds: float) -> None:
        """Serve for so long, or until asked again to end, or until that is impossible."""
        end = time.monotonic() + seconds
        while not self._drain_ended and self._alive() and time.monotonic() < end:
            await self.on_tick(0)  # the date in replies
            await asyncio.sleep(TICK_S)

    async def _close_after_replies(self) -> None:
        """From now on whoever is answered is told that the connection ends with that."""
        if CLOSE_HEADER not in self.config.encoded_headers:
            self.config.encoded_headers.append(CLOSE_HEADER)
        await self.on_tick(0)

    def _watch_alive(self) -> None:
        """In a thread of its own: the event loop may hang with the rest."""
        while self._alive():
            time.sleep(WATCH_INTERVAL_S)
        self.should_exit = True
        time.sleep(LAST_ANSWERS_S)
        _exit_process(EXIT_FAILED)


def _exit_process(status: int) -> NoReturn:
    """End at once: a thread that still computes would abort the process, or hang it, while Python tidies up."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    end = time.monotonic() + CHILD_END_S
    for child in children:
        child.join(max(end - time.monotonic(), 0.0))
        child.kill()
    logging.shutdown()
    os._exit(status)
