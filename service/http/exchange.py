"""One request and its reply: what happens around each, and the account that is kept of it. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.models.errors import LayertapError
from layertap.service import logs
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.admit.unsent_replies import UnsentReply
from layertap.service.engine.engine import Engine
from layertap.service.errors import (
    BadRequestError,
    BodyTimeoutError,
    ClientGoneError,
    ForbiddenError,
    ForwardError,
    KeyMissingError,
    TooManyConnectionsError,
    ending_error,
)
from layertap.service.http.auth import Keyring
from layertap.service.http.body import too_large_error
from layertap.service.http.problems import OF_FASTAPI, ProblemEncoder, describe_error, encode_problem
from layertap.service.http.timeout import TimeLimit, explain_delay
from layertap.service.http.tracing import RequestTrace
from layertap.service.metrics import OTHER
from layertap.service.timings import RequestFacts, Timings

if TYPE_CHECKING:
    from layertap.service.http.protocol import Connection

log = logging.getLogger("layertap.access")
METHOD_NOT_ALLOWED = 405
LARGE = 2**16  # bytes that uvicorn gives away without waiting for the peer
MAX_FIELDS = 256
DISCARD_S = 5  # how long the rest of a body that nobody wants is read: clients that send all before they read
MIN_BYTES_PER_S = 10_000  # minimum upload rate: slower clients would hold a slot and memory
ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
CONSTANT_HEADERS = (
    (b"vary", b"Accept"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),  # features of somebody's pictures
    (b"content-security-policy", b"frame-ancestors 'none'"),  # pages add what they need: a browser obeys both
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)
CLOSE = (b"connection", b"close")


class Exchange:
    """A request and its reply; what the server keeps of them until the reply is sent.

    ``head`` has the first value of each of the ``headers``; ``page`` has those by which a browser says which page asks,
    and by which name of the server, None if any header is there twice. ``timings`` and ``facts`` are the request's
    account. A ``ticket`` that a route has set is given back when the reply is ready; ``limit`` is the caller's own, if
    less than the server's. Servers other than ours tell of no connection.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, engine: Engine) -> None:
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.head = dict(reversed(self.headers))
        page = self.head.get(b"host"), self.head.get(b"origin"), self.head.get(b"sec-fetch-site")
        self.page = page if len(self.head) == len(self.headers) else None
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
        self.limit: TimeLimit | None = None
        self.trace: RequestTrace | None = scope["state"].get("trace")
        self.encode_problem: ProblemEncoder = encode_problem
        self.scope = scope
        self._receive = receive
        self._send = send
        self._connection: Connection | None = scope["state"].get("connection")
        if self._connection is not None:
            self._connection.begin(self)
        self._body_ended = self._watched = False
        self._unsent: UnsentReply | None = None
        self._task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]  # there is one
        self._watcher: asyncio.Task[None] | None = None
        self._error: LayertapError | None = None  # why the task was cancelled here

    def check_connection(self) -> None:
        """BadRequestError for too many fields, or HTTP/1.1 without one ``Host``; TooManyConnectionsError.

        A health check is answered on any connection.
        """
        if len(self.headers) > MAX_FIELDS:
            self.headers.clear()  # each takes far more memory than its size suggests
            self.head.clear()
            raise BadRequestError(f"a request has at most {MAX_FIELDS} header fields")
        if self.page is None or b"host" not in self.head:
            hosts = sum(name == b"host" for name, _ in self.headers)
            if hosts != 1 and self.scope["http_version"] == "1.1":
                raise BadRequestError(f"a request of HTTP/1.1 has one Host, this one {hosts}")
        if self._connection is not None and self._connection.is_extra and self.facts.path != "/livez":
            self.engine.metrics.count("connections_refused_total", "limit")
            hint = "keep connections open between requests, or come again later"
            raise TooManyConnectionsError("the server has as many connections open as it may", hint=hint, retry_after=1)

    @property
    def awaits_body(self) -> bool:
        """Whether there is a body that has not been read to its end."""
        length = self.head.get(b"content-length", b"0")
        return not self._body_ended and (length != b"0" or b"transfer-encoding" in self.head)

    async def read_body(self, reserve: Callable[[int], None]) -> bytes:
        """The whole body.

        ``reserve`` is told of its bytes as they arrive, and raises QueueFullError where there is no room for more.
        TooLargeError, BadRequestError where it breaks off, BodyTimeoutError where it arrives too slowly.
        """
        limit, wait_s = self.engine.settings.max_body_bytes, self.engine.settings.body_timeout_s
        announced = self.head.get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise too_large_error(announced[:20].decode(), limit)
        chunks: list[bytes] = []
        loop, started = asyncio.get_running_loop(), time.perf_counter()
        enough = missing = MIN_BYTES_PER_S * wait_s
        timer = loop.call_later(wait_s, self._end_slow_body, wait_s)
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise BadRequestError("the body broke off")
                if self._connection is not None:
                    self._connection.unclaimed = 0
                self._body_ended = not message.get("more_body")
                if chunk := message.get("body", b""):
                    self.facts.request_bytes += len(chunk)
                    if self.facts.request_bytes > limit:
                        raise too_large_error(f"more than {limit}", limit)
                    reserve(len(chunk))
                    chunks.append(chunk)
                    missing -= len(chunk)
                if self._body_ended:
                    return b"".join(chunks)  # a single one is not copied
                if missing <= 0:  # none of it counts twice: a fast start earns no time for a slow rest
                    timer.cancel()
                    timer, missing = loop.call_later(wait_s, self._end_slow_body, wait_s), enough
        finally:
            timer.cancel()
            self.timings.receive_s = time.perf_counter() - started

    async def send(self, message: Message) -> None:
        """Send a piece of the reply."""
        if message["type"] == "http.response.start":
            if not self.keeps_watching:
                await self.end_work(int(dict(message.get("headers", ())).get(b"content-length", 0)))
            self._begin_reply(message)
        size = len(message.get("body", b""))
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if is_last and (size > LARGE or (not self._body_ended and self.awaits_body)):
            await self._send({**message, "more_body": True})
            message = {"type": message["type"]}  # uvicorn waits for the peer before it takes one more
            await self._discard_body()
        await self._send(message)
        self.facts.reply_bytes += size if self.facts.method != "HEAD" else 0

    async def end_work(self, size: int) -> None:
        """Give the ticket back: the reply is ready, and of so many bytes; a large one finds room among the unsent."""
        if size > LARGE:
            self._unsent = await self.engine.unsent.add(size, self)
        if self.ticket is not None:
            self.ticket.release()
            self.ticket = None

    def count_taken(self) -> int:
        """Bytes that the client has taken, of this reply and what went before it on its connection."""
        return self._connection.count_taken() if self._connection is not None else self.facts.reply_bytes

    def cut(self) -> None:
        """Send no more of the reply: another one needs its room."""
        self.engine.metrics.count("connections_refused_total", "no_room")
        log.warning("a reply was cut", extra={"fields": {"request_id": self.facts.request_id, "reason": "no_room"}})
        if self._connection is not None:
            self._connection.abort()
        else:
            self.cancel(ClientGoneError("the client took its reply too slowly"))

    async def send_error(self, error: Exception) -> None:
        """Reply with an error, unless a reply has begun."""
        self.explain(error)
        response = self.encode_problem(describe_error(error, self.facts.request_id))
        if not self.facts.status:
            await response(self.scope, self._receive, self.send)

    def explain(self, error: Exception) -> None:
        """Have the error of a late request say how much time there was."""
        if self.ticket is not None:
            explain_delay(error, self.limit, self.engine, self.facts.model or None)

    def shorten(self, seconds: float | None) -> None:
        """Allow no more seconds than a body says, counted as the others from its arrival; None: it says nothing."""
        allowed = self.limit.seconds if self.limit is not None else self.engine.settings.deadline_s
        if self.ticket is not None and seconds is not None and seconds < allowed:
            self.ticket.deadline -= allowed - seconds
            self.limit = TimeLimit(seconds, "timeout")

    def watch_client(self) -> None:
        """Cancel the request once its client is gone, with ClientGoneError, until its reply begins.

        With ``keeps_watching`` until that has ended. The body must have been read: all that is received after it is the
        end of the connection. Our own connection calls ``leave`` then, which costs less than a task that waits for it.
        """
        self._watched = True
        if self._connection is None:
            self._watcher = asyncio.ensure_future(self._wait_for_disconnect())

    def leave(self) -> None:
        """The client is gone."""
        if self._watched and (self.keeps_watching or not self.facts.status):
            self.cancel(ClientGoneError("the client closed the connection"))

    def cancel(self, error: LayertapError) -> None:
        """Cancel the request, which ends with this error, or with that of an earlier call."""
        if self._error is None:
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
        del self.scope["state"]["exchange"]  # which has the scope: nothing waits for the garbage collector
        if self._connection is not None:
            self._connection.end(self)
        if self._unsent is not None:
            self.engine.unsent.remove(self._unsent)
        if self._watcher is not None:
            self._watcher.cancel()
        if self.ticket is not None:
            self.ticket.release()
        self.timings.ended = time.perf_counter()

    def _begin_reply(self, message: Message) -> None:
        """Add the headers that are always there; nothing inside sets them."""
        self.facts.status = message["status"]
        self.timings.reply_begun = time.perf_counter()
        headers = message["headers"] = [
            *message.get("headers", ()),
            (b"x-request-id", self.facts.request_id.encode()),
            (b"server-timing", self.timings.format().encode("latin-1")),
            *CONSTANT_HEADERS,
        ]
        if self.engine.manager.ending or (self._connection is not None and self._connection.is_extra):
            headers.append(CLOSE)
        if self.trace is not None:
            headers.append((b"traceparent", self.trace.traceparent.encode()))

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()

    async def _discard_body(self) -> None:
        """Read what is left of a body: a client that sends all of it before it reads would not get its reply.

        Not from a client that waits for leave to send it, or was too slow.
        """
        if not self.awaits_body or self._error is not None or (b"expect" in self.head and not self.facts.request_bytes):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while not self._body_ended:
                    message = await self._receive()
                    self.facts.request_bytes += len(message.get("body", b""))
                    self._body_ended = not message.get("more_body")
                    if self._connection is not None:
                        self._connection.unclaimed = 0

    def _end_slow_body(self, wait_s: float) -> None:
        hint = f"send it at {MIN_BYTES_PER_S // 1000} kB a second or more, or in several requests"
        self.cancel(BodyTimeoutError(f"too little of the body arrived within {wait_s:g} s", hint=hint))


