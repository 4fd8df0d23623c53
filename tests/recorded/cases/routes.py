"""Routes beside ``/extract`` and ``/explain``, methods, pages of other sites."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.request import Json, Request, get, picture, post, send

READ = (
    "/",
    "/livez",
    "/readyz",
    "/docs",
    "/openapi.json",
    "/models",
    "/models/digits",
    "/models/resnet18",
    "/models/digits/layers",
    "/models/digits/labels",
    "/models/nothing",
    "/models/nothing/layers",
    "/models/nothing/labels",
    "/models/DIGITS",
    "/nowhere",
    "/extract/",
    "//extract",
    "/models/",
    "/docs/",
    "/redoc",
    "/favicon.ico",
    "/models/..%2f..%2fetc%2fpasswd",
    "/models/digits%00",
    "/livez?x=1",
    "/models/digits?x=1",
    "/models/digits/labels?x=1",
)
FILTERS: dict[str, Json] = {
    "match": {"match": "block2*"},
    "type": {"type": "Conv2d"},
    "leaf": {"leaf": "true"},
    "no leaf": {"leaf": "false"},
    "match and type": {"match": "block3*", "type": "BatchNorm2d"},
    "match of none": {"match": "zzz*"},
    "unknown type": {"type": "Conv9d"},
    "leaf that is none": {"leaf": "maybe"},
    "a long match": {"match": "a" * 600},
    "unknown filter": {"name": "pool"},
    "match twice": {"match": ["a", "b"]},
}
ACCEPTED = {"text": "text/plain", "html": "text/html", "any text": "text/*", "json": "application/json"}
METHODS = ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "POST", "TRACE", "BREW")
UNCOUNTED = "/models/digits/layers"  # its length depends on what was measured
FOREIGN: dict[str, Json] = {
    "cross-site": {"sec-fetch-site": "cross-site"},
    "another origin": {"origin": "https://evil.example"},
    "a broken origin": {"origin": "http://[::1"},
    "cors": {"origin": "https://evil.example", "access-control-request-method": "POST"},
}


def requests() -> Iterator[Request]:
    """Of a server without a configuration."""
    for path in READ:
        yield get(f"routes/{path}", path)
    for name, query in FILTERS.items():
        yield get(f"routes/layers by {name}", "/models/digits/layers", **query)
    for name, accepted in ACCEPTED.items():
        yield get(f"routes/layers as {name}", "/models/digits/layers", {"accept": accepted})
    yield get("routes/layers as text of some", "/models/digits/layers", {"accept": "text/plain"}, match="block2*")
    for method in METHODS:
        for path in ("/livez", "/models", "/models/digits", "/extract", "/models/digits/load", "/nowhere", "/metrics"):
            if (method, path) != ("HEAD", "/metrics"):  # its length depends on what was measured
                yield get(f"methods/{method} {path}", path, method=method)
    yield get("methods/GET /extract", "/extract")
    yield get("methods/GET /explain", "/explain")
    yield get("methods/GET /models/digits/load", "/models/digits/load")
    for name, headers in FOREIGN.items():
        yield get(f"foreign/models, {name}", "/models/digits", headers)
        yield get(f"foreign/load, {name}", "/models/digits/load", headers, method="POST")
        yield get(f"foreign/livez, {name}", "/livez", headers)
        yield get(f"foreign/options, {name}", "/extract", headers, method="OPTIONS")
    yield from _loading()


def _loading() -> Iterator[Request]:
    png = picture(1)
    for number, path in enumerate(("digits/load", "digits/unload", "digits/unload", "digits/load", "digits/load")):
        yield get(f"loading/{number} {path}", f"/models/{path}", method="POST")
        yield get(f"loading/{number} state", "/models/digits")
    yield send("loading/extract after", png, "image/png", layers="head")
    yield get("loading/unload once more", "/models/digits/unload", method="POST")
    yield send("loading/extract while unloaded", png, "image/png", layers="head")
    for path in ("nothing/load", "nothing/unload", "digits/reload", "digits/load/"):
        yield get(f"loading/{path}", f"/models/{path}", method="POST")
    yield post("loading/a body for load", {"x": 1}, "/models/digits/load")
