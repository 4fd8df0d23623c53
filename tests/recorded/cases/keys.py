"""A server that asks for keys, with forwards of four rows."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.request import Headers, Request, get, image, picture, post, send

SETTINGS = {
    "LAYERTAP_API_KEYS": "user-key",
    "LAYERTAP_ADMIN_KEYS": "admin-key,reading-key",
    "LAYERTAP_FIXED_BATCH_ROWS": "4",
}
HEADERS = (("x-api-key", "reading-key"),)
USER, ADMIN = ({"authorization": f"Bearer {name}-key"} for name in ("user", "admin"))
REFUSED: dict[str, Headers] = {
    "no key": {},
    "another key": {"authorization": "Bearer other"},
    "another x-api-key": {"x-api-key": "other"},
    "an empty key": {"authorization": "Bearer "},
    "basic": {"authorization": "Basic dXNlcjprZXk="},
    "part of a key": {"x-api-key": "user-ke"},
    "bytes": {"x-api-key": "\xff\xfe"},
}
PATHS = ("/models", "/metrics", "/docs", "/openapi.json", "/livez", "/readyz", "/", "/nowhere")


def requests() -> Iterator[Request]:
    """To ``digits``."""
    png = picture(1)
    for name, headers in REFUSED.items():
        yield send(f"keys/{name}", png, "image/png", headers=headers, layers="head")
        yield get(f"keys/load with {name}", "/models/digits/load", headers, method="POST")
    for path in PATHS:
        yield get(f"keys/{path} without a key", path)
    yield send("keys/bearer", png, "image/png", headers=USER, layers="head")
    yield send("keys/x-api-key", png, "image/png", headers={"x-api-key": "user-key"}, layers="head")
    yield send("keys/small letters", png, "image/png", headers={"authorization": "bearer user-key"}, layers="head")
    yield get("keys/models of a user", "/models/digits", USER)
    yield get("keys/load of a user", "/models/digits/load", USER, method="POST")
    yield get("keys/unload of a user", "/models/digits/unload", USER, method="POST")
    yield get("keys/cross-site with a key", "/models/digits", USER | {"sec-fetch-site": "cross-site"})
    yield get("keys/load of an administrator", "/models/digits/load", ADMIN, method="POST")
    yield get("keys/unload of an administrator", "/models/digits/unload", ADMIN, method="POST")
    yield get(
        "keys/load from another site", "/models/digits/load", ADMIN | {"origin": "https://evil.example"}, method="POST"
    )
    yield send("keys/extract of an administrator", png, "image/png", headers=ADMIN, layers="head")
    six = {"layers": ["block3", "head"], "pool": "flatten", "inputs": [image(picture(seed)) for seed in range(6)]}
    yield post("keys/six pictures in forwards of four rows", six, headers=ADMIN)
