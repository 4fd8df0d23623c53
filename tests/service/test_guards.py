"""What every reply tells browsers, and what none does."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import httpx
import numpy as np
import pytest

from tests.server import Live
from tests.service.sockets import exchanged
from tests.service.support import image, npy, picture, raw

EXPECTED = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
GOOD = {"layers": ["pool"], "inputs": [image(picture())]}
BUG = raw(npy(np.full((1, 4), 1000, np.float32)), "application/x-npy", model="touchy", layers=".")
REPLIES = {
    "health": ("GET", "/livez", {}, 200),
    "models": ("GET", "/models", {}, 200),
    "metrics": ("GET", "/metrics", {}, 200),
    "document": ("GET", "/openapi.json", {}, 200),
    "page": ("GET", "/docs", {}, 200),
    "elsewhere": ("GET", "/", {}, 307),
    "features": ("POST", "/extract", {"json": GOOD}, 200),
    "arrays": ("POST", "/extract", {"json": GOOD, "params": {"format": "npz"}}, 200),
    "bad": ("POST", "/extract", {"json": {}}, 422),
    "unknown": ("GET", "/nowhere", {}, 404),
    "method": ("PUT", "/extract", {}, 405),
    "preflight": ("OPTIONS", "/extract", {}, 405),
    "preflight of nothing": ("OPTIONS", "/nowhere", {}, 404),
    "bug": (
        "POST",
        "/extract",
        raw(npy(np.full((1, 4), 1000, np.float32)), "application/x-npy", model="touchy", layers="."),
        500,
    ),
}
CROSS = {
    "origin": "http://evil.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type, x-api-key",
    "access-control-request-private-network": "true",
}


@pytest.mark.parametrize("name", REPLIES)
def test_every_reply(live: Live, name: str) -> None:
    """Every reply says so once, whatever it is about, and none is open to pages of other sites."""
    method, path, request, status = REPLIES[name]
    headers = {**request.get("headers", {}), **CROSS}
    reply = live.client.request(method, path, **request | {"headers": headers})
    assert reply.status_code == status
    guarded(reply)


def test_what_is_no_request(live: Live) -> None:
    """So does the reply to what is no request at all."""
    reply = exchanged(live, b"hello\r\n\r\n")
    assert reply.status_code == 400
    guarded(reply)


def guarded(reply: httpx.Response) -> None:
    for field, value in EXPECTED.items():
        assert reply.headers.get_list(field) == [value]
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert not [field for field in reply.headers if field.startswith("access-control-")]
    assert "server" not in reply.headers


class Page(HTMLParser):
    """The scripts and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.addresses: list[tuple[str, str]] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._script = tag == "script"
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.addresses += [(tag, value) for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.inline.append(data)
        self._script = False


def test_page(live: Live) -> None:
    """The page may run the script that stands in it and Swagger UI's, may ask this server only, and nothing else."""
    reply = live.client.get("/docs")
    page = Page(reply.text)
    policies = [each.strip() for each in ", ".join(reply.headers.get_list("content-security-policy")).split(",")]
    (policy,) = [each for each in policies if each.startswith("default-src 'none'")]
    allowed = {words[0]: set(words[1:]) for words in (each.split() for each in policy.split(";"))}
    digests = {f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in page.inline}
    scripts = {each for tag, each in page.addresses if tag == "script"}
    styles = {each for _, each in page.addresses if each.endswith(".css")}
    assert min(map(len, (digests, scripts, styles))) == 1
    assert allowed["script-src"] == digests | scripts
    assert allowed["style-src"] == {*styles, "'unsafe-inline'"}
    assert allowed["connect-src"] == {"'self'"}
    assert "openapi.json" in page.inline[0]
    assert live.client.get(httpx.URL(str(reply.url)).join("openapi.json")).status_code == 200
    assert live.client.get("/redoc").status_code == 404
