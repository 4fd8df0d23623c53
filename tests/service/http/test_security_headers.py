"""What every reply tells browsers, and what none does."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from tests.server import Live
from tests.service.support import ALWAYS, image, npy, picture, raw

EXPECTED = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
GOOD = {"layers": ["pool"], "inputs": [image(picture())]}
REPLIES = {
    "health": ("GET", "/livez", {}, 200),
    "document": ("GET", "/openapi.json", {}, 200),
    "page": ("GET", "/docs", {}, 200),
    "script": ("GET", "/ui/main.js", {}, 200),
    "features": ("POST", "/extract", {"json": GOOD}, 200),
    "arrays": ("POST", "/extract", {"json": GOOD, "params": {"format": "npz"}}, 200),
    "bad": ("POST", "/extract", {"json": {}}, 422),
    "unknown": ("GET", "/nowhere", {}, 404),
    "preflight": ("OPTIONS", "/extract", {}, 405),
    "bug": (
        "POST",
        "/extract",
        raw(npy(np.full((1, 4), 1000, np.float32)), "application/x-npy", model="touchy", layers="."),
        500,
    ),
}
CROSS = {
    "origin": "http://localhost:3000",
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


def guarded(reply: httpx.Response) -> None:
    assert all(name in reply.headers for name in ALWAYS)
    for field, value in EXPECTED.items():
        assert reply.headers.get_list(field) == [value]
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert not [field for field in reply.headers if field.startswith("access-control-")]
    assert "server" not in reply.headers
