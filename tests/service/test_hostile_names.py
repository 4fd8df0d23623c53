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
from tests.service.support import Control, image, picture, problem, raw

PNG = picture(1)
INPUTS = [image(PNG)]
LONGEST = 50_000  # of a name that stands in a head
NAMES = {
    "an attribute": "__class__",
    "an attribute of a parameter": ".weight",
    "a way to a file": "../../../etc/passwd",
    "a way to a file, escaped": "..%2f..%2fetc%2fpasswd",
    "a line break": 'x\r\nX-Evil: 1\r\n\r\n{"level": "fake"}',
    "a NUL": "x\0.png",
    "a terminal's escape": "\x1b[2J\x1b[31mx",
    "a pattern that explodes": "(a+)+$",
    "a format": "{0.__class__}%s%n",
    "markup": "<script>alert(1)</script>",
    "other directions and line ends": "\u202exgnp.\u2066\u2028\x85y",
    "1 MB": "Q" * 2**20,
}
Send = Callable[[Live, str], httpx.Response]


def extract(**fields: object) -> Send:
    """A JSON body; where a field's value is a function it is given the name."""

    def send(live: Live, name: str) -> httpx.Response:
        filled = {key: value(name) if callable(value) else value for key, value in fields.items()}
        path = "/explain" if "method" in fields else "/extract"
        return live.client.post(path, json={"inputs": INPUTS, **filled})

    return send


def query(parameter: str, path: str = "/extract", **others: str) -> Send:
    """A parameter beside a raw picture."""
    return lambda live, name: live.client.post(path, **raw(PNG, "image/png", **others, **{parameter: name[:LONGEST]}))


def route(method: str, path: str) -> Send:
    """A segment of a path."""
    return lambda live, name: live.client.request(method, path.format(quote(name[:LONGEST], safe="")))


def part(live: Live, name: str) -> httpx.Response:
    """A part ``request`` of a multipart body."""
    files = [("images", PNG), ("request", json.dumps({"layers": [name]}).encode())]
    return live.client.post("/extract", files=files)


ROUTES: dict[str, Send] = {
    "a model": extract(layers=["pool"], model=str),
    "a model by query": query("model", layers="pool"),
    "a model to explain": extract(method="saliency", model=str),
    "a model shown": route("GET", "/models/{}"),
    "a model's layers": route("GET", "/models/{}/layers"),
    "a model to load": route("POST", "/models/{}/load"),
    "a layer": extract(layers=lambda name: [name]),
    "a layer in a part": part,
    "a class": extract(layers=lambda name: [{"type": name}]),
    "a path": extract(layers=lambda name: [{"layer": "pool", "path": name}]),
    "a site": extract(layers=lambda name: [{"layer": "pool", "site": name}]),
    "layers by query": query("layers"),
    "a layer to change": extract(layers=["pool"], interventions=lambda name: [{"layer": name, "op": "zero"}]),
    "an objective": extract(layers=["block3:grad_output"], objective=lambda name: {"kind": "layer", "layer": name}),
    "resume": extract(layers=["pool"], resume=str),
    "a layer to explain": extract(method="grad_cam", layer=str),
    "a type that is listed": lambda live, name: live.client.get(
        "/models/digits/layers", params={"type": name[:LONGEST]}
    ),
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


@pytest.mark.parametrize("kind", NAMES)
def test_refused(live: Live, control: Control, log: StringIO, kind: str) -> None:
    """Nothing has such a name: a refusal does not repeat it as it was, and it is at large in no line of the log."""
    name = NAMES[kind]
    for where, send in ROUTES.items():
        reply = send(live, name)
        asks_for_json = where == "layers by query" and name.startswith(("[", "{"))
        assert reply.status_code in ((400,) if asks_for_json else (404, 413, 422)), (where, reply.text)
        problem(reply, reply.status_code)
        assert name.isprintable() or name not in reply.text
        assert "Q" * 400 not in reply.text
        assert "x-evil" not in reply.headers
    control.check()
    lines = log.getvalue().split("\n")[:-1]
    assert lines
    for line in lines:
        assert line.isprintable()
        assert line.isascii()
        assert len(line) < 2000
        assert json.loads(line)["level"] in ("info", "warning")
    assert name.isprintable() or name not in log.getvalue()
