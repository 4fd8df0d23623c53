"""What surrounds every request: id, key, headers that are always there, a line in the log, figures. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.models.errors import clear_tracebacks, escape
from layertap.service.errors import ForbiddenError, ForwardError, KeyMissingError, KeyRateError, UnavailableError
from layertap.service.http.auth import Keyring
from layertap.service.http.problems import bug_response, error_response, forward_error_response
from layertap.service.http.security_headers import SECURITY_HEADERS
from layertap.service.metrics import OTHER, Metrics
from layertap.service.settings import Settings

log = logging.getLogger("layertap.access")
ALWAYS = ((b"vary", b"Accept"), *SECURITY_HEADERS)
LARGE = 2**16  # bytes that uvicorn gives away without waiting for the peer
ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


class RequestContextMiddleware:
    """Gives each request its ``state``: ``request_id`` and ``admin``; ``timings`` and ``notes`` for routes to fill.

    ``until_sent`` in it is a stack of contexts that are left when the reply is sent, but for its last ``LARGE`` bytes.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app = app
        self.root_path = settings.root_path
        self.keys = Keyring(settings)
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not let in; pass on every other."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        scope = _beneath(self.root_path, scope)
        headers = Headers(scope=scope)
        state = scope["state"] = {
            **scope.get("state", {}),
            "request_id": _id(headers),
            "admin": False,
            "timings": {},
            "notes": {},
            "until_sent": (until_sent := ExitStack()),
        }
        # Where it was HEAD, uvicorn, which has the scope as it was, leaves the reply's body out.
        asked = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}
        status = received = sent = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def dressed(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                _dress(message, state, begun)
            size = len(message.get("body", b""))
            if size > LARGE and not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": message["type"]}  # uvicorn waits for the peer before it takes one more
            await send(message)
            sent += size if scope["method"] != "HEAD" else 0

        try:
            state["admin"] = self.keys.authorize(scope["path"], headers)
        except (KeyMissingError, KeyRateError, ForbiddenError) as error:
            await error_response(error, state["request_id"])(scope, counted, dressed)
        else:
            await self._answered(asked, counted, dressed, lambda: status == 0)
        finally:
            until_sent.close()
            seconds = time.perf_counter() - begun
            self.metrics.request(_route(asked), status, seconds, state["timings"], received, sent)
            _log(scope, status, seconds)

    async def _answered(self, scope: Scope, receive: Receive, send: Send, silent: Callable[[], bool]) -> None:
        """Whatever the app raises is a bug, its own or a model's: it goes to the log; the caller hears just that."""
        request_id = scope["state"]["request_id"]
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:  # by a server that ends and waits no longer
            if not silent():
                raise
            error = UnavailableError("the server is shutting down", retry_after=1.0)
            await error_response(error, request_id)(scope, receive, send)
        except ForwardError as error:
            log.exception("a model's forward raised", extra={"fields": {"request_id": request_id}})
            clear_tracebacks(error)
            if silent():
                await forward_error_response(error, request_id)(scope, receive, send)
        except Exception as error:
            log.exception("bug", extra={"fields": {"request_id": request_id}})
            clear_tracebacks(error)
            if silent():
                await bug_response(request_id)(scope, receive, send)


def _beneath(root_path: str, scope: Scope) -> Scope:
    """A request as if the server stood at the root: with the prefix taken off, once, where the proxy has left it on.

    Keys and routes are looked up after this alone, so that they never mean different paths.
    """
    tail = scope["path"].removeprefix(root_path)
    return {**scope, "path": tail or "/"} if len(tail) < len(scope["path"]) and tail[:1] in ("", "/") else scope


def _dress(message: Message, state: dict[str, Any], begun: float) -> None:
    """Nothing inside sets these headers."""
    entries = [f"{name};dur={milliseconds:.2f}" for name, milliseconds in state["timings"].items()]
    entries.append(f"total;dur={(time.perf_counter() - begun) * 1000:.2f}")
    entries += [f'{name};desc="{text}"' for name, text in state["notes"].items()]
    message["headers"] = [
        *message.get("headers", ()),
        (b"x-request-id", state["request_id"].encode("latin-1")),
        (b"server-timing", ", ".join(entries).encode("latin-1")),
        *ALWAYS,
    ]


def _id(headers: Headers) -> str:
    """The caller's own id where it is harmless, else a new one."""
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= 64 and ID_CHARACTERS.issuperset(given) else uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The template of the route that was found; never the path, which callers choose."""
    return getattr(scope.get("route"), "path", OTHER)


def _log(scope: Scope, status: int, seconds: float) -> None:
    log.info(
        "request",
        extra={
            "fields": {
                "request_id": scope["state"]["request_id"],
                "method": escape(scope["method"], 16)[1:-1],
                "path": escape(scope["path"], 200)[1:-1],
                "status": status,
                "milliseconds": round(seconds * 1000, 2),
            }
        },
    )
