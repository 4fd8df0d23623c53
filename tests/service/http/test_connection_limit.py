"""Connections beyond what the server may have open: told so, counted, and closed; all others are served on."""

from __future__ import annotations

import re
import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from layertap.models.digits import spec as digits
from layertap.service.settings import Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import connect, parse_response, read_to_end, wait_until
from tests.service.load_server import Process, process
from tests.service.support import problem

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT = 4


def read_reply(connection: socket.socket) -> bytes:
    """The beginning of a reply."""
    return connection.recv(12)


def count(text: str, name: str) -> float:
    """A figure by its name and labels, as they stand in a scrape."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def open_connections(live: Live) -> float:
    return count(live.client.get("/metrics").text, "layertap_connections")


def test_limit(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """One connection too many hears when to come again; those that are open go on, and room is room again."""
    with serve(max_connections=LIMIT) as live, ExitStack() as opened:
        wait_until(lambda: open_connections(live) == 1)  # the client's own, which it keeps
        kept = [opened.enter_context(connect(live)) for _ in range(LIMIT - 1)]
        for connection in kept:
            connection.sendall(GET)
            assert read_reply(connection) == b"HTTP/1.1 200"
        assert open_connections(live) == LIMIT
        with connect(live) as extra:
            reply = parse_response(read_to_end(extra))
        assert "connections" in problem(reply, 503, seconds=True)["detail"]
        assert reply.headers["connection"] == "close"
        text = live.client.get("/metrics").text
        assert count(text, 'layertap_connections_refused_total{reason="limit"}') == 1
        assert count(text, "layertap_max_connections") == LIMIT
        assert sum("refused with 503" in message for message in caplog.messages) == 1
        kept[0].close()
        wait_until(lambda: open_connections(live) == LIMIT - 1)
        with connect(live) as another:
            another.sendall(GET)
            assert read_reply(another) == b"HTTP/1.1 200"


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET /livez HTTP/1.1\r\nX: " + b"x" * 100_000])
def test_refusals_are_counted(live: Live, sent: bytes) -> None:
    """What is refused before it is a request counts by its reason."""
    reason = "bad_request" if sent.startswith(b"nonsense") else "head_too_large"
    name = f'layertap_connections_refused_total{{reason="{reason}"}}'
    before = count(live.client.get("/metrics").text, name)
    with connect(live) as connection:
        connection.sendall(sent)
        assert read_to_end(connection).startswith(b"HTTP/1.1 4")
    assert count(live.client.get("/metrics").text, name) == before + 1


def test_default() -> None:
    """As it comes, the limit leaves the process files of its own."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < Settings().max_connections < files


@pytest.mark.slow
def test_descriptors(tmp_path: Path) -> None:
    """A process that may open hardly any more file says so, counts it, and serves on those connections that it has."""

    def limit_files(server: Process, free: int) -> None:
        opened = max(int(each.name) for each in Path(f"/proc/{server.running.pid}/fd").iterdir())
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(server.running.pid, resource.RLIMIT_NOFILE, (opened + free, most))

    with process([digits()], tmp_path, LAYERTAP_WORKERS="0") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/livez").status_code == 200
        url = httpx.URL(server.url)
        limit_files(server, 16)
        with ExitStack() as opened:
            replies = []
            for _ in range(40):
                connection = opened.enter_context(socket.create_connection((url.host, url.port), timeout=60))
                replies.append(read_reply(connection))
            assert set(replies) == {b"HTTP/1.1 503", b""}
            name = 'layertap_connections_refused_total{reason="descriptors"}'
            wait_until(lambda: count(client.get("/metrics").text, name) == len(replies))
        limit_files(server, 500)
        with socket.create_connection((url.host, url.port), timeout=60) as connection:
            connection.sendall(GET)
            assert read_reply(connection) == b"HTTP/1.1 200"
        assert server.end() == 0
