"""Connections on which bytes are written by hand."""

from __future__ import annotations

import socket
from contextlib import suppress
from select import select

import httpx

from tests.server import Live
from tests.service.gated_server import connect, parse_response, read_to_end, wait_until

END = b"Host: localhost\r\nConnection: close\r\n\r\n"
POST = b"POST /extract HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def exchanged(live: Live, *data: bytes) -> httpx.Response:
    """The first reply to bytes on a connection of their own, which the server has closed then."""
    with connect(live) as connection:
        with suppress(ConnectionError):  # where it has heard enough
            for each in data:
                connection.sendall(each)
        return parse_response(read_to_end(connection))


def dripped(connection: socket.socket, drop: bytes) -> bytes:
    """What the server says before it closes a connection on which drop comes after drop."""

    def answered() -> bool:
        with suppress(ConnectionError):
            connection.sendall(drop)
        return bool(select([connection], [], [], 0)[0])

    wait_until(answered)
    return read_to_end(connection)
