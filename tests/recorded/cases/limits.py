"""A server with small limits, beneath a prefix, that may fetch pictures of one host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.recorded.request import Request, get, image, multipart, npy, picture, post, send

PREFIX = "/features"
SETTINGS = {
    "LAYERTAP_ROOT_PATH": PREFIX,
    "LAYERTAP_MAX_INPUTS": "4",
    "LAYERTAP_MAX_BODY_BYTES": "200kB",
    "LAYERTAP_MAX_PIXELS": "10000",
    "LAYERTAP_MAX_RESIZED_PIXELS": "40000",
    "LAYERTAP_MAX_RESULTS": "8",
    "LAYERTAP_MAX_REPLY_BYTES": "400kB",
    "LAYERTAP_MAX_QUEUE_ROWS": "3",
    "LAYERTAP_MAX_HEAD_BYTES": "2KiB",
    "LAYERTAP_HEAD_TIMEOUT_S": "3",
    "LAYERTAP_BODY_TIMEOUT_S": "3",
    "LAYERTAP_ALLOW_URLS": "images.example.org",
}
PNG = picture(1)
ONE: dict[str, Any] = {"layers": ["pool"], "inputs": [image(PNG)]}
SLOW = b"POST /extract HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 900\r\n\r\nabc"
URLS = (
    "http://other.example.org/a.png",
    "ftp://images.example.org/a.png",
    "http://images.example.org:8080/a.png",
    "http://user@images.example.org/a.png",
    "http://images.example.org/a b.png",
    "images.example.org/a.png",
    "",
)
DOCUMENTS: dict[str, dict[str, Any]] = {
    "good": {},
    "five inputs": {"inputs": [image(PNG)] * 5},
    "four inputs in a queue of three": {"inputs": [image(PNG)] * 4},
    "four inputs, one bad, left out": {"inputs": [*[image(PNG)] * 3, image(b"x")], "on_error": "skip"},
    "pixels": {"inputs": [image(picture(1, (101, 100)))]},
    "pixels left out": {"inputs": [image(PNG), image(picture(1, (101, 100)))], "on_error": "skip"},
    "results": {"layers": ["*"]},
    "distinct layers": {"layers": [f"block1.{number}" for number in range(50)]},
    "reply": {"layers": ["block1", "block2", "block1.*"]},
    "reply of a batch": {"layers": ["block1", "block1.0"], "inputs": [image(PNG)] * 3},
    "depth": {"layers": [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]},
}


def requests() -> Iterator[Request]:
    """To ``digits``, with the prefix and without."""
    for name, fields in DOCUMENTS.items():
        yield post(f"limits/{name}", ONE | fields, f"{PREFIX}/extract")
    yield send("limits/body", b"\0" * 200_001, "image/png", "/extract", layers="pool")
    yield send("limits/resized pixels", picture(1, (1, 1300)), "image/png", "/extract", layers="pool")
    yield send("limits/rows", npy(np.zeros((5, 3, 32, 32), np.float32)), "application/x-npy", layers="pool")
    yield multipart("limits/parts", *[("images", "image/png", PNG)] * 5, layers="pool")
    yield get("limits/head", "/livez", {"x-long": "a" * 3000})
    yield get("limits/target", "/livez", x="a" * 3000)
    yield Request("limits/slow head", "GET", wire=b"GET /livez HTTP/1.1\r\nHost: localhost\r\n")
    yield Request("limits/slow body", wire=SLOW)
    for number, url in enumerate(URLS):
        yield post(f"limits/url {number}", ONE | {"inputs": [{"url": url}]})
    yield post("limits/url left out", ONE | {"inputs": [image(PNG), {"url": URLS[0]}], "on_error": "skip"})
    for path in ("/", "/livez", "/models/digits", "/models", "/docs", "/openapi.json", "/features", "/featureslivez"):
        yield get(f"prefix/{path}", path)
        yield get(f"prefix/with {path}", f"{PREFIX}{path}")
