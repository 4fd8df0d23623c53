"""One HTTP/1.1 connection: uvicorn's protocol, with bounds on heads, on the wait for them, and on slow readers."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import re
import socket
import sys
import termios
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from layertap.service.formats.buffers import SMALL, Buffer
from layertap.service.http.exchange import Exchange
from layertap.service.metrics import ConnectionReason, Metrics
from layertap.service.settings import UNIX, Settings

log = logging.getLogger("layertap.access")
MAX_PIPELINED = 128  # requests of a connection that wait for the one in hand
EXTRA, EXTRA_S = 128, 2.0  # connections over the limit that are answered, and seconds to send a request on them
MIN_BYTES_PER_S = 1024  # a slower reader of a reply is cut
OFFER = re.compile(rb"\nupgrade:", re.IGNORECASE)  # of HTTP/2, by Java's client
PROBE, PROBE_S = b"HTTP/1.1 100 Continue\r\n\r\n", 0.1  # clients ignore it
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2: with forward secrecy and authenticated; TLS 1.3 has no others
SHUTDOWN_SHARE = 0.9  # of the deadline: admitted requests are expected to end within less; supervisors wait as long


class _Requests(HttpToolsProtocol):
    """uvicorn's protocol, with a bound on pipelined requests."""

    def on_headers_complete(self) -> None:
        """Begin a request; trailers after its body are not part of its head."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests wait")  # the parser takes it as invalid HTTP
        super().on_headers_complete()
        self.headers = []

    def on_body(self, body: bytes) -> None:
        """Keep a piece of a body; uvicorn bounds that of the request in hand."""
        super().on_body(body)
        if not self.pipeline and not self.cycle.response_complete:
            self.app_state["connection"].unparsed = 0

    def on_message_complete(self) -> None:
        """Resume reading, which a long body has paused, so that a client that leaves is noticed."""
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, after the replies to the requests before it."""
        last = self.cycle
        if last is None or last.response_complete or (last.more_body and not (self.pipeline or last.response_started)):
            super().send_400_response(msg)
        elif last.more_body:
            self.transport.close()
        else:
            last.keep_alive = False
            self.transport.pause_reading()


