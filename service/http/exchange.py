"""One HTTP request and its reply, with their account, and the middleware around all routes. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.models.errors import LayertapError
from layertap.service import errors, logs
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.admit.unsent_replies import UnsentReply
from layertap.service.engine.engine import Engine
from layertap.service.http.auth import Keyring
from layertap.service.http.body import too_large_error
from layertap.service.http.problems import OF_FASTAPI, ProblemEncoder, describe_error, encode_problem
from layertap.service.http.timeout import FIELD, SERVER_LIMIT, TimeLimit, read_limit
from layertap.service.http.tracing import RequestTrace
from layertap.service.metrics import OTHER
from layertap.service.timings import RequestFacts, Timings

if TYPE_CHECKING:
    from layertap.service.http.protocol import Connection

log = logging.getLogger("layertap.access")
LARGE = 2**16  # bytes of a reply that uvicorn sends without waiting for the peer
MAX_FIELDS = 256
NAME = itemgetter(0)
DISCARD_S = 5  # how long the rest of an unread body is read, for clients that send all of it before they read
MIN_BYTES_PER_S = 10_000  # minimum upload rate: slower clients would hold a slot and memory
SEND_FEWER = "come again later, or ask for less: fewer inputs, or places of a sweep"
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


class Exchange:
    """A request and its reply. The attributes are the request's account, and what it holds until its reply is sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, engine: Engine) -> None:
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.head = dict(reversed(self.headers))  # the first value of each field
        request_id = self.head.get(b"x-request-id", b"")
        if not (0 < len(request_id) <= 64 and ID_CHARACTERS.issuperset(request_id)):
            request_id = os.urandom(16).hex().encode()
        client = scope.get("client") or ("",)
        self.facts = RequestFacts(request_id.decode(), scope["method"], scope["path"], client[0])
        self.timings = Timings(facts=self.facts)
        self.engine = engine
        self.admin = False  # whether the caller is an administrator
        self.keeps_watching = False  # for a client that leaves while the reply is sent
        self.ticket: Ticket | None = None  # released when the reply is ready
        self.limit = SERVER_LIMIT(engine.settings.deadline_s)
        self.trace: RequestTrace | None = scope["state"].get("trace")
        self.encode_problem: ProblemEncoder = encode_problem
        self.scope = scope
        self._receive = receive
        self._send = send
        self._connection: Connection | None = scope["state"].get("connection")  # None under another server
        if self._connection is not None:
            self._connection.begin(self)
        self._body_ended = self._watched = False
        self._unsent: UnsentReply | None = None
        self._task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]  # there is one
        self._watcher: asyncio.Task[None] | None = None
        self._error: LayertapError | None = None  # why the task was cancelled here

    def check_head(self) -> None:
        """BadRequestError for too many fields, or HTTP/1.1 without one ``Host``; TooManyConnectionsError.

        A health check is answered on any connection.
        """
        if len(self.headers) > MAX_FIELDS:
            self.headers.clear()  # each takes far more memory than its size suggests
            self.head.clear()
            raise errors.BadRequestError(f"a request has at most {MAX_FIELDS} header fields")
        hosts = list(map(NAME, self.headers)).count(b"host")
        if hosts != 1 and self.scope["http_version"] == "1.1":
            raise errors.BadRequestError(f"a request of HTTP/1.1 has one Host, this one {hosts}")
        if self._connection is not None and self._connection.is_extra and self.facts.path != "/livez":
            self.engine.metrics.count("connections_refused_total", "limit")
            hint = "keep connections open between requests, or come again later"
            raise errors.TooManyConnectionsError(
                "the server has as many connections open as it may", hint=hint, retry_after=1
            )

    def read_limit(self) -> float:
        """Seconds that the answer may take; RequestError."""
        if FIELD in self.head:
            self.limit = read_limit(self.head[FIELD], self.engine.settings.deadline_s)
        return self.limit.seconds

    @property
    def awaits_body(self) -> bool:
        """Whether there is a body, not yet read to its end."""
        length = self.head.get(b"content-length", b"0")
        return not self._body_ended and (length != b"0" or b"transfer-encoding" in self.head)

    async def read_body(self, reserve: Callable[[int], None]) -> bytes:
        """The whole body; ``reserve`` is called with the number of bytes that arrive, and may raise QueueFullError.

        TooLargeError, BadRequestError if it breaks off, BodyTimeoutError if it arrives too slowly.
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
                chunk = await self._receive_chunk()
                if self.facts.request_bytes > limit:
                    raise too_large_error(f"more than {limit}", limit)
                reserve(len(chunk))
                chunks.append(chunk)
                missing -= len(chunk)
                if self._body_ended:
                    return b"".join(chunks)  # a single one is not copied
                if missing <= 0:  # bytes count once: a fast start earns no time for a slow rest
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
        """Release the ticket, because the reply is ready; one of many bytes first waits for room, and keeps it."""
        if size > LARGE:
            self._unsent = await self.engine.unsent.add(size, self)
        if self.ticket is not None:
            self.ticket.release()
            self.ticket = None

    def count_taken(self) -> int:
        """Bytes that the client has taken, of this reply and earlier ones on its connection."""
        return self._connection.count_taken() if self._connection is not None else self.facts.reply_bytes

    def cut(self) -> None:
        """Stop sending the reply: another one needs its room."""
        self.engine.metrics.count("connections_refused_total", "no_room")
        log.warning("a reply was cut", extra={"fields": {"request_id": self.facts.request_id, "reason": "no_room"}})
        if self._connection is not None:
            self._connection.abort()
        else:
            self.cancel(errors.ClientGoneError("the client took its reply too slowly"))

    async def send_error(self, error: Exception) -> None:
        """Reply with an error, unless a reply has begun."""
        self.explain(error)
        response = self.encode_problem(describe_error(error, self.facts.request_id))
        if not self.facts.status:
            await response(self.scope, self._receive, self.send)

    def explain(self, error: Exception) -> None:
        """Add to the error of a late request how much time it had, what helps, and when to come again."""
        if isinstance(error, errors.DeadlineError):
            model = self.facts.model or self.scope.get("path_params", {}).get("name")
            error.retry_after = self.engine.estimate_wait(model)
        if isinstance(error, errors.DeadlineError | errors.QueueTooLongError):
            otherwise = SEND_FEWER if self.ticket is not None else "come again later"
            self.limit.explain(error, self.engine.settings.deadline_s, otherwise)

    def shorten(self, seconds: float | None) -> None:
        """Allow at most the seconds in a body's ``timeout``, counted as the head's from the body's arrival."""
        if self.ticket is not None and seconds is not None and seconds < self.limit.seconds:
            self.ticket.deadline -= self.limit.seconds - seconds
            self.limit = TimeLimit(seconds, "timeout")

    def watch_client(self) -> None:
        """Cancel the request with ClientGoneError if its client leaves before the reply begins.

        With ``keeps_watching``, before it ends. The body must have been read: what is received after it is the end of
        the connection. Our own connection calls ``leave`` then, which costs less than a task that waits for it.
        """
        self._watched = True
        if self._connection is None:
            self._watcher = asyncio.ensure_future(self._wait_for_disconnect())

    def leave(self) -> None:
        """Note that the client is gone."""
        if self._watched and (self.keeps_watching or not self.facts.status):
            self.cancel(errors.ClientGoneError("the client closed the connection"))

    def cancel(self, error: LayertapError) -> None:
        """Cancel the request, which ends with this error, or with that of an earlier call."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def explain_cancel(self) -> Exception:
        """The error of a cancelled request; its task goes on unless others cancelled it too."""
        # As asyncio.timeout does it: other calls of the task's cancel() still count.
        if self._error is not None and not self._task.uncancel():
            return self._error
        return errors.ending_error()  # the server ends and waits no longer; uvicorn would log it as a failure

    def end(self) -> None:
        """Release what the request holds: its reply is sent, or can't be."""
        del self.scope["state"]["exchange"]  # it refers to the scope: leave no cycle to the garbage collector
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
        """Add the headers that all replies have; no route sets them."""
        self.facts.status = message["status"]
        self.timings.reply_begun = time.perf_counter()
        headers = message["headers"] = [
            *message.get("headers", ()),
            (b"x-request-id", self.facts.request_id.encode()),
            (b"server-timing", self.timings.format().encode("latin-1")),
            *CONSTANT_HEADERS,
        ]
        if self.engine.manager.ending or (self._connection is not None and self._connection.is_extra):
            headers.append((b"connection", b"close"))
        if self.trace is not None:
            headers.append((b"traceparent", self.trace.traceparent.encode()))

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()

    async def _discard_body(self) -> None:
        """Read the rest of a body: a client that sends all of it before it reads would not get its reply.

        Not from a client that waits for "100 Continue", or was too slow.
        """
        if not self.awaits_body or self._error is not None or (b"expect" in self.head and not self.facts.request_bytes):
            return
        with suppress(TimeoutError, errors.BadRequestError):
            async with asyncio.timeout(DISCARD_S):
                while not self._body_ended:
                    await self._receive_chunk()

    async def _receive_chunk(self) -> bytes:
        """The next bytes of the body; BadRequestError if it breaks off."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise errors.BadRequestError("the body broke off")
        self._body_ended = not message.get("more_body")
        chunk: bytes = message.get("body", b"")
        self.facts.request_bytes += len(chunk)
        return chunk

    def _end_slow_body(self, wait_s: float) -> None:
        hint = f"send it at {MIN_BYTES_PER_S // 1000} kB a second or more, or in several requests"
        self.cancel(errors.BodyTimeoutError(f"too little of the body arrived within {wait_s:g} s", hint=hint))


async def get_exchange(request: Request) -> Exchange:
    """The exchange of a request. A coroutine: FastAPI would call a plain function in another thread."""
    exchange: Exchange = request.scope["state"]["exchange"]
    return exchange


ExchangeDependency = Annotated[Exchange, Depends(get_exchange)]


async def get_deadline(exchange: ExchangeDependency) -> float:
    """The moment on the monotonic clock when the endpoint's answer is due."""
    return time.monotonic() + exchange.read_limit()