async def get_exchange(request: Request) -> Exchange:
    """The exchange of a request. A coroutine: FastAPI would call a plain function in another thread."""
    exchange: Exchange = request.scope["state"]["exchange"]
    return exchange


ExchangeDependency = Annotated[Exchange, Depends(get_exchange)]


class RequestContextMiddleware:
    """Gives each request its ``exchange`` in the scope's ``state``: its account, for its road to fill.

    ``routes`` are all of the ``application``: refused requests count for them, and they know what a path allows.
    ``encoders`` has how problems are told below the first parts of paths that have a way of their own; ``pages`` are
    paths that a browser may get without a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        application: FastAPI,
        engine: Engine,
        routes: Sequence[BaseRoute],
        encoders: Mapping[str, ProblemEncoder],
        pages: frozenset[str],
    ) -> None:
        self.app = app
        self.application = application
        self.engine = engine
        self.routes = routes
        self.encoders = encoders
        self.keyring = Keyring(engine.settings, pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not let in; pass on every other.

        Expected errors become replies; others are bugs in the app or a model: they are logged too.
        """
        scope["app"] = self.application  # as FastAPI does, which a server need not call
        if scope["type"] != "http":  # its beginning and end
            await self.application.router(scope, receive, send)
            return
        if self.engine.settings.root_path:
            scope = _strip_root_path(self.engine.settings.root_path, scope)
        # A server gives each request a dictionary of its own here, and may tell of the connection in it.
        state = scope.setdefault("state", {})
        exchange = state["exchange"] = Exchange(scope, receive, send, self.engine)
        exchange.encode_problem = self.encoders.get(scope["path"][1:].partition("/")[0], encode_problem)
        if exchange.trace is not None:
            exchange.facts.trace_id = exchange.trace.trace_id
        # Where it was HEAD, uvicorn, which has the scope as it was, leaves the reply's body out.
        app_scope = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}
        try:
            exchange.check_connection()
            exchange.admin = exchange.page in self.keyring.own_pages
            if not exchange.admin:
                self.keyring.authorize(exchange)
            await self.app(app_scope, receive, exchange.send)
        except (LayertapError, *OF_FASTAPI) as error:
            if "route" not in app_scope and isinstance(error, KeyMissingError | ForbiddenError):
                app_scope["route"] = next(iter(_find_routes(self.routes, app_scope)), None)
            elif isinstance(error, HTTPException) and error.status_code == METHOD_NOT_ALLOWED:
                error.headers = {"Allow": _list_methods(_find_routes(self.routes, app_scope))}
            await exchange.send_error(error)
        except asyncio.CancelledError:
            await exchange.send_error(exchange.explain_cancel())
        except Exception as error:
            message = "a model's forward raised" if isinstance(error, ForwardError) else "bug"
            log.exception(message, extra={"fields": {"request_id": exchange.facts.request_id}})
            await exchange.send_error(error)
        finally:
            exchange.end()
            template = getattr(app_scope.get("route"), "path", OTHER)  # never the path, which callers choose
            self.engine.metrics.observe_request(template, exchange.timings)
            logs.log_request(exchange.timings, self.engine.settings.slow_request_s)
            if exchange.trace is not None:
                exchange.trace.describe(exchange.timings, template)


def _strip_root_path(root_path: str, scope: Scope) -> Scope:
    """A request as if the server stood at the root: with the prefix taken off, once, where the proxy has left it on.

    Keys and routes are looked up after this alone, so that they never mean different paths.
    """
    tail = scope["path"].removeprefix(root_path)
    return {**scope, "path": tail or "/"} if len(tail) < len(scope["path"]) and tail[:1] in ("", "/") else scope


def _find_routes(routes: Sequence[BaseRoute], scope: Scope) -> list[Route]:
    """The routes of a request's path; those that take its method come first."""
    matches = [(route, route.matches(scope)[0]) for route in routes if isinstance(route, Route)]
    return [route for wanted in (Match.FULL, Match.PARTIAL) for route, match in matches if match == wanted]


def _list_methods(routes: Sequence[Route]) -> str:
    """What the header ``Allow`` says of them; whoever takes GET is asked by HEAD too."""
    methods = {method for route in routes for method in route.methods or ()}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
