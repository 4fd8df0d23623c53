"""Pages for browsers: the explorer at ``/``, the interactive document at ``/docs``; all files are in packages."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePosixPath

import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.responses import RedirectResponse
from starlette.routing import Route

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


def _read_pages() -> dict[str, Response]:
    """The reply at each path; nothing else is served from files."""
    found = {file.name: file.read_bytes() for file in files(PACKAGE).iterdir() if _find_type(file.name)}
    pages = {
        "/": Response(found.pop("index.html"), media_type="text/html", headers=EXPLORER_HEADERS),
        "/docs": Response(found.pop("docs.html"), media_type="text/html", headers=DOCS_HEADERS),
    }
    others = {f"/ui/{name}": data for name, data in found.items()} | {"/ui/palette.js": _write_palette()}
    others |= {f"/docs/{name}": (files(SWAGGER_PACKAGE) / name).read_bytes() for name in SWAGGER_FILES}
    return pages | {path: Response(data, media_type=_find_type(path)) for path, data in others.items()}


def _find_type(name: str) -> str | None:
    return MEDIA_TYPES.get(PurePosixPath(name).suffix)


def _write_palette() -> bytes:
    """A JavaScript module with the colours of the server's pictures."""
    tables = {"SEQUENTIAL": SEQUENTIAL, "DIVERGING": DIVERGING, "NOT_FINITE": np.array(NOT_FINITE)}
    lines = [
        f"export const {name} = Uint8Array.of({','.join(map(str, table.flat))});" for name, table in tables.items()
    ]
    return "\n".join([*lines, f"export const [STRONGEST, COMMON] = [{STRONGEST}, {COMMON}];", ""]).encode()


PAGES = _read_pages()
PATHS = frozenset({*PAGES, "/openapi.json"})  # their content is the same in every installation


def install(app: FastAPI, root_path: str = "") -> None:
    """Serve the explorer at ``/`` and the document at ``/docs``; ``root_path`` itself redirects to the explorer."""

    async def show_explorer(request: Request) -> Response:
        # Without a slash, relative addresses would lead elsewhere.
        is_bare = root_path and request.scope.get("raw_path") == root_path.encode()
        return RedirectResponse(f"{root_path}/") if is_bare else PAGES["/"]

    app.add_route("/", show_explorer, include_in_schema=False)
    app.router.routes += [
        Route(path, page, methods=["GET"], include_in_schema=False) for path, page in PAGES.items() if path != "/"
    ]
