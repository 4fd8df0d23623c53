"""What comes over a connection before, around and instead of a request: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from layertap.service.http.exchange import MAX_FIELDS
from layertap.service.http.protocol import MAX_PIPELINED, Connection, make_server_config
from layertap.service.settings import Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import (
    connect,
    encode_request,
    parse_response,
    read_to_end,
    wait_until,
)
from tests.service.sockets import CHUNKED, END, POST, dripped, exchanged
from tests.service.support import Control, npy, problem, raw

GET = b"GET /livez HTTP/1.1\r\n"
LIVEZ = GET + b"Host: localhost\r\n\r\n"
LONG = b"a" * 100_000
PIECES = (b"a" * 2**16,) * 64

ENDLESS: dict[str, tuple[bytes, ...]] = {
    "a field": (GET + b"X: ", *PIECES),
    "empty lines": (b"\r\n" * 2**15,) * 64,
    "a trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nX: ", *PIECES),
    "a chunk's extension": (CHUNKED + b"2;", *PIECES),
    "a head after a reply": (LIVEZ * 2 + GET + b"X: ", *PIECES),
    "a head after one that waits": (POST + b"Content-Length: 2\r\n\r\n{}" + GET + b"X: ", *PIECES),
}

NO_HTTP = {
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "LF only": GET.replace(b"\r\n", b"\n") + END.replace(b"\r\n", b"\n"),
    "a NUL in a field": GET + b"X: a\0b\r\n" + END,
    "a folded field": GET + b"X: a\r\n b\r\n" + END,
    "a broken target": b"GET http://[::1/livez HTTP/1.1\r\n" + END,
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\n" + END,
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length of 5,000 digits": POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "a chunk's size beyond 64 bits": CHUNKED + b"f" * 17 + b"\r\n",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless(live: Live, control: Control, name: str) -> None:
    """What is no body has a bound: the connection is cut, and requests before it are answered."""
    with connect(live) as connection, suppress(ConnectionError):
        for piece in ENDLESS[name]:
            connection.sendall(piece)
        read_to_end(connection)
    control.check()


def test_many_fields(live: Live) -> None:
    """A request has as many fields as there may be, and no more; so has the next one."""
    many = GET + b"a:\r\n" * (MAX_FIELDS - 2)
    reply = exchanged(live, many + b"Host: localhost\r\nb:\r\n\r\n", many + END)
    assert reply.status_code == 200
    assert reply.text.count("HTTP/1.1 200") == 1  # the second reply
    assert f"{MAX_FIELDS} header fields" in problem(exchanged(live, many + b"b:\r\n" + END), 400)["detail"]


@pytest.mark.parametrize("hosts", [0, 2])
def test_host(live: Live, hosts: int) -> None:
    """A request of HTTP/1.1 has one ``Host``; HTTP/1.0 knows none."""
    end = b"Host: localhost\r\n" * hosts + b"Connection: close\r\n\r\n"
    assert "one Host" in problem(exchanged(live, GET + end), 400)["detail"]
    assert exchanged(live, GET.replace(b"1.1", b"1.0") + end).status_code == 200


@pytest.mark.parametrize("name", NO_HTTP)
def test_no_http(live: Live, control: Control, name: str) -> None:
    """What is no HTTP/1.1 is refused."""
    reply = exchanged(live, NO_HTTP[name])
    assert reply.status_code == 400
    assert reply.headers["connection"] == "close"
    control.check()


def test_tiny_chunks(live: Live, control: Control) -> None:
    """A body in 700,000 chunks is one body, however much of it comes before the application reads."""
    body = json.dumps(control.request["json"]).encode().ljust(700_000)
    reply = exchanged(live, CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert (reply.status_code, reply.content) == (200, control.expected)


def test_trailers_are_no_headers(live: Live, control: Control) -> None:
    """What comes after a body says nothing about it."""
    body = json.dumps(control.request["json"]).encode()
    trailer = b"Content-Encoding: gzip\r\nContent-Type: image/png\r\n"
    reply = exchanged(live, CHUNKED + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer))
    assert (reply.status_code, reply.content) == (200, control.expected)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_offer_to_upgrade(live: Live, control: Control, protocol: bytes) -> None:
    """A client that offers another protocol is answered in this one, body and all; nothing of it is another request."""
    body = json.dumps(control.request["json"]).encode()
    fields = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABk\r\n" % protocol
    head = POST.replace(b"Connection: close\r\n", fields) + b"Content-Length: %d\r\n\r\n" % len(body)
    name = head.index(b"\nUpgrade:")
    for cut in (9, *range(name, name + 11)):
        with connect(live) as connection:
            for piece in (head[:cut], head[cut:-2], head[-2:] + body[:99], body[99:], GET + END):
                connection.sendall(piece)
                time.sleep(0.005)  # so that the server reads each by itself
            reply = parse_response(read_to_end(connection))
        assert reply.status_code == 200
        first, _, second = reply.content.partition(b"HTTP/1.1 ")
        assert first == control.expected
        assert second.startswith(b"200")
    with connect(live) as connection:
        for _ in range(2):  # a head and nothing after it, as browsers and curl send it
            connection.sendall(GET + b"Host: localhost\r\n" + fields + b"\r\n")
            assert connection.recv(2**16).endswith(b'{"status":"alive"}')


def test_requests_in_a_row(live: Live) -> None:
    """Requests sent at once on one connection are answered in order; rubbish ends the connection."""
    lines = (LIVEZ, LIVEZ.replace(b"livez", b"nowhere"))
    text = exchanged(live, b"".join(lines) * 2 + GET + END).text
    assert [text.count(f"HTTP/1.1 {status}") for status in (200, 404)] == [2, 2]  # after the first
    assert exchanged(live, b"".join(lines) + lines[0] + b"\0rubbish\r\n\r\n").text.count("HTTP/1.1 ") < 3


def test_no_http_behind_a_request(live: Live) -> None:
    """A request that came whole is answered before what follows ends the connection."""
    with connect(live) as connection:
        connection.sendall(LIVEZ + b"no HTTP\r\n\r\n")
        data = read_to_end(connection)
    assert data.startswith(b"HTTP/1.1 200 OK")
    assert data.endswith(b'{"status":"alive"}')


def test_many_requests_in_a_row(live: Live) -> None:
    """So many wait at most for the one in hand; those are answered, then the connection ends."""
    with connect(live) as connection:
        connection.sendall(LIVEZ * (MAX_PIPELINED + 100))
        answered = read_to_end(connection).count(b'{"status":"alive"}')
    assert MAX_PIPELINED <= answered < MAX_PIPELINED + 100


@pytest.fixture(scope="module")
def hasty(serve: Serve) -> Iterator[Live]:
    """A server that waits for nobody."""
    with serve(head_timeout_s=0.3, body_timeout_s=0.3, send_timeout_s=0.3) as live:
        yield live


@pytest.mark.parametrize("begun", [b"", b"G", GET, GET + b"X: a"])
def test_half_a_head(hasty: Live, begun: bytes) -> None:
    """A connection on which no request begins is closed without a word."""
    with connect(hasty) as connection:
        connection.sendall(begun)
        assert read_to_end(connection) == b""


SLOW: dict[str, tuple[bytes, bytes, bytes]] = {  # what is answered before, what is begun, and what comes drop by drop
    "a head": (b"", GET + b"X: ", b"a"),
    "a later head": (LIVEZ, GET + b"X: ", b"a"),
    "empty lines": (b"", b"", b"\r\n"),
    "chunks": (b"", CHUNKED, b"1\r\n \r\n"),
    "a body": (b"", POST + b"Content-Length: 100000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow(hasty: Live, name: str) -> None:
    """What comes byte by byte is given up when its time is over; without a word where no request has begun."""
    before, begun, drop = SLOW[name]
    with connect(hasty) as connection:
        if before:
            connection.sendall(before)
            assert connection.recv(2**16).endswith(b'{"status":"alive"}')
        connection.sendall(begun)
        data = dripped(connection, drop)
    if begun.startswith(POST):
        reply = parse_response(data)
        assert "0.3 s" in problem(reply, 408)["detail"]
        assert reply.headers["connection"] == "close"
    else:
        assert data == b""
    assert hasty.client.get("/readyz").status_code == 200


def test_nothing_is_left_of_a_connection(serve: Serve) -> None:
    """A connection that is over, however it ended, does not wait for the garbage collector or a timer."""

    def left() -> int:
        return sum(issubclass(type(each), Connection | HttpToolsProtocol) for each in gc.get_objects())

    upload = b"POST /extract HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
    with serve() as live:
        gc.collect()
        gc.disable()
        try:
            before = left()
            for sent, reset in product((LIVEZ, upload, GET + b"X : a\r\n"), (True, False)):
                with connect(live) as connection:
                    connection.sendall(sent)
                    assert connection.recv(9) == b"HTTP/1.1 "
                    if reset:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wait_until(lambda: left() <= before)  # of earlier servers some may end meanwhile
        finally:
            gc.enable()


def test_reply_that_nobody_reads(hasty: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A large reply is kept only as long as it is taken."""
    request = raw(npy(np.zeros((200, 3, 32, 32), np.float32)), "application/x-npy", layers="block1", format="npy")
    with connect(hasty) as connection:
        connection.sendall(encode_request(hasty.client.build_request("POST", "/extract", **request)))
        wait_until(lambda: "a connection was cut: slow reader" in caplog.messages)
        reply = parse_response(read_to_end(connection))
    assert reply.status_code == 200
    assert 0 < len(reply.content) < int(reply.headers["content-length"])
    assert hasty.client.get("/models/digits").json()["hooks"] == 0


