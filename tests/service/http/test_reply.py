"""Large replies: whole, in order, and no longer in memory than they wait for their peer."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from layertap.service.formats.buffers import view_bytes
from layertap.service.http.reply import LARGE, PIECE, BuffersResponse
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import connect, encode_request, read_to_end, wait_until
from tests.service.queue_harness import gauges
from tests.service.support import Json, npy, raw

SIZES = st.sampled_from([0, 1, 5, 1000, LARGE - 1, LARGE, LARGE + 1, PIECE, PIECE + 1, 2 * PIECE + 7])
MIB = 2**20


def send_all(buffers: list[Any], look: Any = lambda message: None) -> list[Message]:
    """What an app sends of a reply; ``look`` is called with each message."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        look(message)
        messages.append({**message, "body": bytes(message.get("body", b""))})

    async def receive() -> Message:
        raise AssertionError("nothing is received")

    response = BuffersResponse(buffers, {"x-layertap-fingerprint": "f00d"}, "application/x-npy")
    del buffers[:]
    asyncio.run(response({"type": "http", "method": "POST"}, receive, send))
    return messages


@given(sizes=st.lists(SIZES, max_size=6), views=st.booleans())
def test_whole(sizes: list[int], views: bool) -> None:
    """Buffers of any sizes arrive as announced, in order and in bounded pieces, few of them."""
    chance = np.random.default_rng(len(sizes))
    arrays = [chance.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    expected = b"".join(array.tobytes() for array in arrays)
    start, *bodies = send_all([view_bytes(array) if views else array.tobytes() for array in arrays])
    headers = dict(start["headers"])
    assert headers[b"content-length"] == str(len(expected)).encode()
    assert headers[b"x-layertap-fingerprint"] == b"f00d"
    assert b"".join(each["body"] for each in bodies) == expected
    assert max(len(each["body"]) for each in bodies) <= PIECE
    assert [each.get("more_body", False) for each in bodies] == [True] * (len(bodies) - 1) + [False]
    assert len(bodies) <= 2 + 2 * len(sizes) + len(expected) // PIECE


def test_released() -> None:
    """An array is let go once what comes after it is being sent."""
    arrays = [np.zeros(3 * PIECE, np.uint8), np.zeros(100, np.uint8), np.zeros(3 * PIECE, np.uint8)]
    alive = [weakref.ref(array) for array in arrays]
    held: list[int] = []

    def look(message: Message) -> None:
        held.append(sum(each() is not None for each in alive))

    buffers: list[Any] = [view_bytes(arrays.pop(0)) for _ in range(3)]
    send_all(buffers, look)
    assert held[:4] == [3, 3, 3, 3]  # the head, the first array
    assert held[5] == 1
    assert [each() for each in alive] == [None] * 3


@pytest.mark.parametrize("name", ["safetensors", pytest.param("npz", marks=pytest.mark.slow)])
def test_memory(serve: Serve, name: str) -> None:
    """A reply is not in memory twice: beside its arrays there is little but the request."""
    rows = npy(np.ones((16, 3, 256, 256), np.float32))
    query = {"layers": "block1", "format": name}
    with serve() as live:
        live.client.post("/extract", **raw(rows, "application/x-npy", layers="head"))  # what is remembered of the shape
        tracemalloc.start()
        try:
            with live.client.stream("POST", "/extract", **raw(rows, "application/x-npy", **query)) as reply:
                size = sum(map(len, reply.iter_raw(2**16)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert size > 64 * MIB
    assert peak < 2 * size - 16 * MIB


ROW_BYTES = 2**16  # of a reply to one row
FEW, MANY = 32, 200  # rows; more bytes than a narrow server's system holds, and than any


@pytest.fixture(scope="module")
def narrow(serve: Serve) -> Iterator[Live]:
    """A server whose system holds little of a reply, with room for one large reply at a time."""
    with serve(send_buffer=2**12, max_unsent_bytes=2 * FEW * ROW_BYTES) as live:
        yield live


def ask(rows: int) -> Json:
    """A request whose reply has so many rows of ``ROW_BYTES``."""
    return raw(npy(np.zeros((rows, 3, 32, 32), np.float32)), "application/x-npy", layers="block1", format="npy")


def begin_reply(live: Live, connection: socket.socket, rows: int) -> None:
    """Send a request for a large reply, and wait for its head."""
    connection.sendall(encode_request(live.client.build_request("POST", "/extract", **ask(rows))))
    assert connection.recv(12) == b"HTTP/1.1 200"


def test_client_that_leaves(narrow: Live) -> None:
    """A reply that is being sent holds no place in the queue; nothing of it is kept where the peer goes away."""
    with connect(narrow, buffer=2**11) as connection:
        begin_reply(narrow, connection, FEW)
        assert gauges(narrow)["queue_bytes"] == 0
        assert gauges(narrow)["unsent_bytes"] > FEW * ROW_BYTES
    wait_until(lambda: gauges(narrow)["unsent_bytes"] == 0)
    assert narrow.client.get("/readyz").status_code == 200


def test_slow_reader(narrow: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A reader that takes little does not keep its model, and makes room for the next reply."""
    with connect(narrow, buffer=2**11) as slow:
        begin_reply(narrow, slow, FEW)
        assert not narrow.engine.manager.list_handles()[0].holders
        reply = narrow.client.post("/extract", **ask(FEW))
        assert len(reply.content) > FEW * ROW_BYTES
        assert len(read_to_end(slow)) < FEW * ROW_BYTES
    assert "a reply was cut" in caplog.messages


def test_progress(serve: Serve) -> None:
    """What a reader takes counts, though its system, and the server's, hold far more that was sent."""
    with serve() as live, connect(live, buffer=2**16) as connection:
        begin_reply(live, connection, MANY)

        async def count_taken() -> int:
            return next(iter(live.engine.unsent._replies)).reader.count_taken()

        before = live.run(count_taken())
        assert 0 < before < MANY * ROW_BYTES
        for _ in range(16):
            connection.recv(2**14)
        wait_until(lambda: live.run(count_taken()) > before)


def test_body_that_nobody_reads(live: Live) -> None:
    """A client that sends all before it reads gets the reply to a request whose body was not wanted, and may go on."""
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
    with connect(live) as connection:
        for _ in range(2):
            connection.sendall(head + bytes(9_000_000))
            assert connection.recv(12) == b"HTTP/1.1 404"
            while not connection.recv(2**16).endswith(b"}"):
                pass
