"""Names of models and layers are looked up, and no more, whatever they are made of, on every route that takes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from urllib.parse import quote

import httpx
import pytest

from tests.server import Live
from tests.service.support import Control, image, picture, problem, raw

PNG = picture(1)
INPUTS = [image(PNG)]
LONGEST = 50_000  # of a name that stands in a head
NAMES = {
    "an attribute": "__class__",
    "a way to a file": "../../../etc/passwd",
    "a line break": 'x\r\nX-Evil: 1\r\n\r\n{"level": "fake"}',
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


def part(live: Live, name: str) -> httpx.Response:
    """A part ``request`` of a multipart body."""
    files = [("images", PNG), ("request", json.dumps({"layers": [name]}).encode())]
    return live.client.post("/extract", files=files)


def by_query(live: Live, name: str) -> httpx.Response:
    """A parameter beside a raw picture."""
    return live.client.post("/extract", **raw(PNG, "image/png", layers=name[:LONGEST]))


def by_path(live: Live, name: str) -> httpx.Response:
    """A segment of a path."""
    return live.client.get(f"/models/{quote(name[:LONGEST], safe='')}/layers")


ROUTES: dict[str, Send] = {
    "a model": extract(layers=["pool"], model=str),
    "a model to explain": extract(method="saliency", model=str),
    "a model's layers": by_path,
    "a layer": extract(layers=lambda name: [name]),
    "a layer in a part": part,
    "a class": extract(layers=lambda name: [{"type": name}]),
    "a path": extract(layers=lambda name: [{"layer": "pool", "path": name}]),
    "a site": extract(layers=lambda name: [{"layer": "pool", "site": name}]),
    "layers by query": by_query,
    "a layer to change": extract(layers=["pool"], interventions=lambda name: [{"layer": name, "op": "zero"}]),
    "a projection": extract(layers=lambda name: [{"layer": "pool", "project": f"sha256-{name}"}]),
    "an objective": extract(layers=["block3:grad_output"], objective=lambda name: {"kind": "layer", "layer": name}),
    "resume": extract(layers=["pool"], resume=str),
}


@pytest.mark.parametrize("kind", NAMES)
def test_refused(live: Live, control: Control, lines: StringIO, kind: str) -> None:
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
    assert lines.getvalue()
    for line in lines.getvalue().split("\n")[:-1]:
        assert line.isprintable()
        assert line.isascii()
        assert len(line) < 2000
        assert json.loads(line)["level"] in ("info", "warning")
    assert name.isprintable() or name not in lines.getvalue()