def test_last_reply_that_nobody_reads(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of a short reply is kept no longer, though the server has closed the connection already."""
    with serve(send_timeout_s=0.3, head_timeout_s=0.3, send_buffer=2**12) as live:
        request = raw(npy(np.zeros((1, 3, 32, 32), np.float32)), "application/x-npy", layers="block2", format="npy")
        request["headers"] |= {"connection": "close"}
        assert 2**15 < len(live.client.post("/extract", **request).content) < 2**16  # uvicorn waits for none so short
        with connect(live, buffer=2**11) as connection:
            connection.sendall(encode_request(live.client.build_request("POST", "/extract", **request)))
            wait_until(lambda: "a connection was cut: slow reader" in caplog.messages)
            assert len(read_to_end(connection)) < 2**15


def test_log_of_refusals(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """What is cut before it is a request is logged, without what was sent."""
    with caplog.at_level(logging.INFO):
        exchanged(live, b"my-secret \x1b[31m\r\n\r\n")
        with connect(live) as connection, suppress(ConnectionError):
            for piece in (GET + b"X: my-secret", *PIECES):
                connection.sendall(piece)
            read_to_end(connection)
    assert "Invalid HTTP request received." in caplog.messages
    assert "a connection was cut: head too large" in caplog.messages
    assert "my-secret" not in caplog.text


def test_head_without_body(tmp_path: Path) -> None:
    """A reply's head does not wait for a body that is not there yet; all arrives in order."""
    gate = asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await gate.wait()
        await send({"type": "http.response.body", "body": b"body"})

    async def ask() -> bytes:
        app = FastAPI()
        app.middleware_stack = answer
        config = make_server_config(app, Settings(cache_dir=tmp_path), lifespan="off")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(LIVEZ)
            head = await reader.readuntil(b"\r\n\r\n")  # nothing else is written until it is here
            gate.set()
            body = await reader.readexactly(4)
            writer.close()
            server.should_exit = True
            await serving
        assert head.startswith(b"HTTP/1.1 200")
        return body

    assert asyncio.run(ask()) == b"body"
