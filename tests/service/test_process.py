"""A server that is asked to end while clients send: it goes on serving until balancers know, and then loses nothing."""

from __future__ import annotations

import http.client
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.service.gated_server import read_to_end, wait_until
from tests.service.load_server import process
from tests.service.server_process import fatal_model_spec
from tests.service.support import Array, net, npy, rows

END_S = 60
KEPT, FRESH = 4, 4
DELAY_S = 2.0
PATH = "/extract?layers=linear&format=npy"
HEADERS, BODY = {"Content-Type": "application/x-npy"}, npy(rows())
MOST = 100_000  # requests of a client
pytestmark = pytest.mark.slow


@dataclass
class Client:
    """One client's replies until it gets no connection any more: their arrays, and whether they said that it ends.

    ``refused`` is when that was: a listener that closes resets who has just connected. ``reused`` is how many requests
    went over a connection that had one before.
    """

    replies: list[Array] = field(default_factory=list)
    endings: list[bool] = field(default_factory=list)
    reused: int = 0
    refused: float = 0.0

    def send(self, port: int, keep: bool) -> None:
        """Send one request after another; whatever goes wrong but a refused connection is raised."""
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=END_S)) as connection:
            for _ in range(MOST):
                known = connection.sock
                try:
                    connection.request("POST", PATH, BODY, HEADERS)
                    reply = connection.getresponse()
                except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
                    if known is not None:
                        raise
                    self.refused = time.monotonic()
                    return
                assert reply.status == 200
                self.replies.append(np.load(BytesIO(reply.read())))
                self.reused += known is not None
                self.endings.append(reply.will_close)
                if not keep:
                    connection.close()
        raise AssertionError("the server did not end")


def test_served_until_balancers_know(tmp_path: Path) -> None:
    """After SIGTERM /readyz is 503 and every request is served, until the delay is over; none is reset or lost.

    All that the server says is in its log, in JSON.
    """
    settings = {"LAYERTAP_DRAIN_DELAY_S": str(DELAY_S), "LAYERTAP_SLOW_REQUEST_S": "1000"}
    with process([fatal_model_spec("Unhurried")], tmp_path, **settings) as server:
        port, clients = httpx.URL(server.url).port or 0, [Client() for _ in range(KEPT + FRESH)]
        slow = http.client.HTTPConnection("127.0.0.1", port, timeout=END_S)
        slow.putrequest("POST", PATH)
        for name, value in (HEADERS | {"Content-Length": str(len(BODY))}).items():
            slow.putheader(name, value)
        slow.endheaders(BODY[:-1])
        with ThreadPoolExecutor(len(clients)) as pool:
            ends = [pool.submit(client.send, port, number < KEPT) for number, client in enumerate(clients)]
            wait_until(lambda: any(end.done() for end in ends) or all(len(client.replies) > 3 for client in clients))
            assert [end.exception() for end in ends if end.done()] == []
            assert not any(any(client.endings) for client in clients[:KEPT])
            begun = time.monotonic()
            server.running.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
            counts = [len(client.replies) for client in clients]
            wait_until(lambda: all(len(client.replies) > count for client, count in zip(clients, counts, strict=True)))
            for end in ends:
                end.result()
        slow.send(BODY[-1:])  # who was let in is answered, though nobody else is let in any more
        reply = slow.getresponse()
        assert (reply.status, len(reply.read())) == (200, len(npy(rows()[:, :3])))
        slow.close()
        assert server.running.wait(END_S) == 0
        assert [line for line in server.logged() if line["level"] in ("warning", "error", "critical")] == []
        assert server.out.read_bytes() == b""
    for client in clients:
        for reply in client.replies:
            np.testing.assert_allclose(reply, clients[0].replies[0], rtol=1e-5, atol=1e-6)
        assert client.refused - begun >= DELAY_S
    assert all(client.reused for client in clients[:KEPT])
    assert all(client.endings[-1] for client in clients[:KEPT])


def test_asked_again_and_again(tmp_path: Path) -> None:
    """SIGTERM ends the delay, SIGINT then what is not answered; the log has no failure."""
    with process([net("net", "Gated")], tmp_path, LAYERTAP_DRAIN_DELAY_S="3600") as server:
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), END_S) as connection:
            connection.sendall(b"POST /extract HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{}")
            assert httpx.get(f"{server.url}/readyz").status_code == 200  # so that what came before has been read
            server.running.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
            server.running.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in server.log.read_text())
            server.running.send_signal(signal.SIGINT)
            assert read_to_end(connection) == b""
        assert server.running.wait(END_S) == 0
    assert not [line for line in server.logged() if line["level"] in ("error", "critical")]
