"""One HTTP/1.1 connection: uvicorn's own, with the bounds on heads and on slow peers that it lacks.

Read against ``uvicorn.protocols.http.httptools_impl`` of uvicorn 0.54, the version that ``pyproject.toml`` has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import uvicorn
from fastapi import FastAPI
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from layertap.service.formats.buffers import SMALL
from layertap.service.http.exchange import CONSTANT_HEADERS
from layertap.service.http.problems import Problem, encode_problem, format_retry_after
from layertap.service.metrics import ConnectionReason, Metrics
from layertap.service.settings import UNIX, Settings

log = logging.getLogger("layertap.access")
TOO_MANY = 503
KINDS: dict[ConnectionReason, str] = {  # what problems are called
    "bad_request": "bad-request",
    "head_timeout": "head-timeout",
    "head_too_large": "head-too-large",
    "limit": "too-many-connections",
}
MAX_FIELDS = 256  # each costs far more memory and time than its size suggests
LINGER_S = 5  # how long a peer that still sends is listened to after its reply
MAX_REFUSED = 64  # connections over the limit that get a reply: they stay open until their clients have read it


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection whose requests have heads of bounded size that arrive, and replies that are taken, in bounded time.

    httptools keeps a field in memory until it ends, so no more than ``max_head_bytes`` (and one read) may go by that
    are no body: a head, trailers, what frames chunks, empty lines between requests.
    """

    def __init__(self, *args: Any, settings: Settings, metrics: Metrics, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._metrics = metrics
        self._bytes_since_body = 0
        self._in_head = False
        self._ignores_input = False
        self._head_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None
        self._unanswered: deque[RequestResponseCycle] = deque()  # oldest first, of a pipeline

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, but not for ever; where there are too many connections, refuse it."""
        super().connection_made(transport)
        if self._settings.uds is not None:
            self.client = (UNIX, 0)  # as ``TRUSTED_PROXIES`` names such a peer, which has no address
        self._metrics.add_connections(1)
        self._replies = ReplyTransport(transport, self._end_after_reply, self._settings.send_timeout_s, self.logger)
        too_many = len(self.connections) - self._settings.max_connections
        if too_many <= 0:
            self._start_head_timer()
        elif too_many <= MAX_REFUSED:
            hint = "keep connections open between requests, or come again later"
            self._refuse(TOO_MANY, "limit", "the server has as many connections open as it may", hint)
        else:
            self._metrics.count("connections_refused_total", "limit")
            self._ignores_input = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End every timer, and every request; uvicorn tells the last one only, and keeps its timer after an error."""
        self._metrics.add_connections(-1)
        self._stop_head_timer()
        self._replies.stop_watching()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._unset_keepalive_if_required()
        self._replies.end = self.transport.close  # nothing waits for the garbage collector
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
            if (leave := cycle.scope["state"]["on_disconnect"]) is not None:
                leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, within the bounds."""
        if self._ignores_input or self.transport.is_closing():
            return
        self._bytes_since_body += len(data)
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                break
            except HttpParserUpgrade as upgrade:  # a head that offers one has come, and data goes on behind it
                data = self._format_head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = HttpRequestParser(self)  # the old one takes no more where the client wants it closed
            except HttpParserError:
                if not self._ignores_input:
                    detail = "this is no HTTP/1.1 request"
                    self._refuse(400, "bad_request", detail, "let a client library write it")
                break
        self._check_bounds()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is whole: its request begins, unless it is too large, or has to be read again without its upgrade."""
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if size > self._settings.max_head_bytes or len(self.headers) > MAX_FIELDS:
            self._refuse_large_head()
            raise _StopParsing
        if self.parser.get_method() == b"CONNECT":  # all that follows would be taken for another protocol
            raise _StopParsing
        if self.parser.should_upgrade():
            return
        self._in_head = False
        if self._head_timer is not None:
            self._stop_head_timer()
        super().on_headers_complete()
        self.cycle.transport = self._replies  # type: ignore[assignment]
        self.cycle.scope["state"]["on_disconnect"] = None
        self._unanswered.append(self.cycle)
        self.headers = []  # what comes as a trailer is none of the request's headers

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._bytes_since_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._bytes_since_body = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()
            # A long body has stopped that, and nobody would see the peer leave.
            if self.flow.read_paused and not self.pipeline:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """A reply is handed to the system, or waits for that."""
        self._unanswered.popleft()
        self._replies.end_reply()
        super().on_response_complete()
        if self.transport.is_closing():
            self._replies.watch_last_reply()
        if self._in_head:  # it waited behind a pipeline
            self._check_bounds()

    def pause_writing(self) -> None:
        """More of a reply waits to be sent than the system takes: look whether the peer reads."""
        super().pause_writing()
        self._replies.watch()

    def resume_writing(self) -> None:
        """The peer reads."""
        self._replies.stop_watching()
        super().resume_writing()
        self._replies.watch_last_reply()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for long; whoever has not even read the last reply does not get the rest."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _format_head_without_upgrade(self) -> bytes:
        """The head again, of a client that offers another protocol: Java's offers HTTP/2, and expects HTTP/1.1 then.

        The parser takes no body of a request that is to be upgraded, so it must not see the offer.
        """
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        return b"".join((first, *fields, b"\r\n"))

    def _check_bounds(self) -> None:
        """Refuse a head that is too large, and wait for the next one."""
        if self._ignores_input:
            return
        if self._bytes_since_body > self._settings.max_head_bytes:
            self._refuse_large_head()
            return
        cycle = self.cycle
        waits = self._in_head or cycle is None or cycle.response_complete
        # Behind a pipeline nothing is read: the peer can't send the rest.
        if waits and self._head_timer is None and not self.pipeline and not self.transport.is_closing():
            self._start_head_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self._end_without_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_without_head(self) -> None:
        self._head_timer = None
        if self._in_head:
            seconds = self._settings.head_timeout_s
            self._refuse(408, "head_timeout", f"the request's head did not arrive within {seconds:g} s")
        else:
            self._end_after_reply()

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_after_reply(self) -> None:
        """Close after a reply; where more may still arrive, say no more but listen for a while.

        A system that gets bytes nobody reads tells the peer so, and the peer throws away what it has not read yet.
        """
        more_may_arrive = self._ignores_input or self._in_head or (self.cycle is not None and self.cycle.more_body)
        if self.pipeline or not more_may_arrive:
            self._close()
            return
        self._ignores_input = True
        self._stop_head_timer()
        self._replies.flush()
        if self.transport.can_write_eof():  # TLS has no such half; the reply has said that it is the last
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_S, self._close)

    def _close(self) -> None:
        self._replies.flush()
        self.transport.close()
        self._replies.watch_last_reply()

    def _refuse_large_head(self) -> None:
        limit = self._settings.max_head_bytes
        detail = f"the request has more than {limit} bytes or {MAX_FIELDS} header fields beside its body"
        self._refuse(431, "head_too_large", detail, "send what is long in the body")

    def _refuse(self, status: int, reason: ConnectionReason, detail: str, hint: str = "") -> None:
        """Say what is wrong and close; where an earlier request is whole, once that is answered, and without a word."""
        self._ignores_input = True
        self._replies.flush()
        request_id = secrets.token_hex(16)
        self._metrics.count("connections_refused_total", reason)
        fields = {"request_id": request_id, "status": status, "reason": reason}
        log.warning("refused with %d: %s", status, detail, extra={"fields": fields})
        cycle = self.cycle
        if self._answers() and not cycle.more_body:
            cycle.keep_alive = False
            return
        if self._answers() and (cycle.response_started or self.pipeline):
            self._close()
        else:
            self.transport.write(self._format_refusal(status, KINDS[reason], detail, hint, request_id))
            self._end_after_reply()
        if self._answers():  # it waits for the rest of its body
            cycle.disconnected = True
            cycle.message_event.set()

    def _format_refusal(self, status: int, kind: str, detail: str, hint: str, request_id: str) -> bytes:
        """The bytes of a reply that no request of uvicorn's stands behind."""
        later = {"Retry-After": format_retry_after(1)} if status == TOO_MANY else {}
        reply = encode_problem(Problem(status, kind, detail, request_id, hint, headers=later))
        headers = [
            *self.server_state.default_headers,
            *reply.raw_headers,
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
            (b"server-timing", b"total;dur=0"),
            *CONSTANT_HEADERS,
        ]
        lines = b"".join(b"%b: %b\r\n" % field for field in headers)
        return b"%b%b\r\n%b" % (STATUS_LINE[status], lines, bytes(reply.body))


