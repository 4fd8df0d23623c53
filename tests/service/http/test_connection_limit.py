"""Connections beyond what the server may have open: told so, counted, and closed; all others are served on."""

from __future__ import annotations

import re
import resource
import socket
from contextlib import ExitStack

import pytest

from layertap.service.settings import Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import connect, parse_response, read_to_end, wait_until
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


def test_default() -> None:
    """The limit leaves the process files of its own, as it comes and when it is set to more."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < Settings().max_connections < files
    assert Settings(max_connections=2 * files).max_connections < files
