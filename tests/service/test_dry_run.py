"""What a request would get, without a forward."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server import Live
from tests.service.bad_requests import BAD
from tests.service.gated_server import gated_module
from tests.service.support import Control, Json, arrays_of, image, npy, picture, problem, raw, rows, tensor

DRY = {"dry_run": "true"}
PNG = picture(1)


def dry(live: Live, **body: Any) -> Any:
    """The estimate for a request."""
    return live.client.post("/extract", params=DRY, json=body)


def test_as_the_real_one(live: Live) -> None:
    """Keys, shapes, dtypes, bytes and fingerprint are those of the real reply."""
    layers = ["block?", "block2.relu#*", "head:input"]
    body: Json = {"layers": layers, "inputs": [image(PNG), image(picture(2))], "dtype": "int8", "pool": "flatten"}
    estimate, reply = dry(live, **body), live.client.post("/extract", json=body)
    arrays = arrays_of(reply)
    promised = estimate.json()
    expected = {key: (list(a.shape), a.dtype.name) for key, a in arrays.items() if not key.endswith(".scale")}
    assert {key: (each["shape"], each["dtype"]) for key, each in promised["features"].items()} == expected
    assert promised["bytes"] == sum(array.nbytes for array in arrays.values())
    assert promised["rows"] == 2
    assert promised["fingerprint"] == reply.json()["fingerprint"] == estimate.headers["x-layertap-fingerprint"]


def test_no_forward(live: Live) -> None:
    """Nothing runs, with inputs or without."""
    module = gated_module(live)
    module.forwards.clear()
    assert dry(live, model="gated", layers=["*"]).status_code == 200
    assert dry(live, model="gated", layers=["*"], inputs=[tensor(rows()[0])]).json()["rows"] == 1
    request = raw(npy(rows(7)), "application/x-npy", model="gated", layers="linear", **DRY)
    reply = live.client.post("/extract", **request)
    assert reply.json()["features"]["linear"]["shape"] == [7, 3]
    assert module.forwards == []


def test_where_it_stops(live: Live) -> None:
    """The estimate says after which point the forward ends, and how much of it that is."""
    asked = (["block1", "block1.0"], ["block2.relu#0"], [".", "pool"])
    estimates = [dry(live, layers=layers).json() for layers in asked]
    assert [each["stops_at"] for each in estimates] == ["block1#0:output", "block2.relu#0:output", ".#0:output"]
    costs = [each["cost"] for each in estimates]
    assert 0 < costs[0] <= costs[1] <= costs[2] <= 1


def test_warnings(live: Live) -> None:
    """Layers that never run, and rows that affect each other, are warned of."""
    assert dry(live, layers=["*"]).json()["warnings"] == []
    assert "silent" in dry(live, model="never_called", layers=["*"]).json()["warnings"][0]
    assert "alone" in dry(live, model="centred", layers=["linear"]).json()["warnings"][0]


@pytest.mark.parametrize("name", ["unknown format", "near name", "predicted reply", "an image cut short"])
def test_refused_as_the_real_one(limited: Live, limited_control: Control, name: str) -> None:
    """What would be refused is refused in the same words."""
    case = BAD[name]
    request = case.request | {"params": {**case.request.get("params", {}), **DRY}}
    real, found = (limited.client.post("/extract", **each) for each in (case.request, request))
    a, b = problem(real, case.status), problem(found, case.status)
    assert {**a, "request_id": ""} == {**b, "request_id": ""}
    limited_control.check()
