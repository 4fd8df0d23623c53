"""One HTTP/1.1 connection: uvicorn's own, with the bounds on heads and on slow peers that it lacks."""

from __future__ import annotations

import asyncio
import uuid
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from layertap.service.http.middleware import make_context_headers
from layertap.service.http.problems import make_problem
from layertap.service.settings import Settings

MOST_FIELDS = 256  # each costs far more memory and time than its bytes tell
FIRST_S = 1  # for the first request of a connection, once the server takes no more of them
LEAVE_S = 0.3  # how long a request that was on its way when the connection ended may arrive
LINGER_S = 5  # how long a peer that still sends is listened to after its reply
SLOWEST = 1024  # bytes a second that whoever asked for a large reply has to take


class Connection(HttpToolsProtocol):
    """A connection whose requests have heads of bounded size that arrive, and replies that are taken, in bounded time.

    httptools keeps a field in memory until it ends, so no more than ``max_head_bytes`` (and one read) may go by that
    are no body: a head, trailers, what frames chunks, empty lines between requests.
    """

    def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._silent = 0  # bytes since the last of a body
        self._in_head = False
        self._asked = False  # whether there has been a request
        self._deaf = False
        self._upgrade = False
        self._head_timer: TimerHandle | None = None
        self._send_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None
        self._unsent = 0
        self._open: deque[RequestResponseCycle] = deque()  # requests that are not answered, oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, but not for ever."""
        super().connection_made(transport)
        self._for_cycles = _Transport(transport, self._end)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._head_came()
        self._all_sent()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._unset_keepalive_if_required()
        self._for_cycles.close = self.transport.close  # nothing waits for the garbage collector
        for cycle in self._open:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, within the bounds."""
        if self._deaf or self.transport.is_closing():
            return
        self._silent += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        self._parsed()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is whole: its request begins, unless it is too large."""
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if size > self._settings.max_head_bytes or len(self.headers) > MOST_FIELDS:
            self._refuse_head()
            raise _TooLargeHead
        if self.parser.get_method() == b"CONNECT":
            raise _NoProxyError
        self._upgrade = self.parser.should_upgrade()
        if self._upgrade:
            return
        self._in_head = False
        self._asked = True
        self._head_came()
        super().on_headers_complete()
        self.cycle.transport = self._for_cycles  # type: ignore[assignment]
        self._open.append(self.cycle)
        self.headers = []  # what comes as a trailer is none of the request's headers

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._silent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._silent = 0
        if not self._upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A reply is handed to the system, or waits for that."""
        self._open.popleft()
        super().on_response_complete()
        self._expect_end()

    def pause_writing(self) -> None:
        """More of a reply waits to be sent than the system takes: look whether the peer reads."""
        super().pause_writing()
        self._expect_sent()

    def resume_writing(self) -> None:
        """The peer reads."""
        self._all_sent()
        super().resume_writing()
        self._expect_end()

    def shutdown(self) -> None:
        """The server ends: what is asked for here already is answered, and nothing more."""
        if self._open:
            super().shutdown()
        elif self._in_head or self._deaf or self.transport.is_closing():
            return  # its request is answered, or refused, and then it is closed
        elif not self._asked:  # just accepted
            self.loop.call_later(FIRST_S, self._end_unasked)
        else:
            self._say_end(LEAVE_S)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for long; whoever has not even read the last reply does not get the rest."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _parse(self, data: bytes) -> None:
        try:
            left = self._fed(data)
            while left is not None:
                again = self._without_upgrade()
                self.parser = HttpRequestParser(self)  # the old one takes no more where the client wants it closed
                self.parser.feed_data(again)
                left = self._fed(left)
        except HttpParserError:
            if not self._deaf:
                self._refuse(400, "bad-request", "this is no HTTP/1.1 request", "let a client library write it")

    def _parsed(self) -> None:
        """What was read is within the bounds, or refused."""
        if self._deaf:
            return
        if self._silent > self._settings.max_head_bytes:
            self._refuse_head()
        elif self._head_timer is None and (self._in_head or not self._open) and not self.transport.is_closing():
            self._expect_head()

    def _fed(self, data: bytes | memoryview) -> memoryview | None:
        """What is left after a head that offers an upgrade, be it empty; None where there is no such head."""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            return memoryview(data)[upgrade.args[0] :]
        return None

    def _without_upgrade(self) -> bytes:
        """The head again, for who offers another protocol: clients that would rather speak HTTP/2 expect HTTP/1.1 then.

        The parser takes no body of a request that is to be upgraded, so it must not see that it was.
        """
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        return b"".join((first, *fields, b"\r\n"))

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self._late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self.pipeline:  # it is not read before earlier requests are answered
            self._expect_head()
        elif self._in_head:
            seconds = self._settings.head_timeout_s
            self._refuse(408, "head-timeout", f"the request's head did not arrive within {seconds:g} s")
        else:
            self._end()

    def _end(self) -> None:
        """Close after a reply; where more may still arrive, say no more but listen for a while.

        A system that gets bytes nobody reads tells the peer so, and the peer throws away what it has not read yet.
        """
        if self.pipeline or not self._arriving():
            self._close()
            return
        self._say_end(LINGER_S)

    def _end_unasked(self) -> None:
        if not (self._asked or self._in_head or self._deaf or self.transport.is_closing()):
            self._say_end(LEAVE_S)

    def _say_end(self, seconds: float) -> None:
        """Say no more, and close when the peer has had time to hear of it: what it sends until then resets nothing."""
        self._deaf = True
        self._head_came()
        self.transport.write_eof()
        self._linger_timer = self.loop.call_later(seconds, self._close)

    def _arriving(self) -> bool:
        """Whether the peer may be sending: what was refused, a head, or a body."""
        return self._deaf or self._in_head or (self.cycle is not None and self.cycle.more_body)

    def _close(self) -> None:
        self.transport.close()
        self._expect_end()

    def _expect_end(self) -> None:
        """What is left of the last reply is not kept for a peer that does not read it."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size() and self._send_timer is None:
            self._expect_sent()

    def _expect_sent(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._settings.send_timeout_s, self._slow)

    def _all_sent(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _slow(self) -> None:
        taken = self._unsent - self.transport.get_write_buffer_size()
        if taken < SLOWEST * self._settings.send_timeout_s:
            self.logger.warning("a reply was not read")
            self.transport.abort()
        else:
            self._expect_sent()

    def _refuse_head(self) -> None:
        most = self._settings.max_head_bytes
        detail = f"the request has more than {most} bytes or {MOST_FIELDS} header fields beside its body"
        self._refuse(431, "head-too-large", detail, "send what is long in the body")

    def _refuse(self, status: int, kind: str, detail: str, hint: str = "") -> None:
        """Say what is wrong and close; where an earlier request is whole, once that is answered, and without a word."""
        self._deaf = True
        request_id = uuid.uuid4().hex
        self.logger.warning("refused with %d: %s", status, detail, extra={"fields": {"request_id": request_id}})
        if len(self._open) > 1 and self._open[-1].more_body:  # it has not begun, and will not be whole
            self._open.pop()
            self.pipeline.popleft()
        last = self._open[-1] if self._open else None
        if last is not None and not last.more_body:
            last.keep_alive = False
        elif last is not None and last.response_started:
            self._close()
        else:
            self.transport.write(self._written(status, kind, detail, hint, request_id))
            if last is not None:  # it waits for the rest of its body
                last.disconnected = True
                last.message_event.set()
            self._end()

    def _written(self, status: int, kind: str, detail: str, hint: str, request_id: str) -> bytes:
        reply = make_problem(status, kind, detail, request_id, hint=hint)
        headers = [
            *self.server_state.default_headers,
            *reply.raw_headers,
            (b"connection", b"close"),
            *make_context_headers(request_id, "total;dur=0"),
        ]
        lines = b"".join(b"%b: %b\r\n" % field for field in headers)
        return b"%b%b\r\n%b" % (STATUS_LINE[status], lines, bytes(reply.body))


class _Transport:
    """A transport as uvicorn's cycles use it, closed in another way."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _TooLargeHead(Exception):  # noqa: N818  (it only gets out of the parser)
    """The parser is to stop."""


class _NoProxyError(Exception):
    """The parser is to stop: it would take all that follows for another protocol."""
