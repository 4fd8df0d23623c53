"""Sends one request on a connection of its own and reads the answer."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse

from tests.recorded.request import Request

HOST = "127.0.0.1"
TIMEOUT_S = 300


@dataclass(frozen=True)
class Answer:
    """What came back, names of headers in small letters; status 0 where the connection was closed without an answer."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def exchange(port: int, request: Request) -> Answer:
    """Send a request to a port of this machine."""
    if request.wire is not None:
        return _exchange_bytes(port, request.wire, request.method)
    connection = HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    try:
        connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        length = {} if request.body is None else {"content-length": str(len(request.body))}
        for name, value in {"host": "localhost", **length, **dict(request.headers)}.items():
            connection.putheader(name, value.encode("latin-1"))
        with suppress(BrokenPipeError, ConnectionResetError):  # what is refused early is answered all the same
            connection.endheaders(request.body)
        return _read(connection.getresponse())
    finally:
        connection.close()


def _exchange_bytes(port: int, data: bytes, method: str) -> Answer:
    with socket.create_connection((HOST, port), TIMEOUT_S) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        response = HTTPResponse(connection, method=method)
        try:
            response.begin()
            return _read(response)
        except (HTTPException, ConnectionError):
            return Answer(0)
        finally:
            response.close()


def _read(response: HTTPResponse) -> Answer:
    headers = tuple((name.lower(), value) for name, value in response.getheaders())
    return Answer(response.status, headers, response.read())
