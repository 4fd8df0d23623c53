"""A server that is asked to end while clients send: it goes on serving until balancers know, and then loses nothing."""

from __future__ import annotations

import http.client
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from layertap.models.digits import spec as digits
from tests.service.busy import until
from tests.service.load_server import Process, process
from tests.service.support import picture

END_S = 60
KEPT, FRESH = 4, 4
DELAY_S = 2.0
PATH = "/extract?layers=head"
HEADERS = {"Content-Type": "image/png"}
MOST = 100_000  # requests of a client


@dataclass
class Client:
    """One client's replies until it is refused a connection: their status, and whether they said that it ends.

    ``refused`` is when that was, ``reused`` how many requests went over a connection that had one before.
    """

    statuses: list[int] = field(default_factory=list)
    endings: list[bool] = field(default_factory=list)
    reused: int = 0
    refused: float = 0.0

    def send(self, port: int, keep: bool) -> None:
        """Send one request after another; whatever goes wrong but a refused connection is raised."""
        body = picture()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=END_S)
        for _ in range(MOST):
            known = connection.sock
            try:
                if known is None:
                    connection.connect()
            except ConnectionRefusedError:
                self.refused = time.monotonic()
                return
            connection.request("POST", PATH, body, HEADERS)
            reply = connection.getresponse()
            reply.read()
            self.reused += known is not None
            self.statuses.append(reply.status)
            self.endings.append(reply.will_close)
            if not keep:
                connection.close()
        raise AssertionError("the server did not end")


def ready(server: Process) -> int:
    """What a balancer sees."""
    return httpx.get(f"{server.url}/readyz").status_code


@contextmanager
def hammered(server: Process) -> Iterator[list[Client]]:
    """Clients that send all the time, some over kept connections and some over a new one for each request."""
    port = httpx.URL(server.url).port or 0
    clients = [Client() for _ in range(KEPT + FRESH)]
    with ThreadPoolExecutor(len(clients)) as pool:
        ends = [pool.submit(client.send, port, number < KEPT) for number, client in enumerate(clients)]
        yield clients
        for end in ends:
            end.result()


def test_served_until_balancers_know(tmp_path: Path) -> None:
    """After SIGTERM /readyz is 503 and every request is served, until the delay is over; none is reset or lost."""
    with process([digits()], tmp_path, LAYERTAP_DRAIN_DELAY_S=str(DELAY_S)) as server:
        with hammered(server) as clients:
            until(lambda: all(len(client.statuses) > 3 for client in clients))
            assert not any(any(client.endings) for client in clients[:KEPT])
            begun = time.monotonic()
            server.running.send_signal(signal.SIGTERM)
            until(lambda: ready(server) == 503)
            counts = [len(client.statuses) for client in clients]
            until(lambda: all(len(client.statuses) > count for client, count in zip(clients, counts, strict=True)))
        assert server.running.wait(END_S) == 0
    for client in clients:
        assert set(client.statuses) == {200}
        assert client.refused - begun >= DELAY_S
    assert all(client.reused for client in clients[:KEPT])
    assert all(client.endings[-1] for client in clients[:KEPT])


def test_second_signal_ends_the_delay(tmp_path: Path) -> None:
    """Asked again, the server waits no more; what it has accepted it still answers."""
    with process([digits()], tmp_path, LAYERTAP_DRAIN_DELAY_S="3600") as server:
        with hammered(server) as clients:
            until(lambda: all(client.statuses for client in clients))
            server.running.send_signal(signal.SIGTERM)
            until(lambda: ready(server) == 503)
            server.running.send_signal(signal.SIGTERM)
        assert server.running.wait(END_S) == 0
    assert {status for client in clients for status in client.statuses} == {200}
