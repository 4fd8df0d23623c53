"""What comes over a connection before, around and instead of a request: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import struct
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from layertap.service.http import protocol
from layertap.service.http.protocol import MAX_FIELDS, ReplyTransport
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import (
    build_row_request,
    connect,
    encode_request,
    gated_module,
    parse_response,
    read_to_end,
    wait_until,
)
from tests.service.sockets import CHUNKED, END, POST, dripped, exchanged
from tests.service.support import Control, configured, net, npy, problem, raw

GET = b"GET /livez HTTP/1.1\r\n"
LIVEZ = GET + b"Host: localhost\r\n\r\n"
LONG = b"a" * 100_000
PIECES = (b"a" * 2**16,) * 64

TOO_LARGE: dict[str, tuple[bytes, ...]] = {
    "a field": (GET + b"X: " + LONG + b"\r\n" + END,),
    "very many fields": (GET + b"a:\r\n" * 20_000 + END,),
    "a target": (b"GET /livez?" + LONG + b" HTTP/1.1\r\n" + END,),
    "a field without end": (GET + b"X: ", *PIECES),
    "empty lines without end": (b"\r\n" * 2**15,) * 64,
    "a trailer without end": (CHUNKED + b"2\r\n{}\r\n0\r\nX: ", *PIECES),
    "a chunk's extension without end": (CHUNKED + b"2;", *PIECES),
    "a head after a reply": (LIVEZ * 2 + GET + b"X: ", *PIECES),
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


@pytest.mark.parametrize("name", TOO_LARGE)
def test_too_large(live: Live, control: Control, name: str) -> None:
    """What is no body has a limit, and is refused as soon as it is over it; requests before it are answered."""
    reply = exchanged(live, *TOO_LARGE[name])
    if "after a reply" in name:
        assert reply.status_code == 200
    else:
        assert "65536 bytes" in problem(reply, 431)["detail"]
        assert reply.headers["connection"] == "close"
    control.check()


def test_within_limits(live: Live) -> None:
    """A head of nearly the limit, or of as many fields as there may be, is taken; so is the next one."""
    large = GET + b"Host: localhost\r\nX: " + b"a" * 65_000 + b"\r\n\r\n"
    many = GET + b"a:\r\n" * (MAX_FIELDS - 2) + END
    reply = exchanged(live, large, many)
    assert reply.status_code == 200
    assert reply.text.count("HTTP/1.1 200") == 1  # the second reply
    problem(exchanged(live, GET + b"a:\r\n" * (MAX_FIELDS - 1) + END), 431)


@pytest.mark.parametrize("name", NO_HTTP)
def test_no_http(live: Live, control: Control, name: str) -> None:
    """What is no HTTP/1.1 is refused in words, as every other error is."""
    reply = exchanged(live, NO_HTTP[name])
    problem(reply, 400)
    assert reply.headers["connection"] == "close"
    control.check()


def test_tiny_chunks(live: Live, control: Control) -> None:
    """A body in 70,000 chunks is one body."""
    body = json.dumps(control.request["json"]).encode().ljust(70_000)
    reply = exchanged(live, CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert (reply.status_code, reply.content) == (200, control.expected)


def test_trailers_are_no_headers(live: Live, control: Control) -> None:
    """What comes after a body says nothing about it."""
    body = json.dumps(control.request["json"]).encode()
    trailer = b"Content-Encoding: gzip\r\nContent-Type: image/png\r\n"
    reply = exchanged(live, CHUNKED + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer))
    assert (reply.status_code, reply.content) == (200, control.expected)


@pytest.mark.parametrize(("protocol", "pieces"), [(b"h2c", 1), (b"websocket", 200)])
def test_offer_to_upgrade(live: Live, control: Control, protocol: bytes, pieces: int) -> None:
    """A client that offers another protocol is answered in this one, body and all; nothing of it is another request."""
    body = json.dumps(control.request["json"]).encode()
    fields = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABk\r\n" % protocol
    head = POST.replace(b"Connection: close\r\n", fields) + b"Content-Length: %d\r\n\r\n" % len(body)
    with connect(live) as connection:
        data = head + body
        for at in range(pieces):
            connection.sendall(data[at * len(data) // pieces : (at + 1) * len(data) // pieces])
        connection.sendall(GET + END)
        reply = parse_response(read_to_end(connection))
    assert reply.status_code == 200
    first, _, second = reply.content.partition(b"HTTP/1.1 ")
    assert first == control.expected
    assert second.startswith(b"200")
    problem(exchanged(live, head.replace(b"Content-Length: ", b"Content-Length: x") + body), 400)
    with connect(live) as connection:
        for _ in range(2):  # a head and nothing after it, as browsers and curl send it
            connection.sendall(GET + b"Host: localhost\r\n" + fields + b"\r\n")
            assert connection.recv(2**16).endswith(b'{"status":"alive"}')
        connection.sendall((GET + b"Host: localhost\r\n" + fields + b"\r\n") * 1500 + GET + END)
        assert read_to_end(connection).count(b"HTTP/1.1 200 OK") == 1501


def test_requests_in_a_row(live: Live) -> None:
    """Requests sent at once on one connection are answered in order; rubbish after them only ends the connection."""
    lines = (LIVEZ, LIVEZ.replace(b"livez", b"nowhere"))
    text = exchanged(live, b"".join(lines) * 2 + GET + END).text
    assert [text.count(f"HTTP/1.1 {status}") for status in (200, 404)] == [2, 2]  # after the first
    reply = exchanged(live, b"".join(lines) + lines[0] + b"\0rubbish\r\n\r\n")
    assert reply.status_code == 200
    assert reply.text.count("HTTP/1.1 404") == 1
    assert reply.text.endswith('{"status":"alive"}')


@pytest.mark.slow
def test_head_that_nobody_reads(serve: Serve) -> None:
    """A head that waits behind a pipeline has its time when the server reads on, not before, and no more than that."""
    with (
        serve(configured(net("gated", "Gated")), head_timeout_s=1.0) as live,
        connect(live) as connection,
        connect(live) as silent,
    ):
        module = gated_module(live)
        module.gate.clear()
        for each in (connection, silent):
            each.sendall(encode_request(build_row_request(live, 1)) + LIVEZ + GET)
        assert module.entered.wait(20)
        with connect(live) as later:
            assert later.recv(1) == b""  # whose time began later, and is over
        module.gate.set()
        data = b""
        while data.count(b"HTTP/1.1 200") < 2:
            data += connection.recv(2**16)
        connection.sendall(END)
        assert (data + read_to_end(connection)).count(b"HTTP/1.1 200") == 3
        assert b"HTTP/1.1 408" in read_to_end(silent)


@pytest.fixture(scope="module")
def hasty(serve: Serve) -> Iterator[Live]:
    """A server that waits for nobody."""
    with serve(head_timeout_s=0.3, body_timeout_s=0.3, send_timeout_s=0.3) as live:
        yield live


@pytest.mark.parametrize("begun", [b"", b"G", GET, GET + b"X: a"])
def test_half_a_head(hasty: Live, begun: bytes) -> None:
    """A head that does not go on is given up; where nothing was ever said, without a word."""
    with connect(hasty) as connection:
        connection.sendall(begun)
        data = read_to_end(connection)
    assert bool(data) == bool(begun)
    if begun:
        check_late(data)


def check_late(data: bytes) -> None:
    """What came says that the time is over, and closes the connection."""
    reply = parse_response(data)
    assert "0.3 s" in problem(reply, 408)["detail"]
    assert reply.headers["connection"] == "close"


SLOW: dict[str, tuple[bytes, bytes, bytes]] = {  # what is answered before, what is begun, and what comes drop by drop
    "a head": (b"", GET + b"X: ", b"a"),
    "a later head": (LIVEZ, GET + b"X: ", b"a"),
    "empty lines": (b"", b"", b"\r\n"),
    "chunks": (b"", CHUNKED, b"1\r\n \r\n"),
    "a body": (b"", POST + b"Content-Length: 100000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow(hasty: Live, name: str) -> None:
    """What comes byte by byte is given up when its time is over; empty lines without a word."""
    before, begun, drop = SLOW[name]
    with connect(hasty) as connection:
        if before:
            connection.sendall(before)
            assert connection.recv(2**16).endswith(b'{"status":"alive"}')
        connection.sendall(begun)
        data = dripped(connection, drop)
    assert bool(data) == bool(begun)
    if begun:
        check_late(data)
    assert hasty.client.get("/readyz").status_code == 200


LATE: dict[str, tuple[bytes, ...]] = {
    "a long head": (GET + b"X: " + LONG,),
    "a broken chunk": (CHUNKED, b"two\r\n"),
    "a body nobody wants": (b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n",),
}


@pytest.mark.parametrize("name", LATE)
def test_end_of_listening(
    hasty: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Who sends on after a refusal is listened to for a while, hears no more, and has the reply all the same."""
    monkeypatch.setattr(protocol, "LINGER_S", 0.6)  # longer than a head may take
    with connect(hasty) as connection:
        for piece in LATE[name]:
            connection.sendall(piece)
        assert connection.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 431")

        def refused() -> bool:
            try:
                connection.sendall(b"x" * 2**16)
            except ConnectionError:
                return True
            return False

        wait_until(refused)
    assert sum(message.startswith("refused with") for message in caplog.messages) == ("nobody" not in name)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_nothing_is_left_of_a_connection(serve: Serve) -> None:
    """A connection that is over, however it ended, does not wait for the garbage collector or a timer."""

    def left() -> int:
        return sum(issubclass(type(each), protocol.BoundedHttpProtocol) for each in gc.get_objects())

    upload = b"POST /extract HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
    with serve() as live:
        before = left()
        gc.disable()
        try:
            for sent, reset in product((LIVEZ, upload, GET + b"X : a\r\n"), (True, False)):
                with connect(live) as connection:
                    connection.sendall(sent)
                    assert connection.recv(9) == b"HTTP/1.1 "
                    if reset:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wait_until(lambda: left() == before)
        finally:
            gc.enable()


