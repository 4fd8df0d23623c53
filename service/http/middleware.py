"""Around each request: id, key, headers that are always there, a line in the log, figures. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from layertap.models.errors import LayertapError
from layertap.service import access_log
from layertap.service.engine.engine import Engine
from layertap.service.errors import ForbiddenError, ForwardError, KeyMissingError
from layertap.service.http.auth import Keyring
from layertap.service.http.exchange import Exchange
from layertap.service.http.problems import OF_FASTAPI, ProblemEncoder, encode_problem
from layertap.service.http.tracing import RequestTracer
from layertap.service.metrics import OTHER

log = logging.getLogger("layertap.access")
# POST there, called without what FastAPI does on the way, which takes a twentieth of the CPU time of a request here.
DIRECT = ("/extract", "/v1/embeddings")


class RequestContextMiddleware:
    """Gives each request its ``exchange`` in the scope's ``state``: its account, for its road to fill.

    ``routes`` are the app's: refused requests count for them, and the endpoints of ``DIRECT`` are called by themselves.
    ``encoders`` has how problems are told below the first parts of paths that have a way of their own; ``pages`` are
    paths that a browser may get without a key. With a ``tracer`` each request is a trace, or a part of its caller's.
    """

    def __init__(
        self,
        app: FastAPI,
        engine: Engine,
        routes: Sequence[BaseRoute],
        encoders: Mapping[str, ProblemEncoder],
        pages: frozenset[str],
        tracer: RequestTracer | None,
    ) -> None:
        self.app = app
        self.stack = app.build_middleware_stack()
        self.engine = engine
        self.routes = routes
        self.encoders = encoders
        self.keyring = Keyring(engine.settings, pages)
        self.tracer = tracer
        self.direct = {each.path: each for each in routes if isinstance(each, APIRoute) and each.path in DIRECT}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not let in; pass on every other.

        Expected errors become replies; others are bugs in the app or a model: they are logged too.
        """
        scope["app"] = self.app  # as FastAPI does, which a server need not call
        if scope["type"] != "http":
            await self.stack(scope, receive, send)
            return
        if self.engine.settings.root_path:
            scope = _strip_root_path(self.engine.settings.root_path, scope)
        exchange = Exchange(scope, receive, send, self.engine)
        exchange.encode_problem = self.encoders.get(scope["path"][1:].partition("/")[0], encode_problem)
        # A server gives each request a dictionary of its own here, and may tell of the connection in it.
        scope.setdefault("state", {})["exchange"] = exchange
        if self.tracer is not None:
            exchange.trace = self.tracer.begin(exchange.head)
            exchange.facts.trace_id = exchange.trace.trace_id
        # Where it was HEAD, uvicorn, which has the scope as it was, leaves the reply's body out.
        app_scope = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}
        try:
            self.keyring.authorize(exchange)
            if scope["path"] in self.direct and scope["method"] == "POST":
                route = scope["route"] = self.direct[scope["path"]]
                response = await route.endpoint(Request(scope, exchange.receive, exchange.send))
                await response(scope, exchange.receive, exchange.send)
            else:
                await self.stack(app_scope, exchange.receive, exchange.send)
        except (LayertapError, *OF_FASTAPI) as error:
            if "route" not in app_scope and isinstance(error, KeyMissingError | ForbiddenError):
                app_scope["route"] = _find_route(self.routes, app_scope)
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
            access_log.write(exchange.timings, self.engine.settings.slow_request_s)
            if exchange.trace is not None:
                exchange.trace.end(exchange.timings, template)


def _strip_root_path(root_path: str, scope: Scope) -> Scope:
    """A request as if the server stood at the root: with the prefix taken off, once, where the proxy has left it on.

    Keys and routes are looked up after this alone, so that they never mean different paths.
    """
    tail = scope["path"].removeprefix(root_path)
    return {**scope, "path": tail or "/"} if len(tail) < len(scope["path"]) and tail[:1] in ("", "/") else scope


def _find_route(routes: Sequence[BaseRoute], scope: Scope) -> BaseRoute | None:
    """The route of a request that the application does not get to see; one that takes its method comes first."""
    matches = [(route, route.matches(scope)[0]) for route in routes]
    found = (route for wanted in (Match.FULL, Match.PARTIAL) for route, match in matches if match == wanted)
    return next(found, None)
