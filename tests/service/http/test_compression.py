"""Replies compressed for those who ask for it."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import httpx
import numpy as np
import pytest
import zstandard

from layertap.service.http.compression import choose_coding
from tests.server import Live
from tests.service.support import Json, image, npy, picture, raw

UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "zstd": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
}
BODY: Json = {"layers": ["block3"], "pool": "mean", "inputs": [image(picture(seed)) for seed in range(4)]}
ROWS = npy(np.random.default_rng(5).standard_normal((60, 3, 32, 32)).astype(np.float32))


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("zstd", "zstd"),
        ("gzip, zstd", "zstd"),
        ("gzip;q=0", None),
        ("gzip;q=0, zstd;q=0.1", "zstd"),
        ("identity;q=0.5, gzip;q=0.4", None),
        ("*", None),
        ("*;q=0, gzip", "gzip"),
        ("gzip;q=high", None),
        ("x," * 100 + "gzip", None),
    ],
)
def test_choice(accepted: str, coding: str | None) -> None:
    """The coding is the one that is welcome most, and none where none is asked for by its name."""
    assert choose_coding(accepted.encode()) == coding


ROUTES: dict[str, tuple[str, str, Json]] = {
    "extract": ("POST", "/extract", {"json": BODY}),
    "many numbers": ("POST", "/extract", raw(ROWS, "application/x-npy", layers="block1", encoding="base64")),
    "the document": ("GET", "/openapi.json", {}),
    "npy": ("POST", "/extract", raw(ROWS, "application/x-npy", layers="block1", format="npy")),
    "npz": ("POST", "/extract", raw(ROWS, "application/x-npy", layers="block1", format="npz")),
    "a small safetensors": ("POST", "/extract?format=safetensors", {"json": BODY}),
    "a short answer": ("POST", "/extract?dry_run=true", {"json": {"layers": ["pool"]}}),
}


def sent(live: Live, name: str, accepted: str) -> tuple[httpx.Headers, bytes]:
    """The head of a reply and its body as it was sent."""
    method, url, request = ROUTES[name]
    request = {**request, "headers": {**request.get("headers", {}), "accept-encoding": accepted}}
    with live.client.stream(method, url, **request) as reply:
        assert reply.status_code == 200
        return reply.headers, b"".join(reply.iter_raw())


@pytest.mark.parametrize("coding", UNPACK)
@pytest.mark.parametrize("name", ["extract", "many numbers", "the document"])
def test_compressed(live: Live, name: str, coding: str) -> None:
    """What is text arrives smaller and says the same."""
    head, data = sent(live, name, coding)
    plain_head, plain = sent(live, name, "identity")
    assert head["content-encoding"] == coding
    assert "content-encoding" not in plain_head
    assert head["vary"] == plain_head["vary"] == "Accept, Accept-Encoding"
    assert UNPACK[coding](data) == plain
    assert len(data) < 0.8 * len(plain)
    assert int(head.get("content-length", len(data))) == len(data)
    assert ("content-length" in head) == (name != "many numbers")
    assert head["content-type"] == plain_head["content-type"]


@pytest.mark.parametrize("name", ["npy", "npz", "a small safetensors", "a short answer"])
def test_not_compressed(live: Live, name: str) -> None:
    """Arrays, and what is short, are sent as they are."""
    head, data = sent(live, name, "gzip, zstd")
    assert "content-encoding" not in head
    assert int(head["content-length"]) == len(data)
