"""Requests beside each other: bad ones harm nobody, cancelled and late ones never run, the worker lives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.server import Live
from tests.service.bad_requests import BAD
from tests.service.conftest import Serve
from tests.service.gated_server import (
    admitted_rows,
    build_row_request,
    connect,
    encode_request,
    gated_module,
    hold_model,
    post_rows,
    wait_until,
)
from tests.service.nets_http import ERRORS, Touchy
from tests.service.queue_harness import queued_rows
from tests.service.support import (
    Control,
    Json,
    arrays_of,
    configured,
    image,
    net,
    npy,
    picture,
    problem,
    raw,
    rows,
    safetensors_of,
    same,
    tensor,
)

PICTURES = [picture(seed) for seed in range(4)]
SKIP: Json = {"layers": ["block3", "head"], "pool": "mean", "on_error": "skip"}


def test_cancelled(live: Live) -> None:
    """A client that goes away while its job waits never has it run, and its rows are off the queue at once."""
    with hold_model(live) as module:
        with connect(live) as connection:
            connection.sendall(encode_request(build_row_request(live, 3)))
            wait_until(lambda: admitted_rows(live) == 4)
        wait_until(lambda: admitted_rows(live) == 1)
    assert post_rows(live, 2).status_code == 200
    assert module.forwards == [2]


def test_cancelled_while_it_runs(live: Live) -> None:
    """A client that goes away while its job runs harms nobody: the model goes on, without hooks, for the next."""
    module = gated_module(live)
    module.gate.clear()
    module.entered.clear()
    with connect(live) as connection:
        connection.sendall(encode_request(build_row_request(live, 3)))
        assert module.entered.wait(30)
    wait_until(lambda: admitted_rows(live) == 0)
    module.gate.set()
    assert post_rows(live).status_code == 200


def test_cancelled_while_it_sends(live: Live, control: Control) -> None:
    """A client that goes away in the middle of its body harms nobody."""
    sent = encode_request(build_row_request(live, 3))
    for size in (10, 100, len(sent) - 1):
        with connect(live) as connection:
            connection.sendall(sent[:size])
    control.check()


def test_late(live: Live, control: Control) -> None:
    """A job whose deadline passes while it waits is answered then, and never runs."""
    with hold_model(live) as module:
        problem(post_rows(live, 3, timeout="0.2"), 504, seconds=True)
        assert admitted_rows(live) == 1
        control.check()
    assert post_rows(live, 2).status_code == 200
    assert module.forwards == [2]


def test_late_while_it_runs(live: Live) -> None:
    """A job whose deadline passes while it runs is answered then; the next one waits for the model and is served."""
    module = gated_module(live)
    module.gate.clear()
    problem(post_rows(live, timeout="0.2"), 504, seconds=True)
    module.gate.set()
    assert post_rows(live).status_code == 200


def test_shared(live: Live) -> None:
    """What waits while a forward runs shares the next one, and each request gets its own rows of it."""
    with ThreadPoolExecutor(4) as pool:
        with hold_model(live) as module:
            replies = []
            for count in (3, 2, 4):
                before = queued_rows(live)
                replies.append(pool.submit(post_rows, live, count))
                wait_until(lambda before=before, count=count: queued_rows(live) == before + count)  # type: ignore[misc]
        assert [len(arrays_of(reply.result())["linear"]) for reply in replies] == [3, 2, 4]
    assert module.forwards == [9]


def test_forward_that_raises(live: Live, control: Control) -> None:
    """Whatever a model raises, its request gets a 500 (422 for values it refuses); the worker serves the next."""
    for number, error in enumerate(ERRORS):
        bad = raw(npy(rows(1, Touchy.LIMIT + number)), "application/x-npy", model="touchy", layers="linear")
        found = problem(live.client.post("/extract", **bad), 422 if type(error) is ValueError else 500)
        assert "secret" not in str(found)
        good = raw(npy(rows()), "application/x-npy", model="touchy", layers="linear")
        assert live.client.post("/extract", **good).status_code == 200
        assert live.client.get("/livez").status_code == 200
    control.check()


@pytest.mark.parametrize("form", ["json", "multipart"])
def test_skip(live: Live, form: str) -> None:
    """``on_error: skip`` leaves bad inputs out and names them; the good ones are as they are without the bad."""
    datas = [PICTURES[0], b"no picture", PICTURES[1], b"", PICTURES[2][:100], PICTURES[3]]
    sent: dict[str, Json] = {
        "json": {"json": SKIP | {"inputs": [image(data) for data in datas]}},
        "multipart": {"files": [("images", data) for data in datas], "params": SKIP | {"layers": "block3,head"}},
    }
    reply = live.client.post("/extract", **sent[form])
    assert reply.json()["rows"] == 3
    assert [error["input"] for error in reply.json()["errors"]] == [1, 3, 4]
    assert all(error["detail"] and error["hint"] for error in reply.json()["errors"])
    good = live.client.post("/extract", json=SKIP | {"inputs": [image(PICTURES[at]) for at in (0, 1, 3)]})
    assert good.json()["errors"] == []
    assert same(arrays_of(reply), arrays_of(good))
    for row, at in enumerate((0, 1, 3)):
        alone = arrays_of(live.client.post("/extract", json=SKIP | {"inputs": [image(PICTURES[at])]}))
        for key, array in arrays_of(reply).items():
            np.testing.assert_allclose(array[row], alone[key][0], atol=1e-5)


def test_skip_kinds(live: Live) -> None:
    """Every kind of bad input can be left out: not base64, wrong shape, not finite, nothing at all."""
    row = np.zeros((3, 32, 32), np.float32)
    inputs: list[Json] = [
        *(tensor(row[:2]), {"image": "!"}, {}, {"url": "http://localhost/"}, tensor(row), tensor(row * np.nan)),
        *(tensor(np.zeros((3, 40, 40), np.float32)), image(PICTURES[0]), {"image": None}),
    ]
    reply = live.client.post("/extract", json=SKIP | {"inputs": inputs})
    assert reply.json()["rows"] == 3
    assert [error["input"] for error in reply.json()["errors"]] == [0, 1, 2, 3, 5, 8]


@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_skip_rows(live: Live, form: str) -> None:
    """Of a batch in one array the rows that are not finite are left out, and named."""
    batch = rows(5) * np.arange(5, dtype=np.float32)[:, None]
    batch[1, 2], batch[4, 0] = np.nan, np.inf
    body = npy(batch) if form == "npy" else safetensors_of(x=batch)
    request = raw(body, f"application/x-{form}", model="gated", layers="linear", on_error="skip")
    reply = live.client.post("/extract", **request)
    assert reply.json()["rows"] == 3
    assert [error["input"] for error in reply.json()["errors"]] == [1, 4]
    good = raw(npy(batch[[0, 2, 3]]), "application/x-npy", model="gated", layers="linear")
    assert same(arrays_of(reply), arrays_of(live.client.post("/extract", **good)))
    found = problem(
        live.client.post("/extract", **{**request, "params": request["params"] | {"on_error": "fail"}}), 422
    )
    assert [error["input"] for error in found["errors"]] == [1, 4]


def test_too_large_for_the_model(live: Live) -> None:
    """A number that is finite as it was sent, but not in the model's dtype, is refused."""
    request = raw(npy(np.full((1, 4), 1e300)), "application/x-npy", model="gated", layers="linear")
    assert problem(live.client.post("/extract", **request), 422)["errors"][0]["input"] == 0


