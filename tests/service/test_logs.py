"""The log: one JSON object a line, whatever is written in it."""

from __future__ import annotations

import json
import logging
import sys
from io import StringIO

import httpx
import pytest

from layertap.service.logs import JsonFormatter, TextFormatter
from tests.server import Live
from tests.service.gated_server import (
    admitted_rows,
    build_row_request,
    connect,
    encode_request,
    hold_model,
    read_response,
    wait_until,
)
from tests.service.support import Json, npy, raw, rows

HOSTILE = (
    *("/%0d%0a{%22level%22:%22fake%22}", "/%00%1b[2J", "/%22%7d%0a", "/%e2%80%a8%e2%80%a9%c2%85", "/%ff%fe%ed%a0%80"),
    *("/" + "a" * 3000, "/%F0%9F%A6%84", "/?secret=query"),
)
MESSAGES = ("a\nb", "\r\n\u2028", "\ud800", "%s", "\0", "ü\U0001f984")


def of_access(lines: StringIO) -> list[Json]:
    """The lines about requests."""
    found = [json.loads(line) for line in lines.getvalue().split("\n") if line]
    return [line for line in found if line["logger"] == "layertap.access" and "method" in line]


def test_a_line_for_each_request(live: Live, lines: StringIO) -> None:
    """Each request has one line with its id, method, path, status and time."""
    for path, status in (("/livez", 200), ("/nowhere", 404)):
        live.client.get(path, headers={"x-request-id": "id-" + path[1:]})
        wait_until(lambda: bool(of_access(lines)))
        line = of_access(lines)[-1]
        assert (line["request_id"], line["method"], line["path"]) == ("id-" + path[1:], "GET", path)
        assert (line["status"], line["level"]) == (status, "info")
        assert 0 <= line["milliseconds"] < 60_000
        assert line["time"].endswith("Z")


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


def test_hostile_method(live: Live, lines: StringIO) -> None:
    """A method that nobody knows is a refusal and one line."""
    request = httpx.Request("BREW" * 3, live.url + "/livez", headers={"connection": "close"})
    with connect(live) as connection:
        connection.sendall(encode_request(request))
        assert read_response(connection, request).status_code in (400, 405)
    assert len(of_access(lines)) <= 1


def test_keys_stay_out(live: Live, lines: StringIO) -> None:
    """Keys and bodies are never logged."""
    live.client.get("/models", headers={"x-api-key": "my-secret-key", "authorization": "Bearer my-secret-key"})
    live.client.post("/extract", json={"layers": ["my-secret-layer"]})
    wait_until(lambda: len(of_access(lines)) == 2)
    assert "my-secret" not in lines.getvalue()


def test_client_gone(live: Live, lines: StringIO) -> None:
    """A request whose client went away has its line as well, with a status that no reply has."""
    with hold_model(live):
        with connect(live) as connection:
            connection.sendall(encode_request(build_row_request(live, 3)))
            wait_until(lambda: admitted_rows(live) == 4)
        wait_until(lambda: bool(of_access(lines)))
        assert [line["status"] for line in of_access(lines)] == [499]


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


@pytest.mark.parametrize("logger", ["x", "layertap"])
@pytest.mark.parametrize("message", ["request", "a model is loaded", "compiling", "draining"])
@pytest.mark.parametrize("extra", [None, {"fields": ["a"]}, {"fields": "a"}])
def test_foreign_records(logger: str, message: str, extra: Json | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Others may log in words of ours, and call things by names of ours: their message stands as it is."""
    stream = StringIO()
    log = logging.getLogger(logger)
    for formatter in (TextFormatter(), JsonFormatter()):
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        log.addHandler(handler)
        log.warning(message, extra=extra)
        log.removeHandler(handler)
    text, line = stream.getvalue().splitlines()
    assert text.endswith(f"  warning: {message}")
    assert json.loads(line)["message"] == message
    assert "Logging error" not in capsys.readouterr().err


def test_fields_of_others() -> None:
    """Fields of another's record are shown beside its message, whatever sentence we have for that."""
    record = logging.LogRecord("x", logging.INFO, "f", 1, "draining", (), None)
    record.fields = {"pool": 3}
    assert TextFormatter().format(record).endswith("  draining (pool 3)")


def test_text_of_requests_and_bugs() -> None:
    """A request reads as one does on the wire; an exception stands below its line."""
    record = logging.LogRecord("layertap.access", logging.INFO, "f", 1, "request", (), None)
    record.fields = {"request_id": "7", "method": "GET", "path": "/livez", "status": 200, "milliseconds": 1.5}
    assert TextFormatter().format(record).endswith("  GET /livez 200, 1.5 ms")
    try:
        raise ValueError("a\x1b[2J")
    except ValueError:
        bug = logging.LogRecord("layertap", logging.ERROR, "f", 1, "bug", (), sys.exc_info())
    first, *rest = TextFormatter().format(bug).split("\n")
    assert first.endswith("  error: bug")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == r"ValueError: a\x1b[2J"