class Connection(asyncio.Protocol, asyncio.Transport):
    """The protocol of a socket's transport, and the transport of uvicorn's protocol."""

    def __init__(self, *, settings: Settings, metrics: Metrics, app_state: dict[str, Any], **options: Any) -> None:
        self._uvicorn = _Requests(app_state={**app_state, "connection": self}, **options)
        self._settings, self._metrics = settings, metrics
        self._loop = asyncio.get_running_loop()
        self.exchange: Exchange | None = None  # the request in hand
        self.unparsed = 0  # bytes since that began, or since the last piece of its body
        self._read = b""  # the last bytes of an unfinished head
        self._waits_since = self._loop.time()  # for a request; inf: for none
        self._head: bytes | None = b""  # of a reply, held back; None: the reply has not begun
        self._written, self._taken, self._taken_at = 0, 0, self._loop.time()
        self._peer_ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, for a limited time."""
        self._transport = transport
        extra = {name: transport.get_extra_info(name) for name in ("socket", "sslcontext", "sockname", "peername")}
        self._socket: socket.socket = extra["socket"]
        if self._socket.family == socket.AF_UNIX:  # its clients have no address; settings name such proxies UNIX
            extra |= {"socket": None, "peername": (UNIX, 0)}
        asyncio.Transport.__init__(self, extra)
        for name in ("is_closing", "pause_reading", "resume_reading", "abort"):
            setattr(self, name, getattr(transport, name))
        self.pause_writing = self._uvicorn.pause_writing  # type: ignore[method-assign]
        self.resume_writing = self._uvicorn.resume_writing  # type: ignore[method-assign]
        self._metrics.connections += 1
        too_many = self._metrics.connections - self._settings.max_connections
        self.is_extra = too_many > 0
        self._patience_s = min(self._settings.head_timeout_s, EXTRA_S if self.is_extra else math.inf)
        self._timer = self._loop.call_later(self._patience_s, self._check_times)
        self._uvicorn.connection_made(self)
        if too_many > EXTRA:
            self._metrics.count("connections_refused_total", "limit")
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request in hand; nothing of the connection waits for the garbage collector."""
        self._metrics.connections -= 1
        self._timer.cancel()
        self._uvicorn.connection_lost(None)  # with an error it would keep a timer
        del self._uvicorn, self.pause_writing, self.resume_writing
        if self.exchange is not None:
            self.exchange.leave()

    def begin(self, exchange: Exchange) -> None:
        """Take a request in hand."""
        self.exchange, self._read, self._head = exchange, b"", None
        self.unparsed, self._waits_since = 0, math.inf

    def end(self, exchange: Exchange) -> None:
        """Let go of a request."""
        if self.exchange is exchange:
            self.exchange = None
        if self._peer_ended and not self.is_closing() and self._is_idle():
            self.close()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, unless too much comes that is not a body: the parser keeps a field until it ends."""
        if self.unparsed > self._settings.max_head_bytes:
            self._give_up("head_too_large")
            return
        self.unparsed += len(data)
        if self.exchange is None:
            self._waits_since = min(self._waits_since, self._loop.time())
            # The parser skips the body of a request that offers another protocol, so the field gets another name.
            seen = self._read + data
            if offer := OFFER.search(seen.partition(b"\r\n\r\n")[0]):
                colon = offer.end() - 1 - len(self._read)
                data = data[:colon] + b"-ignored" + data[colon:]
            self._read = seen[-len(b"\nupgrade") :]
        self._uvicorn.data_received(data)
        if self._transport.is_closing():  # it has answered 400
            self._metrics.count("connections_refused_total", "bad_request")

    def eof_received(self) -> bool:
        """Whether the connection stays open: a client that has sent its last request may still read the reply."""
        is_tls = self.get_extra_info("sslcontext") is not None  # which can't be half-closed
        if is_tls or self._is_idle() or self._uvicorn.cycle.scope["http_version"] == "1.0":
            return False
        self._peer_ended = True
        self._loop.call_soon(self._probe, PROBE)
        return True

    def _is_idle(self) -> bool:
        """Whether no whole request waits for its reply."""
        last = self._uvicorn.cycle
        return last is None or last.response_complete or (last.more_body and not self._uvicorn.pipeline)

    def _probe(self, data: bytes) -> None:
        """Send this, and abort once the system of a client that is gone has reset the connection because of it."""
        if self.exchange is None or self.exchange.facts.status or self.is_closing():
            return
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # the event loop does not report it
            self._transport.abort()
            return
        self._transport.write(data)
        self._loop.call_later(PROBE_S, self._probe, b"")

    def write(self, data: Buffer) -> None:  # type: ignore[override]
        """Send; a reply's head is sent together with what follows within this turn of the loop."""
        self._written += len(data)
        if self._head is None:
            self._head, self._taken_at = bytes(data), self._loop.time()
            self._flushing = self._loop.call_soon(self._flush)
            return
        if self._head and len(data) <= SMALL:
            data, self._head = self._head + data, b""
            self._flushing.cancel()
        elif self._head:
            self._flush()
        if not self.is_closing():
            self._transport.write(data)

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        """Close after what was written."""
        self._flush()
        self._transport.close()

    def count_taken(self) -> int:
        """Bytes that the peer has acknowledged; if the system does not say, bytes that the system has taken."""
        unsent = self._transport.get_write_buffer_size() + len(self._head or b"")
        with suppress(OSError, ValueError):  # it is closed, or its system has no such call
            unsent += int.from_bytes(fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._written - unsent

    def _check_times(self) -> None:
        """Cut the connection if no request comes, or too little of a reply is taken."""
        now, timeout_s = self._loop.time(), self._settings.send_timeout_s
        taken = self.count_taken()
        if not self._transport.get_write_buffer_size() or taken - self._taken >= MIN_BYTES_PER_S * timeout_s:
            self._taken, self._taken_at = taken, now
        if now >= self._waits_since + self._patience_s:
            self._give_up("head_timeout")
        elif now >= self._taken_at + timeout_s:
            self._give_up("slow_reader")
        else:
            due = min(self._waits_since, now) + self._patience_s
            self._timer = self._loop.call_at(min(due, now + timeout_s), self._check_times)

    def _give_up(self, reason: ConnectionReason) -> None:
        self._metrics.count("connections_refused_total", reason)
        log.warning("a connection was cut: %s", reason.replace("_", " "), extra={"fields": {"reason": reason}})
        self._transport.abort()


def make_server_config(
    app: FastAPI, settings: Settings, metrics: Metrics | None = None, **options: Any
) -> uvicorn.Config:
    """The configuration of uvicorn. ``options`` override its fields; ``metrics`` count the connections."""
    return uvicorn.Config(
        app.middleware_stack or app,  # what FastAPI does around its stack is of no use here
        **{
            "lifespan": "on",  # else uvicorn serves an application that could not start
            "http": partial(Connection, settings=settings, metrics=metrics or Metrics()),
            "ws": "none",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,  # the application has uvicorn's middleware for them
            "timeout_graceful_shutdown": math.ceil(SHUTDOWN_SHARE * settings.deadline_s),
            "timeout_keep_alive": math.ceil(settings.keepalive_s),
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
            "ssl_ciphers": CIPHERS,
            **options,
        },
    )
