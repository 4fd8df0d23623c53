"""Replies compressed for those who ask for it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable

import httpx
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from layertap.service.http.compression import MIN_BYTES, choose_coding, compress_replies
from tests.server import Live
from tests.service.gated_server import connect, parse_response, read_to_end
from tests.service.support import Json, image, npy, picture, problem, raw

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
        ("GZIP", "gzip"),
        ("gzip;q=1.0, zstd;q=0.5", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=0, zstd;q=0.1", "zstd"),
        ("identity;q=0.5, gzip;q=0.4", None),
        ("*", None),
        ("*;q=0, gzip", "gzip"),
        ("br, deflate, compress", None),
        ("gzip;q=high", None),
        ("x," * 100 + "gzip", None),
        ("\x00é", None),
    ],
)
def test_choice(accepted: str, coding: str | None) -> None:
    """The coding is the one that is welcome most, and none where none is asked for by its name."""
    assert choose_coding(accepted) == coding


ROUTES: dict[str, tuple[str, str, Json]] = {
    "extract": ("POST", "/extract", {"json": BODY}),
    "many numbers": (
        *("POST", "/extract?layers=block1&encoding=base64"),
        {"content": ROWS, "headers": {"content-type": "application/x-npy"}},
    ),
    "layers": ("GET", "/models/digits/layers", {}),
    "a tree of layers": ("GET", "/models/digits/layers", {"headers": {"accept": "text/plain"}}),
    "the document": ("GET", "/openapi.json", {}),
}


def sent(live: Live, name: str, accepted: str) -> tuple[httpx.Headers, bytes]:
    """The head of a reply and its body as it was sent."""
    method, url, request = ROUTES[name]
    request = {**request, "headers": {**request.get("headers", {}), "accept-encoding": accepted}}
    with live.client.stream(method, url, **request) as reply:
        assert reply.status_code == 200
        return reply.headers, b"".join(reply.iter_raw())


@pytest.mark.parametrize("coding", UNPACK)
@pytest.mark.parametrize("name", ROUTES)
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


PLAIN: dict[str, tuple[str, Json]] = {
    "npy": ("/extract?layers=block1&format=npy", raw(ROWS, "application/x-npy")),
    "npz": ("/extract?layers=block1&format=npz", raw(ROWS, "application/x-npy")),
    "a small safetensors": ("/extract", {"json": BODY, "params": {"format": "safetensors"}}),
    "a short answer": ("/extract?dry_run=true", {"json": {"layers": ["pool"]}}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_not_compressed(live: Live, name: str) -> None:
    """Arrays, and what is short, are sent as they are."""
    url, request = PLAIN[name]
    if not request.get("params"):
        request = {key: value for key, value in request.items() if key != "params"}
    request = {**request, "headers": {**request.get("headers", {}), "accept-encoding": "gzip, zstd"}}
    reply = live.client.post(url, **request)
    assert reply.status_code == 200
    assert "content-encoding" not in reply.headers
    assert int(reply.headers["content-length"]) == len(reply.content)


def test_errors(live: Live) -> None:
    """A problem is never compressed: it is short."""
    reply = live.client.post("/extract", json={"layers": ["nothing"] * 30}, headers={"accept-encoding": "gzip"})
    problem(reply, 422)
    assert "content-encoding" not in reply.headers


def test_old_clients(live: Live) -> None:
    """HTTP/1.0 gets what it gets: it knows no reply without a length."""
    with connect(live) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n")
        reply = parse_response(read_to_end(connection))
    assert "content-encoding" not in reply.headers
    assert json.loads(reply.content)["info"]["title"] == "layertap"


@given(
    pieces=st.lists(st.binary(max_size=200).map(lambda data: data * 20), min_size=1, max_size=5),
    coding=st.sampled_from(list(UNPACK)),
    media_type=st.sampled_from([b"application/json", b"text/plain; charset=utf-8", b"image/png", b"application/x-npy"]),
    packed=st.booleans(),
)
def test_any_reply(pieces: list[bytes], coding: str, media_type: bytes, packed: bool) -> None:
    """A reply in any pieces arrives whole, announced as it is."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def run(function: Callable[[], bytes]) -> bytes:
        return function()

    async def reply() -> None:
        scope = {"type": "http", "http_version": "1.1", "headers": [(b"accept-encoding", coding.encode())]}
        wrapped = compress_replies(scope, send, run)
        length = (b"content-length", str(sum(map(len, pieces))).encode())
        headers = [(b"content-type", media_type), length, *([(b"content-encoding", b"br")] if packed else [])]
        await wrapped({"type": "http.response.start", "status": 200, "headers": headers})
        for number, piece in enumerate(pieces):
            await wrapped({"type": "http.response.body", "body": piece, "more_body": number < len(pieces) - 1})

    asyncio.run(reply())
    start, *bodies = messages
    headers = dict(start["headers"])
    data = b"".join(each["body"] for each in bodies)
    is_text = not packed and media_type not in (b"image/png", b"application/x-npy")
    is_long = len(pieces) > 1 or len(pieces[0]) >= MIN_BYTES
    assert (headers.get(b"content-encoding") == coding.encode()) == (is_text and is_long)
    assert (UNPACK[coding](data) if is_text and is_long else data) == b"".join(pieces)
    assert int(headers.get(b"content-length", len(data))) == len(data)
    assert [each.get("more_body", False) for each in bodies] == [True] * (len(bodies) - 1) + [False]
