"""The log: one JSON object a line, whatever is written in it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from io import StringIO
from threading import Timer

import pytest

from layertap.service.logs import DROPPED, MAX_EXCEPTION, JsonFormatter, TextFormatter
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


def test_long_exception() -> None:
    """What a model raises is logged up to a length, and its end with it."""
    try:
        raise ValueError("m" * 1_000_000 + " the end")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    for written in (JsonFormatter().format(record), TextFormatter().format(record)):
        assert len(written) < MAX_EXCEPTION + 1000
        assert "Traceback" in written
        assert "the end" in written


WRITER = """
import logging
from layertap.service import logs
logs.configure("info", text=False)
log = logging.getLogger("layertap")
for number in range(2000):
    log.info("x" * 100, extra={"fields": {"number": number}})
print("written", flush=True)
input()
log.info("last")
"""


def test_reader_that_stops() -> None:
    """Nobody waits for a reader of the log that has stopped; it learns later how many lines it missed."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", WRITER], text=True, **pipes) as writer:
        timer = Timer(60, writer.kill)
        timer.start()
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert writer.stdout.readline() == "written\n"
        begun = os.read(writer.stderr.fileno(), 2**20).decode()
        _, rest = writer.communicate("\n")
        timer.cancel()
    *lines, dropped, last = [json.loads(line) for line in (begun + rest).splitlines()]
    assert [line["number"] for line in lines] == list(range(len(lines)))
    assert (dropped["message"], dropped["lines"]) == (DROPPED, 2000 - len(lines))
    assert last["message"] == "last"
