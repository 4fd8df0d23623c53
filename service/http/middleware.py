"""Around each request: id, key, headers that are always there, a line in the log, figures. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.models.errors import LayertapError
from layertap.service.access_log import AccessRecord
from layertap.service.engine.engine import Engine
from layertap.service.errors import ForbiddenError, ForwardError, KeyMissingError, ending_error
from layertap.service.http.auth import Caller, Keyring
from layertap.service.http.buffers_response import LARGE
from layertap.service.http.compression import compress_replies
from layertap.service.http.problems import OF_FASTAPI, ProblemEncoder, describe_error, encode_problem
from layertap.service.http.tracing import RequestTrace, RequestTracer
from layertap.service.metrics import OTHER
from layertap.service.timings import Timings

log = logging.getLogger("layertap.access")
# POST there, called without what FastAPI does on the way, which takes a twentieth of the CPU time of a request here.
DIRECT = "/extract"
ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


class RequestContextMiddleware:
    """Gives each request its ``state``: ``request_id`` and ``admin``; ``timings`` for its road to fill.

    ``routes`` are the app's: refused requests count for them, and the endpoint of ``DIRECT`` is called by itself.
    ``encoders`` has how problems are told below the first parts of paths that have a way of their own; ``pages`` are
    paths that a browser may get without a key. With a ``tracer`` each request is a trace, or a part of its caller's.

    ``until_sent`` in ``state`` is a stack of contexts that are left when the reply is sent, but for its last bytes.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        routes: Sequence[BaseRoute],
        encoders: Mapping[str, ProblemEncoder],
        pages: frozenset[str],
        tracer: RequestTracer | None,
    ) -> None:
        self.app = app
        self.engine = engine
        self.routes = routes
        self.encoders = encoders
        self.keyring = Keyring(engine.settings, pages)
        self.tracer = tracer
        self.direct = next(route for route in routes if isinstance(route, APIRoute) and route.path == DIRECT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not let in; pass on every other."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = _strip_root_path(self.engine.settings.root_path, scope)
        headers = Headers(scope=scope)
        timings, caller = Timings(), Caller(admin=False)
        # A server gives each request a dictionary of its own here, and may tell of the connection in it.
        state = scope.setdefault("state", {})
        state |= {
            "request_id": _choose_request_id(headers),
            "admin": False,
            "encode_problem": self.encoders.get(scope["path"][1:].partition("/")[0], encode_problem),
            "timings": timings,
            "until_sent": (until_sent := ExitStack()),
        }
        trace = self.tracer.begin(headers) if self.tracer is not None else None
        exchange = Exchange(scope, receive, send, trace)
        # Where it was HEAD, uvicorn, which has the scope as it was, leaves the reply's body out.
        app_scope = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}
        try:
            caller = self.keyring.authorize(scope["method"], scope["path"], headers)
            state["admin"] = caller.admin
        except (KeyMissingError, ForbiddenError) as error:
            app_scope["route"] = _find_route(self.routes, app_scope)
            await exchange.send_error(error)
        else:
            await self._call_app(app_scope, exchange)
        finally:
            until_sent.close()
            template = getattr(app_scope.get("route"), "path", OTHER)  # never the path, which callers choose
            self._record(exchange.make_record(caller.key), template, trace)

    def _record(self, record: AccessRecord, route: str, trace: RequestTrace | None) -> None:
        """A request has ended: count it, write its line, end its trace."""
        steps, sizes = record.timings.steps, (record.request_bytes, record.reply_bytes)
        self.engine.metrics.observe_request(route, record.status, record.seconds, steps, *sizes)
        record.write(self.engine.settings.slow_request_s)
        if trace is not None:
            trace.end(record, route)

    async def _call_app(self, scope: Scope, exchange: Exchange) -> None:
        """Call the app. Expected errors become replies; others are bugs in it or a model: they are logged too."""
        send = compress_replies(scope, exchange.send, self._run_in_thread)
        try:
            if scope["path"] == DIRECT and scope["method"] == "POST":
                scope["route"] = self.direct
                response = await self.direct.endpoint(Request(scope, exchange.receive, send))
                await response(scope, exchange.receive, send)
            else:
                await self.app(scope, exchange.receive, send)
        except (LayertapError, *OF_FASTAPI) as error:
            await exchange.send_error(error)
        except asyncio.CancelledError:  # by a server that ends and waits no longer; uvicorn would log it as a failure
            await exchange.send_error(ending_error())
        except Exception as error:
            message = "a model's forward raised" if isinstance(error, ForwardError) else "bug"
            log.exception(message, extra={"fields": {"request_id": scope["state"]["request_id"]}})
            await exchange.send_error(error)

    async def _run_in_thread(self, function: Callable[[], bytes]) -> bytes:
        return await self.engine.run_in_thread(function, time.monotonic() + self.engine.settings.deadline_s)


