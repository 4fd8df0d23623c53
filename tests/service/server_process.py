"""What tests of ends and faults share: servers as processes, requests whose acceptance a client can see."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import httpx

from layertap.models.spec import ModelSpec
from tests.service.gated_server import TRIES, TRY_S, read_response
from tests.service.support import ROW, npy, raw, rows

CLIENTS = 12


def fatal_model_spec(factory: str, **fields: Any) -> ModelSpec:
    """The entry of a model of ``fatal_models``."""
    source = f"python:tests.service.fatal_models:{factory}"
    chosen = {"weights": "random:0", "device": "cpu", **fields}
    return ModelSpec(factory.lower(), source, inputs=(ROW,), **chosen)


def build_row_request(url: str, model: str, value: float = 1.0, **headers: str) -> httpx.Request:
    """A request for one row through a model's linear layer, as npy, on a connection of its own."""
    request = raw(npy(rows(1, value)), "application/x-npy", layers="linear", model=model, format="npy")
    request["headers"] |= {"connection": "close", **headers}
    return httpx.Client(base_url=url).build_request("POST", "/extract", **request)


def send_when_accepted(request: httpx.Request, begun: Callable[[], None] = lambda: None) -> httpx.Response | None:
    """The reply to a request that the server began to read, which it says by 100 Continue; None where it never did."""
    head = [f"{request.method} {request.url.raw_path.decode()} HTTP/1.1", "expect: 100-continue"]
    head += [f"{name}: {value}" for name, value in request.headers.items()]
    try:
        connection = socket.create_connection((request.url.host, request.url.port), timeout=TRIES * TRY_S)
    except ConnectionError:
        return None
    with connection:
        told = b""
        with suppress(ConnectionError):
            connection.sendall("\r\n".join([*head, "", ""]).encode())
            told = connection.recv(2**12)
        if not told.startswith(b"HTTP/1.1 100 "):
            return None
        begun()
        connection.sendall(request.read())
        return read_response(connection, request)


@dataclass
class ClientCrowd:
    """Clients that ask again and again until the server accepts no more.

    ``count`` requests were accepted; ``replies`` by their numbers.
    """

    request: httpx.Request
    replies: dict[int, httpx.Response] = field(default_factory=dict)
    count: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def waiting(self) -> int:
        """Requests that were accepted and not answered."""
        return self.count - len(self.replies)

    def work(self) -> None:
        """One client; an answer that breaks off is an error."""
        numbers: list[int] = []
        while (reply := send_when_accepted(self.request, lambda: self._begun(numbers))) is not None:
            with self._lock:
                self.replies[numbers[-1]] = reply

    def _begun(self, numbers: list[int]) -> None:
        with self._lock:
            numbers.append(self.count)
            self.count += 1


@contextmanager
def run_crowd(request: httpx.Request) -> Iterator[ClientCrowd]:
    """A crowd that asks until the server is gone, which it must be soon after the block."""
    crowd = ClientCrowd(request)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients: list[Future[None]] = [pool.submit(crowd.work) for _ in range(CLIENTS)]
        yield crowd
    for client in clients:
        client.result()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = _list_children(pid)
    return [*children, *(each for child in children for each in descendants(child))]


def _list_children(pid: int) -> list[int]:
    """The children of a process's threads; none of what has ended meanwhile."""
    children = list[int]()
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text().split())
    return children
