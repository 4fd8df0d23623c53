"""Pages for browsers, all of them from this server: the explorer at ``/``, the interactive document at ``/docs``.

Their files are those of ``layertap.service.ui``, Swagger UI's out of their package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import PurePosixPath

import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.responses import RedirectResponse

from layertap.service.pictures.colormaps import DIVERGING, NOT_FINITE, SEQUENTIAL
from layertap.service.pictures.overlay import COMMON, STRONGEST

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


Page = tuple[bytes, str, Mapping[str, str]]  # its bytes, media type and headers


def _read_pages() -> dict[str, Page]:
    """What each path has: a request's path is looked up among these, no more."""
    found = {file.name: file.read_bytes() for file in files(PACKAGE).iterdir() if _get_suffix(file.name) in MEDIA_TYPES}
    pages: dict[str, Page] = {
        "/": (found.pop("index.html"), "text/html", EXPLORER_HEADERS),
        "/docs": (found.pop("docs.html"), "text/html", DOCS_HEADERS),
    }
    own = {f"/ui/{name}": data for name, data in found.items()} | {"/ui/palette.js": _write_palette()}
    swagger = {f"/docs/{name}": (files(SWAGGER_PACKAGE) / name).read_bytes() for name in SWAGGER_FILES}
    return pages | {path: (data, MEDIA_TYPES[_get_suffix(path)], {}) for path, data in (own | swagger).items()}


def _get_suffix(name: str) -> str:
    return PurePosixPath(name).suffix


def _write_palette() -> bytes:
    """A module of the colours that pictures of this server have, so that the page's are the same."""
    tables = {"SEQUENTIAL": SEQUENTIAL, "DIVERGING": DIVERGING, "NOT_FINITE": np.array(NOT_FINITE)}
    lines = [
        f"export const {name} = Uint8Array.of({','.join(map(str, table.flat))});" for name, table in tables.items()
    ]
    return "\n".join([*lines, f"export const [STRONGEST, COMMON] = [{STRONGEST}, {COMMON}];", ""]).encode()


PAGES = _read_pages()
PATHS = frozenset({*PAGES, "/openapi.json"})  # what they hold is the same in every installation


def install(app: FastAPI, root_path: str = "") -> None:
    """Serve the explorer at ``/`` and the document at ``/docs``; at ``root_path`` itself a redirect to the first."""
    for path, page in PAGES.items():
        _add_page(app, path, page, root_path if path == "/" else "")


def _add_page(app: FastAPI, path: str, page: Page, root_path: str) -> None:
    data, media_type, headers = page

    async def serve(request: Request) -> Response:
        # Without a slash, relative addresses would lead elsewhere.
        if root_path and request.scope.get("raw_path") == root_path.encode():
            return RedirectResponse(f"{root_path}/")
        return Response(data, media_type=media_type, headers=headers)

    app.add_route(path, serve, include_in_schema=False)
