"""The log: one JSON object a line, whatever is written in it."""

from __future__ import annotations

import json
import logging
from io import StringIO

import pytest

from layertap.service.logs import JsonFormatter, TextFormatter
from tests.server import Live
from tests.service.gated_server import wait_until
from tests.service.support import Json, npy, raw, rows

HOSTILE = (
    *(
        "/%0d%0a{%22level%22:%22fake%22}",
        "/%00%1b[2J",
        "/%22%7d%0a",
        "/%e2%80%a8%e2%80%a9%c2%85",
        "/%ff%fe%ed%a0%80",
        "/" + "a" * 3000,
        "/?secret=query",
    ),
)
MESSAGES = ("a\nb", "\r\n\u2028", "\ud800", "%s", "\0", "ü\U0001f984")


def of_access(lines: StringIO) -> list[Json]:
    """The lines about requests."""
    found = [json.loads(line) for line in lines.getvalue().split("\n") if line]
    return [line for line in found if line["logger"] == "layertap.access" and "method" in line]


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_paths(live: Live, lines: StringIO, path: str) -> None:
    """A path can't break out of its line: it is escaped and cut, and its query is left out."""
    live.client.get(path)
    wait_until(lambda: bool(of_access(lines)))
    (line,) = of_access(lines)
    assert line["path"].rstrip("…").isascii()
    assert line["path"].isprintable()
    assert len(line["path"]) <= 201
    assert "secret" not in lines.getvalue()
    assert line["level"] == "info"


def test_keys_stay_out(live: Live, lines: StringIO) -> None:
    """Keys and bodies are never logged."""
    live.client.get("/models", headers={"x-api-key": "my-secret-key", "authorization": "Bearer my-secret-key"})
    live.client.post("/extract", json={"layers": ["my-secret-layer"]})
    wait_until(lambda: len(of_access(lines)) == 2)
    assert "my-secret" not in lines.getvalue()


@pytest.mark.parametrize(("value", "status"), [(1000.0, 500), (1.0, 200)])
def test_bugs(live: Live, lines: StringIO, value: float, status: int) -> None:
    """What went wrong inside is in the log, with the request's id, in one line; what went well is not."""
    request = raw(npy(rows(1, value)), "application/x-npy", model="touchy", layers="linear")
    request["headers"] |= {"x-request-id": "the-id"}
    assert live.client.post("/extract", **request).status_code == status
    wait_until(lambda: bool(of_access(lines)))
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    bugs = [line for line in found if line["level"] == "error"]
    assert [line["request_id"] for line in bugs] == (["the-id"] if status == 500 else [])
    assert all("RuntimeError: secret" in line["exception"] for line in bugs)


def test_formatter() -> None:
    """A record is one line whatever is in it."""
    for message in MESSAGES:
        record = logging.LogRecord("x", logging.WARNING, "f", 1, message, (), None)
        record.fields = {"odd": {1, 2}, "path": message, "class": object}
        written = JsonFormatter().format(record)
        assert len(written.splitlines()) == 1
        assert json.loads(written)["path"] == message


def test_text() -> None:
    """For people a record is one line too, with nothing in it that a terminal would obey."""
    for message in (*MESSAGES, "\x1b[2J", "\x9b1m"):
        record = logging.LogRecord("x", logging.WARNING, "f", 1, message, (), None)
        record.fields = {"path": message}
        written = TextFormatter().format(record)
        assert written.isprintable()
        assert "warning: " in written
