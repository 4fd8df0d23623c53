"""Errors: each gets its status and a problem that gives nothing away, and the server is as well as before."""

from __future__ import annotations

import json

import httpx
import pytest

from models.errors import Fault
from service.http.errors import problem as made
from tests.server import Live
from tests.service.bad_requests import BAD, GOOD, LONG, PNG, text
from tests.service.support import Control, problem

PATHS = ("/%00", "/%ff%fe", "/%ed%a0%80", "/" + "a" * 5000, "/%0d%0aX-Evil:1", "/models/%0d%0a", "/..%2f..%2fetc")
QUERIES = ("layers=%ed%a0%80", "layers=%00", "%ff=1", "layers=pool" + "&" * 5000, "=", "layers=pool&model=%0d%0a")


@pytest.mark.parametrize("name", BAD)
def test_bad(limited: Live, limited_control: Control, name: str) -> None:
    """A bad request gets its status, where the fault is and what to do; the next good one gets the same as ever."""
    case = BAD[name]
    reply = limited.client.post(limited.url + case.path, **case.request)
    found = problem(reply, case.status)
    assert "QQQQ" * 25 not in reply.text
    first = found["errors"][0] if found["errors"] else {}
    assert case.pointer is None or first.get("pointer") == case.pointer
    assert case.input is None or first.get("input") == case.input
    assert case.says in f"{found['detail']} {first.get('hint', '')}"
    limited_control.check()


def test_duplicate_keys(live: Live) -> None:
    """Of a key that stands twice in a JSON object the last counts, as most parsers have it."""
    content = json.dumps(GOOD)[:-1] + ', "layers": ["head"]}'
    reply = live.client.post("/extract", **text(content))
    assert list(reply.json()["features"]) == ["head"]


def test_faults_are_counted() -> None:
    """Of many faults as many are shown as fit, and all others are counted, however short they are."""
    for count in range(40):
        faults = tuple(Fault(f"{number}") for number in range(count))
        reply = json.loads(made(422, "x", "y", "z", faults=faults).body)
        assert len(reply["errors"]) + reply.get("more_errors", 0) == count


def test_long_faults_stay_short() -> None:
    """A problem is below 1 KiB whatever its words are."""
    for letter in ("a", "ü"):
        fault = Fault(letter * 5000, letter * 5000, "/" + letter * 5000, 7)
        assert len(made(422, "x", letter * 5000, "i" * 64, hint=letter * 5000, faults=(fault,) * 30).body) < 1024


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"])
def test_methods(live: Live, method: str) -> None:
    """Another method than a route takes is refused, and the reply says which it takes."""
    reply = live.client.request(method, "/extract")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert method == "HEAD" or problem(reply, 405)


def test_hostile_paths(live: Live, control: Control) -> None:
    """Paths of any characters are unknown routes or unknown models."""
    for path in (
        "/%00",
        "/%ff%fe",
        "/%ed%a0%80",
        "/" + "a" * 5000,
        "/%0d%0aX-Evil:1",
        "/models/%0d%0a",
        "/..%2f..%2fetc",
    ):
        problem(live.client.get(path), 404)
    problem(live.client.get("/models/digits/layers", params={"match": "a" * 600}), 422)
    problem(live.client.get("/models/digits/layers", params={"leaf": LONG}), 422)
    control.check()


def test_hostile_query(live: Live, control: Control) -> None:
    """Query strings of any bytes are refused or mean nothing."""
    for query in (
        "layers=%ed%a0%80",
        "layers=%00",
        "%ff=1",
        "layers=pool&" + "&" * 5000,
        "=",
        "layers=pool&model=%0d%0a",
    ):
        url = httpx.URL(live.url + "/extract", query=query.encode())
        reply = live.client.post(url, content=PNG, headers={"content-type": "image/png"})
        assert reply.status_code in (200, 404, 422)
        assert reply.status_code == 200 or problem(reply, reply.status_code)
    control.check()
