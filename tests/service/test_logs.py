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

HOSTILE = ("/%0d%0a{%22level%22:%22fake%22}", "/%1b[2J%e2%80%a8%ff%fe", "/" + "a" * 3000, "/?secret=query")


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


def test_bugs(live: Live, lines: StringIO) -> None:
    """What went wrong inside is in the log, with the request's id, in one line."""
    request = raw(npy(rows(1, 1000.0)), "application/x-npy", model="touchy", layers="linear")
    request["headers"] |= {"x-request-id": "the-id"}
    assert live.client.post("/extract", **request).status_code == 500
    wait_until(lambda: bool(of_access(lines)))
    (bug,) = [line for line in map(json.loads, lines.getvalue().splitlines()) if line["level"] == "error"]
    assert bug["request_id"] == "the-id"
    assert "RuntimeError: of the model" in bug["exception"]


@pytest.mark.parametrize("message", ["a\nb", "\r\n\u2028", "\ud800", "%s", "\0", "\x1b[2J", "\x9b1m"])
def test_formatters(message: str) -> None:
    """A record is one line whatever is in it; for people there is nothing in it that a terminal would obey."""
    record = logging.LogRecord("x", logging.WARNING, "f", 1, message, (), None)
    record.fields = {"odd": {1, 2}, "path": message, "class": object}
    written = JsonFormatter().format(record)
    assert len(written.splitlines()) == 1
    assert json.loads(written)["path"] == message
    assert TextFormatter().format(record).isprintable()