DeadlineDependency = Annotated[float, Depends(get_deadline)]


class RequestContextMiddleware:
    """Creates the ``exchange`` of each request, in the scope's ``state``; checks keys, encodes errors, keeps accounts.

    ``routes``: all of the ``application``; refused requests count for them too. ``encoders``: how errors are encoded
    below the first parts of paths that are not ours. ``pages``: paths that browsers may get without a key.
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
        """Answer a request, with an error if it is not let in.

        Errors of the tree become replies; others are bugs in the app or a model, and are logged too.
        """
        scope["app"] = self.application  # as FastAPI does, which is not called
        if scope["type"] != "http":  # its beginning and end
            await self.application.router(scope, receive, send)
            return
        if self.engine.settings.root_path:
            scope = _strip_root_path(self.engine.settings.root_path, scope)
        state = scope.setdefault("state", {})  # the server's own dictionary for each request; may have its connection
        exchange = state["exchange"] = Exchange(scope, receive, send, self.engine)
        exchange.encode_problem = self.encoders.get(scope["path"][1:].partition("/")[0], encode_problem)
        if exchange.trace is not None:
            exchange.facts.trace_id = exchange.trace.trace_id
        # For HEAD, uvicorn, which has the original scope, leaves the reply's body out.
        app_scope = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}
        try:
            exchange.check_head()
            self.keyring.authorize(exchange)
            await self.app(app_scope, receive, exchange.send)
        except (LayertapError, *OF_FASTAPI) as error:
            if "route" not in app_scope and isinstance(error, errors.KeyMissingError | errors.ForbiddenError):
                app_scope["route"] = next(iter(_find_routes(self.routes, app_scope)), None)
            elif isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
                error.headers = {"Allow": _list_methods(_find_routes(self.routes, app_scope))}
            await exchange.send_error(error)
        except asyncio.CancelledError:
            await exchange.send_error(exchange.explain_cancel())
        except Exception as error:
            message = "a model's forward raised" if isinstance(error, errors.ForwardError) else "bug"
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
    """The scope without the prefix, if the proxy has left it on the path.

    Keys and routes are both looked up after this, so that they never mean different paths.
    """
    tail = scope["path"].removeprefix(root_path)
    return {**scope, "path": tail or "/"} if len(tail) < len(scope["path"]) and tail[:1] in ("", "/") else scope


def _find_routes(routes: Sequence[BaseRoute], scope: Scope) -> list[Route]:
    """The routes of a request's path; first those with its method."""
    matches = [(route, route.matches(scope)[0]) for route in routes if isinstance(route, Route)]
    return [route for wanted in (Match.FULL, Match.PARTIAL) for route, match in matches if match == wanted]


def _list_methods(routes: Sequence[Route]) -> str:
    """The value of the header ``Allow``; routes with GET also take HEAD."""
    methods = {method for route in routes for method in route.methods or ()}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
