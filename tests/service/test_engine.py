"""Requests beside each other: bad ones harm nobody, cancelled and late ones never run, the worker lives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.server import Live
from tests.service.bad_requests import BAD
from tests.service.gated_server import post_rows
from tests.service.nets_http import ERRORS, Touchy
from tests.service.support import Control, Json, arrays_of, image, npy, picture, problem, raw, rows, same

PICTURES = [picture(seed) for seed in range(4)]
SKIP: Json = {"layers": ["block3", "head"], "pool": "mean", "on_error": "skip"}


def test_forward_that_raises(live: Live, control: Control) -> None:
    """Whatever a model raises, its request gets a 500 (422 for values it refuses); the worker serves the next."""
    for number, error in enumerate(ERRORS):
        bad = raw(npy(rows(1, Touchy.LIMIT + number)), "application/x-npy", model="touchy", layers="linear")
        found = problem(live.client.post("/extract", **bad), 422 if type(error) is ValueError else 500)
        assert "secret" not in str(found)
        assert post_rows(live, model="touchy").status_code == 200
    assert live.client.get("/livez").status_code == 200
    control.check()


def test_skip(live: Live) -> None:
    """``on_error: skip`` leaves bad inputs, and bad rows of an array, out and names them; the good are as without."""
    datas = [PICTURES[0], b"no picture", PICTURES[1], b"", PICTURES[2][:100], PICTURES[3]]
    reply = live.client.post("/extract", json=SKIP | {"inputs": [image(data) for data in datas]})
    assert reply.json()["rows"] == 3
    assert [error["input"] for error in reply.json()["errors"]] == [1, 3, 4]
    assert all(error["detail"] and error["hint"] for error in reply.json()["errors"])
    good = live.client.post("/extract", json=SKIP | {"inputs": [image(PICTURES[at]) for at in (0, 1, 3)]})
    assert good.json()["errors"] == []
    assert same(arrays_of(reply), arrays_of(good))
    batch = rows(5)
    batch[1, 2], batch[4, 0] = np.nan, np.inf
    request = raw(npy(batch), "application/x-npy", model="gated", layers="linear", on_error="skip")
    assert [error["input"] for error in live.client.post("/extract", **request).json()["errors"]] == [1, 4]


def test_crowd(live: Live, control: Control) -> None:
    """Many requests at once, good and bad, each get the very bytes or the status that they get alone."""
    layers = ("block?", "head", "*.relu#*", "block3:input")
    requests: list[Json] = [
        {"json": {"layers": [layer], "pool": pool, "inputs": [image(data)], "isolated": True}}
        for layer, pool, data in zip(layers, ("mean", "none", "max", "gem"), PICTURES, strict=True)
    ]
    names = ("NaN in a tensor", "an image cut short", "unknown model", "not JSON", "near name")
    requests += [BAD[name].request for name in names]
    alone = [live.client.post("/extract", **request) for request in requests]
    assert [reply.status_code for reply in alone] == [200] * 4 + [422, 422, 404, 400, 422]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda request: live.client.post("/extract", **request), requests * 4))
    for reply, expected in zip(replies, alone * 4, strict=True):
        assert reply.status_code == expected.status_code
        assert expected.status_code != 200 or reply.content == expected.content
    control.check()
