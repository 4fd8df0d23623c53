"""A server that is asked to end while clients send: it goes on serving until balancers know, and then loses nothing."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from layertap.models.digits import spec as digits
from layertap.service.http.server_config import make_server_config
from layertap.service.http.sockets import stop_connecting
from layertap.service.process import Server
from layertap.service.settings import Settings
from tests.service.gated_server import wait_until
from tests.service.load_server import ROOT, Process, process
from tests.service.support import picture

END_S = 60
SO_LOCK_FILTER = 44  # of Linux: no other filter from then on
KEPT, FRESH = 4, 4
DELAY_S = 2.0
PATH = "/extract?layers=head"
HEADERS = {"Content-Type": "image/png"}
MOST = 100_000  # requests of a client
CLIENTS = 8
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
BUSY = """
from layertap.service.http.server_config import make_server_config
from layertap.service.http.sockets import bind
from layertap.service.process import Server
from layertap.service.settings import Settings
from layertap.service.signals import exit_cleanly_on_signals

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})

(listener,) = bind("127.0.0.1", 0)
exit_cleanly_on_signals()
print(listener.getsockname()[1], flush=True)
config = make_server_config(app, Settings(), lifespan="off")
Server(config, lambda: True, lambda: print("ending", flush=True), delay=0.2).run_until_stopped([listener])
"""
HUNG_UP = """
import os, signal
from layertap.service.http.server_config import make_server_config
from layertap.service.http.sockets import bind
from layertap.service.process import Server
from layertap.service.settings import Settings
from layertap.service.signals import exit_cleanly_on_signals, hold_hangups

async def app(scope, receive, send):
    pass

def take():
    print("taken", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

exit_cleanly_on_signals()
hold_hangups()
os.kill(os.getpid(), signal.SIGHUP)
config = make_server_config(app, Settings(), lifespan="off")
Server(config, lambda: True, lambda: None, on_hangup=take).run_until_stopped(bind("127.0.0.1", 0))
"""
STALLED = """
import asyncio, socket, sys, threading, time
from layertap.service.http.server_config import make_server_config
from layertap.service.http.sockets import bind
from layertap.service.process import ACCEPT_S, Server
from layertap.service.settings import Settings

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})

async def stop():
    if server.should_exit:  # it runs as soon as the loop has looked who is there
        asyncio.get_running_loop().add_reader(ours, stall)

def stall():
    asyncio.get_running_loop().remove_reader(ours)
    client = socket.create_connection(listener.getsockname())
    client.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    threading.Thread(target=read, args=[client]).start()
    time.sleep(2 * ACCEPT_S)

def read(client):
    print(client.recv(1024)[:12], flush=True)

ours, theirs = socket.socketpair()
theirs.sendall(b"x")
(listener,) = bind("127.0.0.1", 0)
listener.setsockopt(socket.SOL_SOCKET, int(sys.argv[1]), 1)  # whoever connects is let in, as after a long way
config = make_server_config(app, Settings(), lifespan="off", callback_notify=stop, timeout_notify=0)
server = Server(config, lambda: True, lambda: None)
threading.Timer(0, lambda: setattr(server, "should_exit", True)).start()
server.run_until_stopped([listener])
"""
SENDING = """
import socket, sys
answered = 0
while True:
    try:
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    except ConnectionRefusedError:
        break
    with connection:
        connection.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        assert connection.recv(1024).startswith(b"HTTP/1.1 200"), "a connection ended without a reply"
    answered += 1
    if answered == 50:
        print("sending", flush=True)
"""


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
            wait_until(lambda: all(len(client.statuses) > 3 for client in clients))
            assert not any(any(client.endings) for client in clients[:KEPT])
            begun = time.monotonic()
            server.running.send_signal(signal.SIGTERM)
            wait_until(lambda: ready(server) == 503)
            counts = [len(client.statuses) for client in clients]
            wait_until(lambda: all(len(client.statuses) > count for client, count in zip(clients, counts, strict=True)))
        assert server.running.wait(END_S) == 0
    for client in clients:
        assert set(client.statuses) == {200}
        assert client.refused - begun >= DELAY_S
    assert all(client.reused for client in clients[:KEPT])
    assert all(client.endings[-1] for client in clients[:KEPT])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux keeps new connections away")
def test_no_connection_is_reset() -> None:
    """Of connections as fast as they can be made, up to the last: each is answered or refused."""
    words = [sys.executable, "-c", BUSY]
    with ExitStack() as ends:
        server = ends.enter_context(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        ends.callback(server.kill)
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        sending = [sys.executable, "-c", SENDING, port]
        clients = [
            ends.enter_context(subprocess.Popen(sending, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            for _ in range(CLIENTS)
        ]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "sending\n"
        server.send_signal(signal.SIGTERM)
        assert [client.communicate(timeout=END_S)[1] for client in clients] == [""] * CLIENTS
        assert server.wait(END_S) == 0


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a connection may be reset")
def test_stall_at_the_end() -> None:
    """A client that has connected is answered, though the event loop stalls longer than it goes on accepting."""
    words = [sys.executable, "-c", STALLED, str(SO_LOCK_FILTER)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "b'HTTP/1.1 200'\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has filters")
def test_sandbox_without_filters(caplog: pytest.LogCaptureFixture) -> None:
    """Where new connections can't be kept away, the log says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop_connecting(listener)
        assert caplog.records == []
        listener.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
        stop_connecting(listener)
    (record,) = caplog.records
    assert "may be reset" in record.message


