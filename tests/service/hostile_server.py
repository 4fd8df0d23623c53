"""A server on loopback that counts who comes, and answers each path as badly as it is told to."""

from __future__ import annotations

import gzip
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread

from tests.service.support import picture

PNG = picture(7)
PACE_S = 0.05
PATIENCE_S = 60
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
END = b"\r\n\r\n"
LAST = b"0\r\n\r\n"
HANDSHAKE = b"\x16"
Answer = Callable[["HostileServer", socket.socket], None]


@dataclass
class HostileServer:
    """Counts connections; ``heads`` are what was asked, ``under_way`` how many are open.

    ``gate`` holds up what asks for ``/gate``; ``gone`` is set when a client has left an answer that does not end;
    redirects lead ``elsewhere``; where it is ``mute`` it never answers who begins with a handshake.
    """

    port: int = 0
    elsewhere: str = ""
    mute: bool = False
    hits: int = 0
    under_way: int = 0
    heads: list[bytes] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    gate: Event = field(default_factory=Event)
    gone: Event = field(default_factory=Event)
    closed: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)

    def forget(self) -> None:
        """Begin to count again."""
        with self._lock:
            self.hits = 0
            self.heads.clear()
            self.names.clear()
            self.gone.clear()

    def greet(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Answer one connection."""
        accepted.settimeout(PATIENCE_S)
        with self._lock:
            self.hits += 1
            self.under_way += 1
        try:
            with suppress(OSError), closing(accepted), closing(self._secured(accepted, tls)) as connection:
                self._answer(connection)
        finally:
            with self._lock:
                self.under_way -= 1

    def _answer(self, connection: socket.socket) -> None:
        head = b""
        while (self.mute or head[:1] != HANDSHAKE) and not head.endswith(END) and (part := connection.recv(2**16)):
            head += part
        self.heads.append(head)
        if self.mute:
            self.gone.set()
        path = head.decode("latin-1").partition(" ")[2].partition(" ")[0].partition("?")[0]
        ANSWERS.get(path, ANSWERS["/missing"])(self, connection)

    def _secured(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
        if tls is None:
            return accepted
        tls.sni_callback = lambda _, name, __: self.names.append(name)
        return tls.wrap_socket(accepted, server_side=True)

    def without_end(self, connection: socket.socket, first: bytes, then: bytes, pace: float = 0.0) -> None:
        """Send until nobody listens any more."""
        try:
            connection.sendall(first)
            while not self.closed.wait(pace):
                connection.sendall(then)
        except OSError:
            self.gone.set()


@contextmanager
def run_hostile_server(
    hosts: Sequence[str] = ("127.0.0.1",), tls: ssl.SSLContext | None = None
) -> Iterator[HostileServer]:
    """A hostile server at one port of some addresses."""
    server = HostileServer()
    server.gate.set()
    threads: list[Thread] = []
    listeners: list[socket.socket] = []

    def listen(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                threads.append(Thread(target=server.greet, args=(accepted, tls)))
                threads[-1].start()

    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listeners.append(socket.create_server((host, server.port), family=family))
        server.port = listeners[0].getsockname()[1]
        threads.append(Thread(target=listen, args=(listeners[-1],)))
        threads[-1].start()
    try:
        yield server
    finally:
        server.closed.set()
        server.gate.set()
        for listener in listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in threads:
            thread.join(PATIENCE_S)


def raw(*parts: bytes) -> Answer:
    """An answer that is sent as it stands."""
    return lambda _, connection: connection.sendall(b"".join(parts))


def sized(data: bytes, head: bytes = HEAD) -> Answer:
    """An answer with its length."""
    return raw(head, b"Content-Length: %d\r\n\r\n" % len(data), data)


def chunked(data: bytes, size: int) -> bytes:
    """Chunks of a size, without the last one, which is empty."""
    parts = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def endless(first: bytes, then: bytes, pace: float = 0.0) -> Answer:
    """An answer that goes on until nobody listens."""
    return lambda server, connection: server.without_end(connection, first, then, pace)


def status(line: str, *headers: str) -> Answer:
    """An answer of another status, with a good picture all the same."""
    words = "".join(f"{header}\r\n" for header in headers)
    return sized(PNG, f"HTTP/1.1 {line}\r\nContent-Type: image/png\r\n{words}".encode())


def _gated(server: HostileServer, connection: socket.socket) -> None:
    assert server.gate.wait(PATIENCE_S)
    sized(PNG)(server, connection)


def _redirect(number: int) -> Answer:
    def answer(server: HostileServer, connection: socket.socket) -> None:
        status(f"{number} Elsewhere", f"Location: {server.elsewhere}")(server, connection)

    return answer


def _silent(server: HostileServer, connection: socket.socket) -> None:
    connection.recv(1)
    server.gone.set()


def _reset(server: HostileServer, connection: socket.socket) -> None:
    connection.sendall(HEAD)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


TYPELESS = b"HTTP/1.1 200 OK\r\n"
CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GZIP = HEAD + b"Content-Encoding: gzip\r\n"
BOMB = gzip.compress(bytes(2**24))
MANY = b"x" * 2**16

GOOD: dict[str, Answer] = {
    "/": sized(PNG),
    "/good.png": sized(PNG),
    "/chunked": raw(CHUNKS, chunked(PNG, 100), LAST),
    "/bytes": sized(PNG, TYPELESS + b"content-type: application/octet-stream; charset=binary\r\n"),
    "/wrong-type": sized(PNG, TYPELESS + b"Content-Type: IMAGE/JPEG\r\n"),
    "/early": raw(b"HTTP/1.1 103 Early Hints\r\n\r\n", HEAD, b"Content-Length: %d\r\n\r\n" % len(PNG), PNG),
    "/longer": raw(HEAD, b"Content-Length: %d\r\n\r\n" % len(PNG), PNG, b"HTTP/1.1 200 OK\r\n\r\nmore"),
    "/gate": _gated,
}
# What has gone wrong in the network: nobody is told what it was.
FAILING: dict[str, Answer] = {
    "/missing": raw(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
    **{f"/status/{number}": status(f"{number} Status") for number in (201, 206, 403, 503)},
    **{f"/redirect/{number}": _redirect(number) for number in (300, 301, 303, 308)},
    "/nothing": raw(),
    "/reset": _reset,
    "/not-http": raw(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "/upgrade": raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    "/html": sized(b"<p>secret</p>", TYPELESS + b"Content-Type: text/html\r\n"),
    "/typeless": sized(PNG, TYPELESS),
    "/gzip": sized(gzip.compress(PNG), GZIP),
    "/bomb": sized(BOMB, GZIP),
    "/packed-transfer": raw(HEAD, b"Transfer-Encoding: gzip, chunked\r\n\r\n", chunked(BOMB, 4096), LAST),
    "/cut": raw(HEAD, b"Content-Length: %d\r\n\r\n" % (len(PNG) + 1), PNG),
    "/bad-chunk": raw(CHUNKS, b"zz\r\n", PNG),
    "/two-lengths": raw(HEAD, b"Content-Length: 5\r\nContent-Length: %d\r\n\r\n" % len(PNG), PNG),
    "/split": raw(HEAD, b"X: a\rContent-Length: 3\r\n\r\n", PNG),
    "/heads": endless(HEAD, b"X: " + b"y" * 1000 + b"\r\n"),
    "/informed": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "/extensions": endless(CHUNKS, b"1;" + b"e" * 4096 + b"\r\nx\r\n"),
}
# What never ends by itself.
SLOW: dict[str, Answer] = {
    "/silent": _silent,
    "/slow": endless(HEAD + b"Content-Length: 100000\r\n\r\n", b"x", PACE_S),
    "/slow-chunks": endless(CHUNKS, b"1\r\nx\r\n", PACE_S),
    "/slow-head": endless(b"HTTP/1.1 200 OK\r\nX: ", b"x", PACE_S),
}
# Too much, announced or not.
LARGE: dict[str, Answer] = {
    "/announced": raw(HEAD, b"Content-Length: 99999999999\r\n\r\n"),
    "/endless": endless(HEAD + b"\r\n", MANY),
    "/endless-chunks": endless(CHUNKS, b"10000\r\n" + MANY + b"\r\n"),
}
# Bytes that are no picture, though everything else is right.
UNFIT: dict[str, Answer] = {
    "/text": sized(b"<p>secret</p>"),
    "/half": raw(HEAD, b"Content-Length: %d\r\n\r\n" % (len(PNG) // 2), PNG),
    "/gzip-unsaid": sized(BOMB),
}
ANSWERS = GOOD | FAILING | SLOW | LARGE | UNFIT
