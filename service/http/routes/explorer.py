"""``GET /``: the explorer, a page that shows what layers compute; its files are those of ``layertap.service.ui``."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.responses import RedirectResponse

from layertap.service.pictures.colormaps import DIVERGING, NOT_FINITE, SEQUENTIAL
from layertap.service.pictures.overlay import COMMON, STRONGEST

PACKAGE = "layertap.service.ui"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".png": "image/png"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _read_files() -> dict[str, tuple[bytes, str]]:
    """The page's files by their names, with their media types; a request's path is looked up among these, no more."""
    found = {}
    for file in files(PACKAGE).iterdir():
        media_type = MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            found[file.name] = (file.read_bytes(), media_type)
    return {**found, "palette.js": (_write_palette(), MEDIA_TYPES[".js"])}


def _write_palette() -> bytes:
    """A module of the colours that pictures of this server have, so that the page's are the same."""
    tables = {"SEQUENTIAL": SEQUENTIAL, "DIVERGING": DIVERGING, "NOT_FINITE": np.array(NOT_FINITE)}
    lines = [
        f"export const {name} = Uint8Array.of({','.join(map(str, table.flat))});" for name, table in tables.items()
    ]
    return "\n".join([*lines, f"export const [STRONGEST, COMMON] = [{STRONGEST}, {COMMON}];", ""]).encode()


FILES = _read_files()
PAGE = (files(PACKAGE) / "index.html").read_bytes()
PATHS = frozenset({"/", *(f"/ui/{name}" for name in FILES)})  # what they hold is the same in every installation


def install(app: FastAPI, root_path: str = "") -> None:
    """Serve the page at ``/`` and its files below ``/ui``; at ``root_path`` itself a redirect to the page."""

    async def show_page(request: Request) -> Response:
        raw_path = request.scope.get("raw_path", b"")
        if root_path and raw_path == root_path.encode():  # without a slash, relative addresses would lead elsewhere
            return RedirectResponse(f"{root_path}/")
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    app.add_route("/", show_page, include_in_schema=False)
    for name, (data, media_type) in FILES.items():
        _add_file_route(app, name, data, media_type)


def _add_file_route(app: FastAPI, name: str, data: bytes, media_type: str) -> None:
    async def serve(request: Request) -> Response:
        return Response(data, media_type=media_type)

    app.add_route(f"/ui/{name}", serve, include_in_schema=False)
