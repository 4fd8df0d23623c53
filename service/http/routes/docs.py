"""``GET /docs``: the interactive document, all of it from this server: Swagger UI's files out of their package."""

from __future__ import annotations

import logging
from importlib.resources import files

from fastapi import FastAPI, Request, Response

from layertap.service.http.problems import Problem, get_request_id, reply_problem

log = logging.getLogger("layertap")
PACKAGE = "fastapi_swagger.resources"
# Relative: whatever path a proxy has put before it.
PAGE = b"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>layertap</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = b"""SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  showExtensions: true,
  showCommonExtensions: true,
  validatorUrl: null,
});
"""
POLICY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}
SWAGGER_UI = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
PATHS = frozenset({"/docs", "/docs/start.js", "/openapi.json", *(f"/docs/{name}" for name in SWAGGER_UI)})


def install(app: FastAPI, package: str = PACKAGE) -> None:
    """Serve the page and what it loads out of a package; where that lacks a file, ``/docs`` is 404 and says so."""
    try:
        data = {name: (files(package) / name).read_bytes() for name in SWAGGER_UI}
    except (ModuleNotFoundError, OSError) as error:
        log.warning("there is no page at /docs", extra={"fields": {"reason": f"{type(error).__name__}: {error}"}})
        app.add_route("/docs", _reply_not_installed, include_in_schema=False)
        return
    _add_file_route(app, "/docs", PAGE, "text/html", POLICY)
    _add_file_route(app, "/docs/start.js", START, "text/javascript")
    for name, media_type in SWAGGER_UI.items():
        _add_file_route(app, f"/docs/{name}", data[name], media_type)


async def _reply_not_installed(request: Request) -> Response:
    detail = "the files of this page are not installed"
    hint = "GET /openapi.json lists the routes"
    return reply_problem(request, Problem(404, "http", detail, get_request_id(request), hint))


def _add_file_route(
    app: FastAPI, path: str, data: bytes, media_type: str, headers: dict[str, str] | None = None
) -> None:
    async def serve(request: Request) -> Response:
        return Response(data, media_type=media_type, headers=headers)

    app.add_route(path, serve, include_in_schema=False)
