"""A server as a process: it ends with 0 when asked to, and by itself, with another status, where it can't go on."""

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
from select import select
from types import FrameType
from typing import NoReturn

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from layertap.service.http.sockets import stop_connecting, url

log = logging.getLogger("layertap")
FAILED = 70  # as sysexits.h has it: an error of the software
LOOK_S = 0.1
LAST_S = 4.0  # for the last answers of a process that can't go on
TICK_S = 0.1
CLOSING_S = 1.0  # of a delay at its end: connections in use move elsewhere, and none is closed under a request
ACCEPT_S = 0.5  # for connections that have begun: round trips to far clients
ACCEPT_SOON_S = 0.1  # the same after Ctrl+C, when somebody waits
LATE_S = 0.01
LATE_LOOKS = 50  # at whether somebody still waits to be accepted
CLOSE = (b"connection", b"close")
CHILD_S = 1.0  # for a compiler to remove its files


class Server(uvicorn.Server):
    """Ends by itself where ``alive`` says no, and when it is asked to.

    Asked to, it goes on serving for ``delay`` seconds, or until it is asked again: balancers need time to see
    that it is not ready any more. ``on_drain`` is called on the event loop when that begins, ``on_end`` when it stops
    accepting.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        alive: Callable[[], bool],
        on_end: Callable[[], None],
        on_drain: Callable[[], None] = lambda: None,
        delay: float = 0.0,
    ) -> None:
        super().__init__(config)
        self._alive = alive
        self._on_end = on_end
        self._on_drain = on_drain
        self._delay = delay
        self._drained = not delay
        self._accept_s = ACCEPT_S

    def work(self, listeners: Sequence[socket.socket] | None = None) -> NoReturn:
        """Serve until SIGTERM, SIGINT or a failure that lasts, then end the process."""
        for number in HANDLED_SIGNALS:  # to the end: uvicorn puts back what it finds, which would end ``_leave`` too
            signal.signal(number, self.handle_exit)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        status = 0
        try:
            self.run(list(listeners) if listeners else None)
        except SystemExit as ended:  # it could not start
            status = int(ended.code or 0)
        _leave(status if self._alive() else FAILED)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say where."""
        await super().startup(sockets)
        for listener in sockets or ():
            log.info("listening on %s", url(listener.getsockname()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Go on as long as others may not know of it, then stop accepting, and wait for what was accepted."""
        await self._drain()
        log.info("stopping")
        await self._close_after_replies()
        for listener in sockets or ():
            stop_connecting(listener)
        await self._accept_last(sockets or ())
        self._on_end()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first begins the delay, the next one ends it; all others are uvicorn's."""
        if sig == signal.SIGINT:
            self._accept_s = ACCEPT_SOON_S
        if self.should_exit and not self._drained:
            self._drained = True
        else:
            super().handle_exit(sig, frame)

    async def _drain(self) -> None:
        if self._drained or not self._alive():
            return
        log.info("draining", extra={"fields": {"seconds": self._delay}})
        self._on_drain()
        last = min(CLOSING_S, self._delay / 2)
        await self._go_on(self._delay - last)
        await self._close_after_replies()
        await self._go_on(last)
        self._drained = True

    async def _go_on(self, seconds: float) -> None:
        """Serve for so long, or until asked again to end, or until that is impossible."""
        end = time.monotonic() + seconds
        while not self._drained and self._alive() and time.monotonic() < end:
            await self.on_tick(0)  # the date in replies
            await asyncio.sleep(TICK_S)

    async def _accept_last(self, listeners: Sequence[socket.socket]) -> None:
        """Let connections that have begun come in.

        A loop may look at its timers first: after a stall it would end here with clients that wait for it.
        """
        await asyncio.sleep(self._accept_s)
        for _ in range(LATE_LOOKS):
            if not (listeners and select(listeners, (), (), 0)[0]):
                return
            await asyncio.sleep(LATE_S)

    async def _close_after_replies(self) -> None:
        """From now on whoever is answered is told that the connection ends with that."""
        if CLOSE not in self.config.encoded_headers:
            self.config.encoded_headers.append(CLOSE)
        await self.on_tick(0)

    def _watch(self) -> None:
        """In a thread of its own: the event loop may hang with the rest."""
        look = threading.Event()
        while self._alive():
            look.wait(LOOK_S)
        self.should_exit = True
        look.wait(LAST_S)
        _leave(FAILED)


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
