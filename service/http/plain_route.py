"""A route for endpoints that read their requests by themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

METHOD = "POST"


class PlainRoute(Route):
    """A route of Starlette, that stands in the scope as FastAPI's do: figures are counted by its path.

    It passes over FastAPI's parameters and dependencies, which take longer than all that such an endpoint does on the
    event loop, and over its document: ``openapi.PLAIN_PATHS`` describes it. ``app`` raises what the endpoint does.
    """

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
        super().__init__(path, endpoint, methods=[METHOD])

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = app

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether the route answers this path and method."""
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self} if match != Match.NONE else child_scope
