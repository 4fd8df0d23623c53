"""Clients that send no more: who may still read is answered, who has gone is not computed for."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from http.client import HTTPConnection

import pytest

from tests.server import Live
from tests.service.gated_server import (
    admitted_rows,
    build_row_request,
    connect,
    encode_request,
    gated_module,
    hold_model,
    parse_response,
    read_to_end,
    wait_until,
)
from tests.service.sockets import POST
from tests.service.support import rows, tensor

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def gated(live: Live) -> Live:
    """A server whose model ``gated`` can be held up."""
    gated_module(live)
    return live


def test_short_requests(live: Live) -> None:
    """Requests that are followed by the end of what comes are all answered, and then the connection is closed."""
    with connect(live) as connection:
        connection.sendall(GET * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read_to_end(connection).count(b'{"status":"alive"}') == 3


def test_long_request(gated: Live) -> None:
    """A request whose client can still read is computed and answered; it passes over what it was probed with."""
    with connect(gated) as connection:
        with hold_model(gated):
            connection.sendall(encode_request(build_row_request(gated, 3)))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert admitted_rows(gated) == 4
        assert parse_response(read_to_end(connection)).status_code == 200


def test_no_body(live: Live) -> None:
    """A request that says that its body is empty is whole."""
    with connect(live) as connection:
        connection.sendall(POST.replace(b"/extract", b"/models/digits/load") + b"Content-Length: 0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert parse_response(read_to_end(connection)).status_code == 200


def test_client_library(gated: Live) -> None:
    """A library of clients passes over the probe too."""
    request = build_row_request(gated, 3)
    with closing(HTTPConnection(request.url.host, request.url.port, timeout=60)) as connection:
        with hold_model(gated):
            connection.request("POST", request.url.raw_path.decode(), request.read(), dict(request.headers))
            connection.sock.shutdown(socket.SHUT_WR)
            wait_until(lambda: admitted_rows(gated) == 4)
        assert connection.getresponse().status == 200


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_client_that_left(gated: Live, version: bytes) -> None:
    """A request whose client has gone is not computed; one of HTTP/1.0, which knows no probe, not after its end."""
    request = encode_request(build_row_request(gated, 3)).replace(b"HTTP/1.1", b"HTTP/" + version)
    with hold_model(gated) as module:
        with connect(gated) as connection:
            connection.sendall(request)
            wait_until(lambda: admitted_rows(gated) == 4)
            if version == b"1.0":
                connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: admitted_rows(gated) == 1)
    assert module.forwards == []


def test_client_that_left_after_a_long_body(gated: Live) -> None:
    """Reading goes on where a body of many reads has stopped it."""
    body = (
        json.dumps({"model": "gated", "layers": ["linear"], "inputs": [tensor(rows(1)[0])]}).encode().ljust(4 * 2**20)
    )
    with hold_model(gated) as module:
        with connect(gated) as connection:
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: admitted_rows(gated) == 2)
        wait_until(lambda: admitted_rows(gated) == 1)
    assert module.forwards == []


@pytest.mark.parametrize("sent", [POST + b"Content-Length: 9\r\n\r\n{}", POST, GET + POST])
def test_half_a_request(live: Live, sent: bytes) -> None:
    """What is no whole request then is none; those before it are answered."""
    with connect(live) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert (b"200 OK" in read_to_end(connection)) == sent.startswith(GET)