def _strip_root_path(root_path: str, scope: Scope) -> Scope:
    """A request as if the server stood at the root: with the prefix taken off, once, where the proxy has left it on.

    Keys and routes are looked up after this alone, so that they never mean different paths.
    """
    tail = scope["path"].removeprefix(root_path)
    return {**scope, "path": tail or "/"} if len(tail) < len(scope["path"]) and tail[:1] in ("", "/") else scope


def _choose_request_id(headers: Headers) -> str:
    """The caller's own id where it is harmless, else a new one."""
    request_id = headers.get("x-request-id", "")
    return request_id if 0 < len(request_id) <= 64 and ID_CHARACTERS.issuperset(request_id) else secrets.token_hex(16)


def _find_route(routes: Sequence[BaseRoute], scope: Scope) -> BaseRoute | None:
    """The route of a request that the application does not get to see; one that takes its method comes first."""
    matches = [(route, route.matches(scope)[0]) for route in routes]
    found = (route for wanted in (Match.FULL, Match.PARTIAL) for route, match in matches if match == wanted)
    return next(found, None)


SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),  # features of somebody's pictures
    (b"content-security-policy", b"frame-ancestors 'none'"),  # pages add what they need: a browser obeys both
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


class Exchange:
    """A request and its reply on their way: both are counted, and the reply gets the headers that are always there."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, trace: RequestTrace | None) -> None:
        self.status = 0  # until a reply begins
        self._received_bytes = 0
        self._sent_bytes = 0
        self._receive_seconds = 0.0
        self._reply_begun = 0.0
        self._more_body = True
        self._trace = trace
        self._scope = scope
        self._receive = receive
        self._send = send
        self._begun = time.perf_counter()

    def make_record(self, key: str) -> AccessRecord:
        """The access record of the finished request; ``key`` is the API key's name."""
        state, now = self._scope["state"], time.perf_counter()
        return AccessRecord(
            request_id=state["request_id"],
            method=self._scope["method"],
            path=self._scope["path"],
            status=self.status,
            seconds=now - self._begun,
            timings=state["timings"],
            client=(self._scope.get("client") or ("",))[0],
            key=key,
            request_bytes=self._received_bytes,
            reply_bytes=self._sent_bytes,
            receive_s=self._receive_seconds,
            send_s=now - self._reply_begun if self.status else 0.0,
            trace_id=self._trace.trace_id if self._trace is not None else "",
        )

    async def receive(self) -> Message:
        """The next piece of the request; once there is none, the end of the connection, which takes its time."""
        waits_for_body, started = self._more_body, time.perf_counter()
        message = await self._receive()
        self._more_body = message.get("more_body", False)
        self._received_bytes += len(message.get("body", b""))
        self._receive_seconds += time.perf_counter() - started if waits_for_body else 0.0
        return message

    async def send(self, message: Message) -> None:
        """Send a piece of the reply."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._reply_begun = time.perf_counter()
            state = self._scope["state"]
            message["headers"] = [
                *message.get("headers", ()),  # nothing inside sets those that follow
                *make_context_headers(state["request_id"], self._format_timing(state["timings"])),
                *([(b"traceparent", self._trace.traceparent.encode())] if self._trace is not None else []),
            ]
        size = len(message.get("body", b""))
        if size > LARGE and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            message = {"type": message["type"]}  # uvicorn waits for the peer before it takes one more
        await self._send(message)
        self._sent_bytes += size if self._scope["method"] != "HEAD" else 0

    async def send_error(self, error: Exception) -> None:
        """Reply with an error, unless a reply has begun."""
        state = self._scope["state"]
        response = state["encode_problem"](describe_error(error, state["request_id"]))
        if not self.status:
            await response(self._scope, self.receive, self.send)

    def _format_timing(self, timings: Timings) -> str:
        """The value of ``Server-Timing``."""
        entries = [f"{name};dur={milliseconds:.2f}" for name, milliseconds in timings.steps.items()]
        entries.append(f"total;dur={(time.perf_counter() - self._begun) * 1000:.2f}")
        entries += [f'{name};desc="{text}"' for name, text in timings.notes.items()]
        return ", ".join(entries)


def make_context_headers(request_id: str, timing: str) -> list[tuple[bytes, bytes]]:
    """The headers that every reply has, beside those of its body; ``timing`` is the value of ``Server-Timing``."""
    return [
        (b"x-request-id", request_id.encode("latin-1")),
        (b"server-timing", timing.encode("latin-1")),
        (b"vary", b"Accept, Accept-Encoding"),
        *SECURITY_HEADERS,
    ]