def test_reply_that_nobody_reads(hasty: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A large reply is kept only as long as it is taken."""
    request = raw(npy(np.zeros((200, 3, 32, 32), np.float32)), "application/x-npy", layers="block1", format="npy")
    with connect(hasty) as connection:
        connection.sendall(encode_request(hasty.client.build_request("POST", "/extract", **request)))
        wait_until(lambda: "a reply was not read" in caplog.messages)
        reply = parse_response(read_to_end(connection))
    assert reply.status_code == 200
    assert 0 < len(reply.content) < int(reply.headers["content-length"])
    assert hasty.client.get("/models/digits").json()["hooks"] == 0


def test_last_reply_that_nobody_reads(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of a short reply is kept no longer, though the server has closed the connection already."""
    with serve(send_timeout_s=0.3, send_buffer=2**12) as live:
        request = raw(npy(np.zeros((1, 3, 32, 32), np.float32)), "application/x-npy", layers="block2", format="npy")
        request["headers"] |= {"connection": "close"}
        assert 2**15 < len(live.client.post("/extract", **request).content) < 2**16  # uvicorn waits for none so short
        with connect(live, buffer=2**11) as connection:
            connection.sendall(encode_request(live.client.build_request("POST", "/extract", **request)))
            wait_until(lambda: "a reply was not read" in caplog.messages)
            assert len(read_to_end(connection)) < 2**15


def test_log_of_refusals(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """What is refused before it is a request is told in the log, without what was sent."""
    with caplog.at_level(logging.INFO):
        exchanged(live, b"my-secret \x1b[31m\r\n\r\n")
        exchanged(live, GET + b"X: my-secret" + LONG + END)
    assert sum("refused with" in message for message in caplog.messages) == 2
    assert "my-secret" not in caplog.text


def test_head_without_body() -> None:
    """A reply's head does not wait for a body that is not there yet; all arrives in order."""
    head = b"HTTP/1.1 200 OK\r\n\r\n"

    async def begin_reply() -> bytes:
        served: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: served.set_result(writer), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        plain = (await served).transport
        transport = ReplyTransport(plain, plain.close, 60, logging.getLogger("uvicorn.error"))
        transport.write(head)
        assert await reader.readexactly(len(head)) == head  # nothing else is written until it is here
        transport.write(b"body")
        transport.close()
        body = await reader.read()
        writer.close()
        server.close()
        return body

    assert asyncio.run(begin_reply()) == b"body"
