"""Pages for browsers, all of them from this server: the explorer at ``/``, the interactive document at ``/docs``.

Their files are those of ``layertap.service.ui``, Swagger UI's out of their package.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.resources import files
from pathlib import PurePosixPath

import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.responses import RedirectResponse

from layertap.service.http.problems import Problem, get_request_id, reply_problem
from layertap.service.pictures.colormaps import DIVERGING, NOT_FINITE, SEQUENTIAL
from layertap.service.pictures.overlay import COMMON, STRONGEST

log = logging.getLogger("layertap")
PACKAGE = "layertap.service.ui"
SWAGGER_PACKAGE = "fastapi_swagger.resources"
SWAGGER_FILES = ("swagger-ui.css", "swagger-ui-bundle.js")
MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".png": "image/png"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src {images}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
EXPLORER_HEADERS = {"Content-Security-Policy": POLICY.format(images="'self' blob: data:")}
DOCS_HEADERS = {"Content-Security-Policy": POLICY.format(images="data:")}


def _read_files() -> dict[str, bytes]:
    """Our files by their names; a request's path is looked up among these, no more."""
    found = {file.name: file.read_bytes() for file in files(PACKAGE).iterdir() if _get_suffix(file.name) in MEDIA_TYPES}
    return {**found, "palette.js": _write_palette()}


def _get_suffix(name: str) -> str:
    return PurePosixPath(name).suffix


def _write_palette() -> bytes:
    """A module of the colours that pictures of this server have, so that the page's are the same."""
    tables = {"SEQUENTIAL": SEQUENTIAL, "DIVERGING": DIVERGING, "NOT_FINITE": np.array(NOT_FINITE)}
    lines = [
        f"export const {name} = Uint8Array.of({','.join(map(str, table.flat))});" for name, table in tables.items()
    ]
    return "\n".join([*lines, f"export const [STRONGEST, COMMON] = [{STRONGEST}, {COMMON}];", ""]).encode()


FILES = _read_files()
INDEX, DOCS = FILES.pop("index.html"), FILES.pop("docs.html")
PATHS = frozenset(  # what they hold is the same in every installation
    {"/", "/docs", "/openapi.json", *(f"/ui/{name}" for name in FILES), *(f"/docs/{name}" for name in SWAGGER_FILES)}
)


def install_explorer(app: FastAPI, root_path: str = "") -> None:
    """Serve the explorer at ``/`` and all files below ``/ui``; at ``root_path`` itself a redirect to the page."""

    async def show_page(request: Request) -> Response:
        raw_path = request.scope.get("raw_path", b"")
        if root_path and raw_path == root_path.encode():  # without a slash, relative addresses would lead elsewhere
            return RedirectResponse(f"{root_path}/")
        return Response(INDEX, media_type="text/html", headers=EXPLORER_HEADERS)

    app.add_route("/", show_page, include_in_schema=False)
    for name, data in FILES.items():
        _add_file_route(app, f"/ui/{name}", data, MEDIA_TYPES[_get_suffix(name)])


def install_docs(app: FastAPI, package: str = SWAGGER_PACKAGE) -> None:
    """Serve the document's page, Swagger UI's files out of a package; where one is missing the page is 404."""
    try:
        found = {name: (files(package) / name).read_bytes() for name in SWAGGER_FILES}
    except (ModuleNotFoundError, OSError) as error:
        log.warning("there is no page at /docs", extra={"fields": {"reason": f"{type(error).__name__}: {error}"}})
        app.add_route("/docs", _reply_not_installed, include_in_schema=False)
        return
    _add_file_route(app, "/docs", DOCS, "text/html", DOCS_HEADERS)
    for name, data in found.items():
        _add_file_route(app, f"/docs/{name}", data, MEDIA_TYPES[_get_suffix(name)])


async def _reply_not_installed(request: Request) -> Response:
    detail, hint = "the files of this page are not installed", "GET /openapi.json lists the routes"
    return reply_problem(request, Problem(404, "http", detail, get_request_id(request), hint))


def _add_file_route(
    app: FastAPI, path: str, data: bytes, media_type: str, headers: Mapping[str, str] | None = None
) -> None:
    async def serve(request: Request) -> Response:
        return Response(data, media_type=media_type, headers=headers)

    app.add_route(path, serve, include_in_schema=False)