class _StopParsing(Exception):  # noqa: N818  (it only gets out of the parser)
    """The parser is to stop: the head is refused."""


MIN_BYTES_PER_SECOND = 1024  # that whoever asked for a large reply has to take


class ReplyTransport:
    """A transport as uvicorn's cycles use it: a reply's head goes with what comes next, and ``end`` ends it.

    A head by itself would be a call of the system, and a packet, of its own. A connection whose peer takes too little
    of what waits to be sent is aborted: once it is watched, that is looked at every ``timeout_s``.
    """

    def __init__(
        self, transport: asyncio.Transport, end: Callable[[], None], timeout_s: float, logger: logging.Logger
    ) -> None:
        self.is_closing = transport.is_closing
        self.end = end
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._logger = logger
        self._head = b""
        self._flushing: asyncio.Handle  # where there is a head
        self._begun = False
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        """Send data; the first of a reply waits for more, but no longer than until the event loop's next turn."""
        if not self._begun:
            self._begun, self._head = True, data
            self._flushing = self._loop.call_soon(self.flush)
            return
        if self._head and len(data) <= SMALL:
            data, self._head = self._head + data, b""
            self._flushing.cancel()
        elif self._head:
            self.flush()
        self._transport.write(data)

    def end_reply(self) -> None:
        """What is written from now on is another reply."""
        if self._head:
            self.flush()
        self._begun = False

    def close(self) -> None:
        """End the connection after what was written."""
        self.flush()
        self.end()

    def flush(self) -> None:
        """Send what waits for more, unless the connection is closed by now."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def watch(self) -> None:
        """Begin to look whether the peer reads, unless that has begun."""
        if self._timer is None:
            self._unsent_bytes = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self._timeout_s, self._check)

    def watch_last_reply(self) -> None:
        """The same where the connection is closing: what is left of the last reply is kept no longer either."""
        if self._transport.is_closing() and self._transport.get_write_buffer_size():
            self.watch()

    def stop_watching(self) -> None:
        """The peer reads, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        sent_bytes = self._unsent_bytes - self._transport.get_write_buffer_size()
        if sent_bytes < MIN_BYTES_PER_SECOND * self._timeout_s:
            self._logger.warning("a reply was not read")
            self._transport.abort()
        else:
            self.watch()


SHUTDOWN_SHARE = 0.9  # of the deadline: admitted requests are expected to end within less; supervisors wait as long
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2: with forward secrecy and authenticated; TLS 1.3 has no others


def make_server_config(
    app: FastAPI, settings: Settings, metrics: Metrics | None = None, **options: Any
) -> uvicorn.Config:
    """The configuration of uvicorn; ``options`` are more of its own options.

    ``metrics`` are where connections are counted, where that is wanted.
    """
    return uvicorn.Config(
        app.middleware_stack or app,  # what FastAPI does around its stack is of no use here
        **{
            "lifespan": "on",  # else uvicorn serves an application that could not start
            "http": partial(BoundedHttpProtocol, settings=settings, metrics=metrics or Metrics()),
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
