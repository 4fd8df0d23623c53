"""The application: FastAPI, and plain Starlette routes for the requests that are sent most.

``/extract`` and the routes below ``/v1`` and ``/v2`` are ``ExchangeRoute``, because FastAPI makes as many calls for a
request as all else together. FastAPI validates and documents the other routes. Both are in ``app.routes``, and in the
OpenAPI document.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send


class ExchangeRoute(Route):
    """A route whose endpoint takes the request's ``Exchange``, and the parameters of the path as text."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose path matches; HTTPException if its method does not."""
        if self.methods and scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(scope["state"]["exchange"], **scope["path_params"])
        await response(scope, receive, send)


class Application(FastAPI):
    """FastAPI whose plain routes are found first, inside the middleware."""

    def build_middleware_stack(self) -> ASGIApp:
        """The middleware of ``add_middleware`` around all routes, without FastAPI's error handlers.

        ``RequestContextMiddleware`` answers errors. FastAPI's own routes need its stack of exits around them.
        """
        plain = [each for each in self.routes if isinstance(each, ExchangeRoute)]
        router = Router(plain, redirect_slashes=False, default=AsyncExitStackMiddleware(self.router))
        stack: ASGIApp = router.app  # calling the router would be one call more
        for cls, args, kwargs in reversed(self.user_middleware):
            stack = cls(stack, *args, **kwargs)
        return stack
