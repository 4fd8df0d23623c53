"""Models that are held up, clients that go away: what tests of waiting share."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event

import httpx

from tests.server import Live
from tests.service.nets_http import Gated
from tests.service.support import npy, raw, rows

TRIES, TRY_S = 5000, 0.02


def wait_until(come_true: Callable[[], bool]) -> None:
    """Look again and again, but not for ever, until something has come true."""
    pause = Event()
    assert any(come_true() or pause.wait(TRY_S) for _ in range(TRIES)), "it never came true"


def gated_module(live: Live, name: str = "gated") -> Gated:
    """The module of a model that can be held up."""
    model = live.engine.manager.registry.get_entry(name).model
    assert model is not None
    assert isinstance(model.module, Gated)
    return model.module


def admitted_rows(live: Live) -> int:
    """Rows that are admitted and not answered, of all models; as ``/metrics`` has them."""
    now = live.engine.take_snapshot()
    return now["queue_rows"] + now["running_rows"]


def post_rows(live: Live, count: int = 1, model: str = "gated", timeout: str | None = None) -> httpx.Response:
    """The reply to a request for some rows through a model that takes four numbers each."""
    return live.client.send(build_row_request(live, count, model, timeout))


def build_row_request(live: Live, count: int, model: str = "gated", timeout: str | None = None) -> httpx.Request:
    """The request that ``post_rows`` sends."""
    request = raw(npy(rows(count)), "application/x-npy", layers="linear", model=model)
    request["headers"] |= {"x-request-timeout": timeout} if timeout is not None else {}
    return live.client.build_request("POST", "/extract", **request)


def connect(live: Live, buffer: int | None = None) -> socket.socket:
    """A connection of its own; with ``buffer`` the system holds no more bytes of a reply for it."""
    url = httpx.URL(live.url)
    connection = socket.socket()
    connection.settimeout(TRIES * TRY_S)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((url.host, url.port))
    return connection


def encode_request(request: httpx.Request) -> bytes:
    """A request as bytes."""
    head = [f"{request.method} {request.url.raw_path.decode()} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in request.headers.items()]
    return "\r\n".join([*head, "", ""]).encode() + request.read()


def read_response(connection: socket.socket, request: httpx.Request) -> httpx.Response:
    """What comes back on a connection until the server closes it."""
    reply = parse_response(read_to_end(connection))
    reply.request = request
    return reply


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = bytearray()
    with suppress(ConnectionResetError):  # where it closes without having read everything
        while part := connection.recv(2**16):
            data += part
    return bytes(data)


def parse_response(data: bytes) -> httpx.Response:
    """The first reply in what came; its content is all that follows its head, further replies too."""
    head, _, content = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return httpx.Response(int(status.split()[1]), headers=headers, content=content)


@contextmanager
def hold_model(live: Live, name: str = "gated") -> Iterator[Gated]:
    """Hold a model up inside a request of one row, which is answered after the block."""
    module = gated_module(live, name)
    module.gate.clear()
    module.entered.clear()
    with ThreadPoolExecutor(1) as pool:
        occupant: Future[httpx.Response] = pool.submit(post_rows, live, model=name)
        try:
            assert module.entered.wait(TRIES * TRY_S)
            module.forwards.clear()
            yield module
        finally:
            module.gate.set()
        assert occupant.result().status_code == 200
