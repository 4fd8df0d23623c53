"""Requests beside each other: bad ones harm nobody, and the worker lives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.server import Live
from tests.service.bad_requests import BAD
from tests.service.gated_server import post_rows
from tests.service.nets_http import ERRORS, Touchy
from tests.service.support import Control, Json, image, npy, picture, problem, raw, rows

PICTURES = [picture(seed) for seed in range(4)]


def test_forward_that_raises(live: Live, control: Control) -> None:
    """Whatever a model raises, its request gets a 500 (422 for values it refuses) with the model's own words and line.

    The worker serves the next.
    """
    for number, error in enumerate(ERRORS):
        bad = raw(npy(rows(1, Touchy.LIMIT + number)), "application/x-npy", model="touchy", layers="linear")
        found = problem(live.client.post("/extract", **bad), 422 if type(error) is ValueError else 500)
        assert f"{type(error).__name__} at nets_http.py:" in found["detail"]
        assert ("of the model" in found["detail"]) == ("of the model" in str(error))
        assert post_rows(live, model="touchy").status_code == 200
    assert live.client.get("/livez").status_code == 200
    control.check()


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
