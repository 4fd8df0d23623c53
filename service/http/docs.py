"""``GET /docs``: the interactive document, which may run its own script and Swagger UI's, and no other."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
ELSEWHERE = re.compile(rb'(?:src|href)="(https://[^"]+)"')  # Swagger UI


def install(app: FastAPI) -> None:
    """Serve the page."""
    # Relative: whatever path a proxy has put before it. No icon from elsewhere: nobody else hears of a visit.
    page = get_swagger_ui_html(openapi_url="openapi.json", title=app.title, swagger_favicon_url="data:,")
    headers = {"Content-Security-Policy": _policy(bytes(page.body))}

    async def docs(request: Request) -> Response:
        return Response(page.body, media_type="text/html", headers=headers)

    app.add_route("/docs", docs, include_in_schema=False)


def _policy(page: bytes) -> str:
    own = " ".join(f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in SCRIPT.findall(page))
    # Whole addresses: the host has everybody's scripts.
    scripts, styles = (
        " ".join(each.decode() for each in ELSEWHERE.findall(page) if each.endswith(end)) for end in (b".js", b".css")
    )
    return (
        f"default-src 'none'; script-src {scripts} {own}; style-src {styles} 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