BROKEN = """
from layertap.service.http.server_config import make_server_config
from layertap.service.http.sockets import bind
from layertap.service.process import Server
from layertap.service.settings import Settings

async def app(scope, receive, send):
    raise RuntimeError("never well")

Server(make_server_config(app, Settings()), lambda: True, lambda: None).run_until_stopped(bind("127.0.0.1", 0))
"""


def test_application_that_can_not_start() -> None:
    """An application that fails as it starts is not served, and the process says so by its status."""
    done = subprocess.run([sys.executable, "-c", BROKEN], cwd=ROOT, timeout=END_S)
    assert done.returncode == 70


def test_another_uvicorn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where uvicorn's server lacks what ours overrides, nothing is started."""
    ours = {name for name in vars(Server) if not name.startswith("_") and hasattr(uvicorn.Server, name)}
    assert {"startup", "shutdown", "handle_exit"} <= ours
    for name in ours:
        with monkeypatch.context() as other:
            other.delattr(uvicorn.Server, name)
            with pytest.raises(RuntimeError, match=name):
                make_server_config(FastAPI(), Settings())


@pytest.mark.slow
def test_connections_at_the_end() -> None:
    """When the server stops, a request that has begun to arrive is answered; a connection without one ends, unreset."""
    with subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = ("127.0.0.1", int(server.stdout.readline()))
        with (
            socket.create_connection(address) as idle,
            socket.create_connection(address) as begun,
            socket.create_connection(address) as silent,
        ):
            idle.sendall(HEAD + b"\r\n")
            assert idle.recv(1024).startswith(b"HTTP/1.1 200")
            begun.sendall(HEAD)
            server.terminate()
            assert server.stdout.readline() == "ending\n"
            begun.sendall(b"\r\n")
            reply = begun.recv(1024)
            assert reply.startswith(b"HTTP/1.1 200")
            assert b"\r\nconnection: close\r\n" in reply
            assert [each.recv(1) for each in (idle, begun, silent)] == [b"", b"", b""]
        assert server.wait(END_S) == 0


@pytest.mark.slow
def test_hangup_before_the_start() -> None:
    """A SIGHUP that comes while a server is being put together does not end it, and is taken once it runs."""
    done = subprocess.run([sys.executable, "-c", HUNG_UP], capture_output=True, text=True, check=False, timeout=END_S)
    assert (done.returncode, done.stdout) == (0, "taken\n"), done.stderr


def test_second_signal_ends_the_delay(tmp_path: Path) -> None:
    """Asked again, the server waits no more; what it has accepted it still answers."""
    with process([digits()], tmp_path, LAYERTAP_DRAIN_DELAY_S="3600") as server:
        with hammered(server) as clients:
            wait_until(lambda: all(client.statuses for client in clients))
            server.running.send_signal(signal.SIGTERM)
            wait_until(lambda: ready(server) == 503)
            server.running.send_signal(signal.SIGTERM)
        assert server.running.wait(END_S) == 0
    assert {status for client in clients for status in client.statuses} == {200}


@pytest.mark.slow
def test_a_body_that_does_not_arrive(tmp_path: Path) -> None:
    """A request that is not whole when the server waits no longer hears that it ends, as other refusals are told."""
    with process([digits()], tmp_path, LAYERTAP_DEADLINE_S="2") as server:
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), END_S) as connection:
            connection.sendall(b"POST /extract HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{}")
            assert ready(server) == 200  # so that what came before has been read
            server.running.send_signal(signal.SIGTERM)
            reply = http.client.HTTPResponse(connection)
            reply.begin()
            said = reply.read()
        assert server.running.wait(END_S) == 0
    assert reply.status == 503
    assert reply.headers["content-type"] == "application/problem+json"
    assert b"shutting down" in said