def test_skip_all(live: Live, control: Control) -> None:
    """Where no input is good there is nothing to answer with: 422, with the reason for each."""
    found = problem(live.client.post("/extract", json=SKIP | {"inputs": [image(b"x"), {"image": "!"}]}), 422)
    assert [error["input"] for error in found["errors"]] == [0, 1]
    control.check()


def test_crowd(live: Live, control: Control) -> None:
    """Many requests at once, good and bad, each get the very bytes or the status that they get alone."""
    layers = ("block?", "head", "*.relu#*", "block3:input")
    requests: list[Json] = [
        {"json": {"layers": [layer], "pool": pool, "inputs": [image(data)], "isolated": True}}
        for layer, pool, data in zip(layers, ("mean", "none", "max", "gem"), PICTURES, strict=True)
    ]
    names = (
        "NaN in a tensor",
        "an image cut short",
        "unknown model",
        "not JSON",
        "near name",
        "two shapes of a layer's output",
    )
    requests += [BAD[name].request for name in names]
    alone = [live.client.post("/extract", **request) for request in requests]
    assert [reply.status_code for reply in alone] == [200] * 4 + [422, 422, 404, 400, 422, 422]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda request: live.client.post("/extract", **request), requests * 4))
    for reply, expected in zip(replies, alone * 4, strict=True):
        assert reply.status_code == expected.status_code
        assert expected.status_code != 200 or reply.content == expected.content
    control.check()


def test_batches(serve: Serve) -> None:
    """More rows than a forward may have run in several, and come back as one answer in order."""
    with serve(configured(net("gated", "Gated")), max_batch_rows=4) as live:
        module = gated_module(live)
        module.forwards.clear()
        batch = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
        request = raw(npy(batch), "application/x-npy", model="gated", layers="linear", dtype="int8")
        found = arrays_of(live.client.post("/extract", **request))
        assert module.forwards == [4, 4, 2]
        assert found["linear"].shape == (10, 3)
        assert found["linear.scale"].shape == (10,)
