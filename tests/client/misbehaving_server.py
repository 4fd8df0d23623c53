"""A server of raw sockets that does to each request what a test says: refuse, cut, hang, answer nonsense."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx

Behaviour = Callable[[socket.socket, "Received"], bool]  # whether the connection goes on


@dataclass(frozen=True)
class Received:
    """A request as it arrived: its first line, headers by their names in small letters, its body.

    ``ended`` is set when the server ends.
    """

    line: str
    headers: dict[str, str]
    body: bytes
    ended: threading.Event


@dataclass
class MisbehavingServer:
    """Does to request after request what ``behaviours`` say; to all that come later what the last one does."""

    url: str
    behaviours: list[Behaviour]
    received: list[Received] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, request: Received) -> Behaviour:
        with self._lock:
            place = min(len(self.received), len(self.behaviours) - 1)
            self.received.append(request)
            return self.behaviours[place]


@contextmanager
def misbehaving(*behaviours: Behaviour, listener: socket.socket | None = None) -> Iterator[MisbehavingServer]:
    """A server on a loopback port until the block ends."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    server = MisbehavingServer(f"http://127.0.0.1:{listener.getsockname()[1]}", list(behaviours))
    connections: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threads.append(threading.Thread(target=_serve, args=(server, connection)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield server
    finally:
        server.ended.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def _serve(server: MisbehavingServer, connection: socket.socket) -> None:
    with connection, suppress(OSError):
        file = connection.makefile("rb")
        while line := file.readline().decode().strip():
            headers = {}
            while text := file.readline().decode().strip():
                name, _, value = text.partition(":")
                headers[name.lower()] = value.strip()
            body = file.read(int(headers.get("content-length", 0)))
            request = Received(line, headers, body, server.ended)
            if not server.choose(request)(connection, request):
                return


def reply(status: int, body: bytes = b"{}", **headers: str) -> Behaviour:
    """Answer; ``retry_after="1"`` is a header, and so is whatever else is named."""
    names = {"content_type": "application/json", "content_length": str(len(body)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in names.items())

    def behave(connection: socket.socket, request: Received) -> bool:
        connection.sendall(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)
        return names.get("connection") != "close"

    return behave


def cut(connection: socket.socket, request: Received) -> bool:
    """Close the connection without an answer."""
    return False


def cut_reply(body: bytes, at: int) -> Behaviour:
    """Answer the first bytes of a longer body."""
    return reply(200, body[:at], content_length=str(len(body)), connection="close")


def hang(connection: socket.socket, request: Received) -> bool:
    """Say nothing until the server ends."""
    request.ended.wait()
    return False


def drip(connection: socket.socket, request: Received) -> bool:
    """Answer a byte now and a byte then, for ever."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n")
    while not request.ended.wait(0.02):
        connection.sendall(b" ")
    return False


def trickle(body: bytes) -> Behaviour:
    """Answer a safetensors file a few bytes at a time, half a second long."""

    def behave(connection: socket.socket, request: Received) -> bool:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/x-safetensors\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        step = -(-len(body) // 10)
        for start in range(0, len(body), step):
            threading.Event().wait(0.05)
            connection.sendall(body[start : start + step])
        return True

    return behave


def relay(url: str) -> Behaviour:
    """Answer what another server answers."""

    def behave(connection: socket.socket, request: Received) -> bool:
        method, path, _ = request.line.split(" ")
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "connection")}
        response = httpx.request(method, url + path, headers=headers, content=request.body, timeout=60, verify=False)
        names = {"content_type": response.headers["content-type"]}
        names |= {name: value for name, value in response.headers.items() if name.startswith("x-layertap-")}
        return reply(response.status_code, response.content, **names)(connection, request)

    return behave
