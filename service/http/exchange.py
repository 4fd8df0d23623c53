"""One request and its reply on their way: both are counted, and the reply gets the headers that every reply has."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, cast

from starlette.types import Message, Receive, Scope, Send

from layertap.models.errors import LayertapError
from layertap.service.engine.engine import Engine
from layertap.service.errors import ClientGoneError, ending_error
from layertap.service.http.buffers_response import LARGE
from layertap.service.http.compression import CompressedReply, choose_coding, is_compressible
from layertap.service.http.problems import ProblemEncoder, describe_error, encode_problem
from layertap.service.http.timeout import Timeout
from layertap.service.timings import RequestFacts, Timings

if TYPE_CHECKING:
    from layertap.service.engine.admit.admission import Ticket
    from layertap.service.http.tracing import RequestTrace

ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
CONSTANT_HEADERS = (
    (b"vary", b"Accept, Accept-Encoding"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),  # features of somebody's pictures
    (b"content-security-policy", b"frame-ancestors 'none'"),  # pages add what they need: a browser obeys both
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


class Exchange:
    """A request and its reply; what the server keeps of them until the reply is sent.

    ``head`` has the first value of each of the ``headers``. ``timings`` and ``facts`` are the request's account. Where
    ``receive`` has set them, ``ticket`` is given back, and ``timeout`` explains errors of late requests.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, engine: Engine) -> None:
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.head = dict(reversed(self.headers))
        request_id = self.head.get(b"x-request-id", b"")
        if not (0 < len(request_id) <= 64 and ID_CHARACTERS.issuperset(request_id)):
            request_id = os.urandom(16).hex().encode()
        client = scope.get("client") or ("",)
        self.facts = RequestFacts(request_id.decode(), scope["method"], scope["path"], client[0])
        self.timings = Timings(facts=self.facts)
        self.engine = engine
        self.admin = False
        self.keeps_watching = False
        self.ticket: Ticket | None = None
        self.timeout: Timeout | None = None
        self.trace: RequestTrace | None = None
        self.encode_problem: ProblemEncoder = encode_problem
        self._scope = scope
        self._receive = receive
        self._send = send
        self._more_body = True
        self._compressed: CompressedReply | None = None
        self._task = cast("asyncio.Task[None]", asyncio.current_task())
        self._watcher: asyncio.Task[None] | None = None
        self._error: LayertapError | None = None  # why the task was cancelled here

    async def receive(self) -> Message:
        """The next piece of the request; once there is none, the end of the connection, which takes its time."""
        waits_for_body, started = self._more_body, time.perf_counter()
        message = await self._receive()
        self._more_body = message.get("more_body", False)
        self.facts.request_bytes += len(message.get("body", b""))
        self.timings.receive_s += time.perf_counter() - started if waits_for_body else 0.0
        return message

    async def send(self, message: Message) -> None:
        """Send a piece of the reply."""
        if message["type"] == "http.response.start":
            self._begin_reply(message)
        pieces = (message,) if self._compressed is None else await self._compressed.convert(message)
        for piece in pieces:
            size = len(piece.get("body", b""))
            if size > LARGE and not piece.get("more_body"):
                await self._send({**piece, "more_body": True})
                piece = {"type": piece["type"]}  # uvicorn waits for the peer before it takes one more
            await self._send(piece)
            self.facts.reply_bytes += size if self.facts.method != "HEAD" else 0

    async def send_error(self, error: Exception) -> None:
        """Reply with an error, unless a reply has begun."""
        self.explain(error)
        response = self.encode_problem(describe_error(error, self.facts.request_id))
        if not self.facts.status:
            await response(self._scope, self.receive, self.send)

    def explain(self, error: Exception) -> None:
        """Have the error of a late request say how much time there was."""
        if self.timeout is not None:
            self.timeout.explain(error, self.engine, self.facts.model or None)

    def watch_client(self) -> None:
        """Cancel the request once its client is gone, with ClientGoneError, until its reply begins.

        With ``keeps_watching`` until that has ended. The body must have been read: all that is received after it is the
        end of the connection. Our own protocol calls ``on_disconnect`` of the state then, which costs less than a task
        that waits for it.
        """
        if "on_disconnect" in self._scope["state"]:
            self._scope["state"]["on_disconnect"] = self._leave
        else:
            self._watcher = asyncio.ensure_future(self._wait_for_disconnect())

    def cancel(self, error: LayertapError) -> None:
        """Cancel the request, which ends with this error."""
        self._error = error
        self._task.cancel()

    def explain_cancel(self) -> Exception:
        """Why the request's task was cancelled; it goes on if that was by ``cancel`` alone."""
        # As asyncio.timeout does it: whoever else cancelled the task is heard.
        if self._error is not None and not self._task.uncancel():
            return self._error
        return ending_error()  # by a server that ends and waits no longer; uvicorn would log it as a failure

    def end(self) -> None:
        """Give back what the request holds: its reply is sent, or cannot be."""
        del self._scope["state"]["exchange"]  # which has the scope: nothing waits for the garbage collector
        self._stop_watching()
        if self.ticket is not None:
            self.ticket.release()
        self.timings.ended = time.perf_counter()

    def _begin_reply(self, message: Message) -> None:
        """Stop watching the client, and add the headers that are always there; nothing inside sets them."""
        if not self.keeps_watching:
            self._stop_watching()
        self.facts.status = message["status"]
        self.timings.reply_begun = time.perf_counter()
        headers = message["headers"] = [
            *message.get("headers", ()),
            *make_context_headers(self.facts.request_id, self.timings.format()),
        ]
        if self.trace is not None:
            headers.append((b"traceparent", self.trace.traceparent.encode()))
        # HTTP/1.0 has no way to send what has no known length.
        if (accepted := self.head.get(b"accept-encoding")) and self._scope["http_version"] != "1.0":
            coding = choose_coding(accepted)
            if coding is not None and is_compressible(headers):
                self._compressed = CompressedReply(coding, self.engine)

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        elif "on_disconnect" in self._scope["state"]:
            self._scope["state"]["on_disconnect"] = None

    def _leave(self) -> None:
        self.cancel(ClientGoneError("the client closed the connection"))


def make_context_headers(request_id: str, timing: str) -> list[tuple[bytes, bytes]]:
    """The headers that every reply has, beside those of its body; ``timing`` is the value of ``Server-Timing``."""
    return [
        (b"x-request-id", request_id.encode("latin-1")),
        (b"server-timing", timing.encode("latin-1")),
        *CONSTANT_HEADERS,
    ]
