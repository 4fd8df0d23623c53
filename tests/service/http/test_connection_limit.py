"""Connections beyond what the server may have open: refused, counted, and closed; all others are served on."""

from __future__ import annotations

import resource
from contextlib import ExitStack

import pytest

from layertap.service.http import protocol
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


def test_limit(serve: Serve) -> None:
    """One connection too many hears when to come again, or that the server lives; those that are open go on."""
    with serve(max_connections=LIMIT) as live, ExitStack() as opened:
        wait_until(lambda: count(live, "connections") == 1)  # the client's own, which it keeps
        kept = [opened.enter_context(connect(live)) for _ in range(LIMIT - 1)]
        for connection in kept:
            connection.sendall(GET)
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert count(live, "connections") == LIMIT
        for path, status in (("models", 503), ("livez", 200)):
            with connect(live) as extra:
                extra.sendall(GET.replace(b"livez", path.encode()))
                reply = parse_response(read_to_end(extra))  # then it is closed
            assert reply.status_code == status
            assert reply.headers["connection"] == "close"
            if status == 503:
                assert "connections" in problem(reply, 503, seconds=True)["detail"]
        refused = {each.labels["reason"]: each.value for each in read_samples(live) if "refused_total" in each.name}
        assert refused["limit"] == 1
        assert count(live, "max_connections") == LIMIT
        kept[0].close()
        wait_until(lambda: count(live, "connections") == LIMIT - 1)
        with connect(live) as another:
            another.sendall(GET)
            assert another.recv(12) == b"HTTP/1.1 200"


def test_far_beyond_the_limit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even those are too many that would only be refused, a connection is closed at once."""
    monkeypatch.setattr(protocol, "EXTRA", 0)
    with serve(max_connections=1) as live:
        wait_until(lambda: count(live, "connections") == 1)
        with connect(live) as extra:
            assert read_to_end(extra) == b""


def test_default() -> None:
    """The limit leaves the process files of its own, as it comes and when it is set to more."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < Settings().max_connections < files
    assert Settings(max_connections=2 * files).max_connections < files
