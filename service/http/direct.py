"""The short way to routes that read requests by themselves."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from layertap.models.errors import LayertapError
from layertap.service.http.problems import error_response, get_request_id


class Direct:
    """Calls the endpoints of some routes with nothing but the request; all else goes to the app.

    These take no parameters of FastAPI's, and its way to them, routing and dependencies, takes longer than all that
    they do on the event loop themselves. The app has the same routes: for its document, and for other methods.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self.app = app
        plain = [route for route in routes if isinstance(route, APIRoute)]
        self._routes = {(method, route.path): route for route in plain for method in route.methods or ()}
        if not self._routes:
            raise RuntimeError("this version of FastAPI keeps routes in another way")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by its endpoint, its errors by the table: the endpoints raise no HTTPException."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.endpoint(request)
        except LayertapError as error:
            response = error_response(error, get_request_id(request))
        await response(scope, receive, send)
