"""Connections beyond what the server may have open: told so, counted, and closed; all others are served on."""

from __future__ import annotations

import resource
from contextlib import ExitStack

import pytest

from layertap.service.settings import Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import connect, parse_response, read_to_end, wait_until
from tests.service.queue_harness import read_samples
from tests.service.support import problem

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT = 4


def count(live: Live, name: str) -> float:
    """A figure of the server's."""
    return next((each.value for each in read_samples(live) if each.name == f"layertap_{name}"), 0.0)


def test_limit(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """One connection too many hears when to come again; those that are open go on, and room is room again."""
    with serve(max_connections=LIMIT) as live, ExitStack() as opened:
        wait_until(lambda: count(live, "connections") == 1)  # the client's own, which it keeps
        kept = [opened.enter_context(connect(live)) for _ in range(LIMIT - 1)]
        for connection in kept:
            connection.sendall(GET)
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert count(live, "connections") == LIMIT
        with connect(live) as extra:
            reply = parse_response(read_to_end(extra))
        assert "connections" in problem(reply, 503, seconds=True)["detail"]
        assert reply.headers["connection"] == "close"
        refused = {each.labels["reason"]: each.value for each in read_samples(live) if "refused_total" in each.name}
        assert refused["limit"] == 1
        assert count(live, "max_connections") == LIMIT
        assert sum("refused with 503" in message for message in caplog.messages) == 1
        kept[0].close()
        wait_until(lambda: count(live, "connections") == LIMIT - 1)
        with connect(live) as another:
            another.sendall(GET)
            assert another.recv(12) == b"HTTP/1.1 200"


def test_default() -> None:
    """The limit leaves the process files of its own, as it comes and when it is set to more."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < Settings().max_connections < files
    assert Settings(max_connections=2 * files).max_connections < files
