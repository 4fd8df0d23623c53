"""Around each request: id, key, headers that are always there, a line in the log, figures. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.models.errors import LayertapError, escape
from layertap.service.errors import ForbiddenError, ForwardError, KeyMissingError, KeyRateError, UnavailableError
from layertap.service.http.auth import Keyring
from layertap.service.http.buffers_response import LARGE
from layertap.service.http.compression import RunInThread, compress_replies
from layertap.service.http.forwarded import TrustedProxies
from layertap.service.http.plain_route import METHOD, PlainRoute
from layertap.service.http.problems import ProblemEncoder, describe_error, find_encoder
from layertap.service.http.security_headers import SECURITY_HEADERS
from layertap.service.metrics import OTHER, Metrics
from layertap.service.settings import Settings

log = logging.getLogger("layertap.access")
TRACES = "fastapi.telemetry"  # what FastAPI notes in a scope where it traces requests
ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


class RequestContextMiddleware:
    """Gives each request its ``state``: ``request_id``, ``admin``, ``prefix``, ``timings`` and ``notes``.

    ``prefix`` is the path that the client finds this server beneath; ``timings`` and ``notes`` are for routes to fill.

    ``encoders`` has how problems are told below the first parts of paths that have a way of their own;
    ``run_in_thread`` runs what compresses replies; ``pages`` are paths that a browser may get without a key.

    ``until_sent`` in ``state`` is a stack of contexts that are left when the reply is sent, but for its last ``LARGE``
    bytes.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: Metrics,
        run_in_thread: RunInThread,
        routes: Iterable[PlainRoute] = (),
        encoders: Mapping[str, ProblemEncoder] = MappingProxyType({}),
        pages: frozenset[str] = frozenset(),
    ) -> None:
        self.app = app
        self.encoders = encoders
        self.root_path = settings.root_path
        self.proxies = TrustedProxies(settings)
        self.keyring = Keyring(settings, pages)
        self.metrics = metrics
        self.run_in_thread = run_in_thread
        self.plain_routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not let in; pass on every other."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = _strip_root_path(self.root_path, self.proxies.resolve(scope))
        headers = Headers(scope=scope)
        state = scope["state"] = {
            **scope.get("state", {}),
            "request_id": _choose_request_id(headers),
            "admin": False,
            "prefix": scope.get("forwarded_prefix") or self.root_path,
            "encode_problem": find_encoder(scope["path"], self.encoders),
            "timings": {},
            "notes": {},
            "until_sent": (until_sent := ExitStack()),
        }
        exchange = _Exchange(scope, receive, send)
        # Where it was HEAD, uvicorn, which has the scope as it was, leaves the reply's body out.
        app_scope = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}
        try:
            state["admin"] = self.keyring.authorize(scope["method"], scope["path"], headers)
        except (KeyMissingError, KeyRateError, ForbiddenError) as error:
            await exchange.send_error(error)
        else:
            await self._call_app(app_scope, exchange)
        finally:
            until_sent.close()
            seconds = exchange.seconds
            self.metrics.observe_request(
                _find_template(app_scope),
                exchange.status,
                seconds,
                state["timings"],
                exchange.received_bytes,
                exchange.sent_bytes,
            )
            _log_request(scope, exchange.status, seconds)

    async def _call_app(self, scope: Scope, exchange: _Exchange) -> None:
        """Whatever the app raises is a bug, its own or a model's: it goes to the log; the caller hears just that."""
        is_plain = scope["method"] == METHOD and TRACES not in scope
        route = self.plain_routes.get(scope["path"]) if is_plain else None
        send = compress_replies(scope, exchange.send, self.run_in_thread)
        try:
            if route is None:
                await self.app(scope, exchange.receive, send)
            else:
                await _call_plain_route(route, scope, exchange, send)
        except asyncio.CancelledError:  # by a server that ends and waits no longer
            if exchange.status:
                raise
            await exchange.send_error(UnavailableError("the server is shutting down", retry_after=1.0))
        except Exception as error:
            message = "a model's forward raised" if isinstance(error, ForwardError) else "bug"
            log.exception(message, extra={"fields": {"request_id": scope["state"]["request_id"]}})
            await exchange.send_error(error)


class _Exchange:
    """A request and its reply on their way: both are counted, and the reply gets the headers that are always there."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.status = 0  # until a reply begins
        self.received_bytes = 0
        self.sent_bytes = 0
        self._scope = scope
        self._receive = receive
        self._send = send
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the request's head."""
        return time.perf_counter() - self._begun

    async def receive(self) -> Message:
        """The next piece of the request."""
        message = await self._receive()
        self.received_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Send a piece of the reply."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            state = self._scope["state"]
            message["headers"] = [
                *message.get("headers", ()),  # nothing inside sets those that follow
                *make_context_headers(state["request_id"], self._format_timing(state)),
            ]
        size = len(message.get("body", b""))
        if size > LARGE and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            message = {"type": message["type"]}  # uvicorn waits for the peer before it takes one more
        await self._send(message)
        self.sent_bytes += size if self._scope["method"] != "HEAD" else 0

    async def send_error(self, error: Exception) -> None:
        """Reply with an error, unless a reply has begun."""
        state = self._scope["state"]
        response = state["encode_problem"](describe_error(error, state["request_id"]))
        if not self.status:
            await response(self._scope, self.receive, self.send)

    def _format_timing(self, state: dict[str, Any]) -> str:
        """The value of ``Server-Timing``."""
        entries = [f"{name};dur={milliseconds:.2f}" for name, milliseconds in state["timings"].items()]
        entries.append(f"total;dur={self.seconds * 1000:.2f}")
        entries += [f'{name};desc="{text}"' for name, text in state["notes"].items()]
        return ", ".join(entries)


async def _call_plain_route(route: PlainRoute, scope: Scope, exchange: _Exchange, send: Send) -> None:
    """Call an endpoint without what else the app calls on the way to one."""
    scope["route"] = route
    try:
        await route.app(scope, exchange.receive, send)
    except LayertapError as error:
        await exchange.send_error(error)


def make_context_headers(request_id: str, timing: str) -> list[tuple[bytes, bytes]]:
    """The headers that every reply has, beside those of its body; ``timing`` is the value of ``Server-Timing``."""
    return [
        (b"x-request-id", request_id.encode("latin-1")),
        (b"server-timing", timing.encode("latin-1")),
        (b"vary", b"Accept, Accept-Encoding"),
        *SECURITY_HEADERS,
    ]


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


def _find_template(scope: Scope) -> str:
    """The template of the route that was found; never the path, which callers choose."""
    return getattr(scope.get("route"), "path", OTHER)


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    log.info(
        "request",
        extra={
            "fields": {
                "request_id": scope["state"]["request_id"],
                "client": (scope.get("client") or ("",))[0],
                "method": escape(scope["method"], 16)[1:-1],
                "path": escape(scope["path"], 200)[1:-1],
                "status": status,
                "milliseconds": round(seconds * 1000, 2),
            }
        },
    )
