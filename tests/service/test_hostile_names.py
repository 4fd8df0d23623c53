"""Names of models and layers are looked up, and no more, whatever they are made of, on every route that takes one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from io import StringIO
from urllib.parse import quote

import httpx
import pytest

from layertap.service.logs import JsonFormatter
from tests.server import Live
from tests.service.support import Control, Json, image, picture, problem, raw

PNG = picture(1)
INPUTS = [image(PNG)]
LONGEST = 50_000  # of a name that stands in a head

NAMES = {
    "an attribute": "__class__",
    "an attribute of a parameter": ".weight",
    "a way to a file": "../../../etc/passwd",
    "a way to a file, escaped": "..%2f..%2fetc%2fpasswd",
    "a file": "/etc/passwd",
    "a line break": 'x\r\nX-Evil: 1\r\n\r\n{"level": "fake"}',
    "a NUL": "x\0.png",
    "a terminal's escape": "\x1b[2J\x1b[31mx",
    "a pattern that explodes": "(a+)+$",
    "a format": "{0.__class__}%s%n",
    "a template": "${jndi:ldap://x}{{7*7}}",
    "markup": "<script>alert(1)</script>",
    "other directions": "\u202exgnp.\u2066",
    "other line ends": "x\u2028\u2029\x85y",
    "characters of four bytes": "\U0001f984" * 100,
    "1 MB": "Q" * 2**20,
}

Send = Callable[[Live, str], httpx.Response]


def body(path: str, **fields: object) -> Send:
    """A JSON body; where a field's value is a function it is given the name."""

    def send(live: Live, name: str) -> httpx.Response:
        return live.client.post(path, json={"inputs": INPUTS, **filled(fields, name)})

    return send


def part(**fields: object) -> Send:
    """A part ``request`` of a multipart body."""

    def send(live: Live, name: str) -> httpx.Response:
        files = [("images", PNG), ("request", json.dumps(filled(fields, name)).encode())]
        return live.client.post("/extract", files=files)

    return send


def query(path: str, parameter: str, **others: str) -> Send:
    """A parameter beside a raw picture."""

    def send(live: Live, name: str) -> httpx.Response:
        return live.client.post(path, **raw(PNG, "image/png", **others, **{parameter: name[:LONGEST]}))

    return send


def route(method: str, path: str) -> Send:
    """A segment of a path."""

    def send(live: Live, name: str) -> httpx.Response:
        return live.client.request(method, path.format(quote(name[:LONGEST], safe="")))

    return send


def filled(fields: Json, name: str) -> Json:
    return {key: value(name) if callable(value) else value for key, value in fields.items()}


def itself(name: str) -> str:
    return name


def deep(*path: str | int, **others: object) -> Callable[[str], object]:
    """A name inside objects and lists, with other fields beside it."""

    def made(name: str) -> object:
        value: object = name
        for key in reversed(path):
            value = [value] if isinstance(key, int) else {key: value}
        first = value[0] if isinstance(value, list) else value
        if isinstance(first, dict):
            first.update(others)
        return value

    return made


MODELS: dict[str, Send] = {
    "JSON": body("/extract", layers=["pool"], model=itself),
    "multipart": part(layers=["pool"], model=itself),
    "query": query("/extract", "model", layers="pool"),
    "explain": body("/explain", method="saliency", model=itself),
    "explain by query": query("/explain", "model", method="saliency"),
    "shown": route("GET", "/models/{}"),
    "layers": route("GET", "/models/{}/layers"),
    "load": route("POST", "/models/{}/load"),
    "unload": route("POST", "/models/{}/unload"),
}

LAYERS: dict[str, Send] = {
    "JSON": body("/extract", layers=deep(0)),
    "an object": body("/extract", layers=deep(0, "layer", pool="mean")),
    "a class": body("/extract", layers=deep(0, "type")),
    "a path": body("/extract", layers=deep(0, "path", layer="pool")),
    "a site": body("/extract", layers=deep(0, "site", layer="pool")),
    "a call": body("/extract", layers=deep(0, "call", layer="pool")),
    "multipart": part(layers=deep(0)),
    "layers by query": query("/extract", "layers"),
    "interventions": body("/extract", layers=["pool"], interventions=deep(0, "layer", op="zero")),
    "objective": body("/extract", layers=["block3:grad_output"], objective=deep("layer", kind="layer")),
    "resume": body("/extract", layers=["pool"], resume=itself),
    "explain": body("/explain", method="grad_cam", layer=itself),
    "explain by query": query("/explain", "layer", method="grad_cam"),
}

MANY: dict[str, Send] = {
    "JSON": body("/extract", layers=lambda _: list(map(str, range(50_000)))),
    "multipart": part(layers=lambda _: list(map(str, range(50_000)))),
    "query": query("/extract", "layers"),
    "interventions": body("/extract", layers=["pool"], interventions=lambda _: [{"layer": "x", "op": "zero"}] * 50_000),
    "models": body("/extract", layers=["pool"], model=lambda _: ["x"] * 50_000),
    "explain": body("/explain", method="grad_cam", layer=lambda _: ["x"] * 50_000),
}


@pytest.fixture
def log() -> Iterator[StringIO]:
    """Everything that the process logs, formatted as ``serve`` formats it."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root, access = logging.getLogger(), logging.getLogger("layertap")
    root.addHandler(handler)
    access.setLevel(logging.INFO)
    yield stream
    access.setLevel(logging.NOTSET)
    root.removeHandler(handler)


@pytest.mark.parametrize("name", NAMES)
def test_models(live: Live, control: Control, log: StringIO, name: str) -> None:
    """No model has such a name, on any route."""
    for where, send in MODELS.items():
        refused(send(live, NAMES[name]), NAMES[name], where)
    control.check()
    in_lines(log, NAMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_layers(live: Live, control: Control, log: StringIO, name: str) -> None:
    """No layer has such a name, and nothing else is found by it, wherever a request names one."""
    for where, send in LAYERS.items():
        refused(send(live, NAMES[name]), NAMES[name], where)
    control.check()
    in_lines(log, NAMES[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parameter", ["match", "type"])
def test_filters(live: Live, parameter: str, name: str) -> None:
    """A filter of such a name finds nothing, or is no type or too long."""
    reply = live.client.get("/models/digits/layers", params={parameter: NAMES[name][:LONGEST]})
    if len(NAMES[name]) > 128 or parameter == "type":
        refused(reply, NAMES[name], parameter)
    else:
        assert reply.json()["layers"] == []


@pytest.mark.parametrize("where", MANY)
def test_very_many(live: Live, control: Control, where: str) -> None:
    """50,000 names, or as many as a query holds, are refused with one short answer."""
    refused(MANY[where](live, ",".join(map(str, range(9000)))), "8999", where)
    control.check()


def refused(reply: httpx.Response, name: str, where: str) -> None:
    """A refusal that does not repeat the name as it was."""
    asks_for_json = where == "layers by query" and name.startswith(("[", "{"))
    assert reply.status_code in ((400,) if asks_for_json else (404, 413, 422)), (where, reply.text)
    problem(reply, reply.status_code)
    assert name.isprintable() or name not in reply.text
    assert "Q" * 400 not in reply.text
    assert "x-evil" not in reply.headers


def in_lines(log: StringIO, name: str) -> None:
    """All that was logged is lines of one JSON object each, of printable characters, in which no name is at large."""
    lines = log.getvalue().split("\n")[:-1]
    assert lines
    for line in lines:
        assert line.isprintable()
        assert line.isascii()
        assert len(line) < 2000
        assert json.loads(line)["level"] in ("info", "warning")
    assert name.isprintable() or name not in log.getvalue()
