"""Limits of size and time: refused with the figure, or with when to come again, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from threading import Event

import httpx
import numpy as np
import pytest

from layertap.service.formats.json import count_text
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import (
    admitted_rows,
    connect,
    encode_request,
    gated_module,
    hold_model,
    post_rows,
    read_response,
    wait_until,
)
from tests.service.support import Control, Json, configured, image, net, npy, picture, problem, raw, rows


def test_queue_full(limited: Live, limited_control: Control) -> None:
    """What does not fit into the queue is refused with when to come again; what fits waits and is served."""
    with ThreadPoolExecutor(2) as pool:
        with hold_model(limited) as module:
            waits = pool.submit(post_rows, limited, 4)
            wait_until(lambda: admitted_rows(limited) == 5)
            found = problem(post_rows(limited, 2), 429, seconds=True)
            assert "5 rows of 6" in found["detail"]
            assert "at most 1 input" in found["errors"][0]["hint"]
            fits = pool.submit(post_rows, limited, 1)
            wait_until(lambda: admitted_rows(limited) == 6)
            assert problem(post_rows(limited, 1), 429, seconds=True)["errors"][0]["hint"] == "come again later"
            limited_control.check()  # another model's queue is its own
        assert [reply.result().status_code for reply in (waits, fits)] == [200, 200]
    assert sum(module.forwards) == 5
    assert post_rows(limited, 4).status_code == 200


def test_servers_own_deadline(serve: Serve) -> None:
    """Without a deadline of the caller's, or with a longer one, the server's own counts."""
    with serve(configured(net("gated", "Gated")), deadline_s=0.3) as live:
        module = gated_module(live)
        module.gate.clear()
        for timeout in (None, "1e9"):
            reply = post_rows(live, timeout=timeout)
            found = problem(reply, 504, seconds=True)
            assert "this server's limit of 0.3 s" in found["detail"]
            assert reply.headers["retry-after"] in ("1", "2")  # by then whatever waits now is answered
            assert "X-Request-Timeout" not in found["errors"][0]["hint"]  # more of it would help nobody
        module.gate.set()
        wait_until(lambda: post_rows(live).status_code == 200)


@pytest.mark.slow
def test_slow_body(serve: Serve) -> None:
    """A body that does not arrive in time is given up; one that keeps coming has its deadline from the last byte."""
    with serve(body_timeout_s=0.5, deadline_s=0.7) as live:
        sent = raw(picture(size=(200, 200)), "image/png", layers="pool")
        sent["headers"] |= {"connection": "close"}  # or the client would read until the server's patience ends
        request = live.client.build_request("POST", "/extract", **sent)
        data = encode_request(request)
        size = len(data) // 6 + 1
        with connect(live) as connection:
            for place in range(0, len(data), size):
                connection.sendall(data[place : place + size])
                Event().wait(0.15)
            assert read_response(connection, request).status_code == 200
        with connect(live) as connection:
            connection.sendall(data[:-10])
            reply = read_response(connection, request)
        assert "0.5 s" in problem(reply, 408)["detail"]
        assert reply.headers["connection"] == "close"


def test_announced(limited: Live, limited_control: Control) -> None:
    """A body that is announced as too large is refused before any of it is sent."""
    length = "99999999999999999"
    url = httpx.URL(limited.url)
    with closing(HTTPConnection(url.host, url.port, timeout=60)) as connection:
        connection.putrequest("POST", "/extract")
        connection.putheader("content-length", length)
        connection.endheaders()
        reply = connection.getresponse()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert f"{length} bytes" in json.load(reply)["detail"]
    limited_control.check()


@pytest.mark.parametrize(("size", "status"), [(2_000_000, 422), (2_000_001, 413)])
def test_to_the_byte(limited: Live, size: int, status: int) -> None:
    """A body as long as the limit is read: this one is no picture. One byte more is refused."""
    problem(limited.client.post("/extract", content=bytes(size), headers={"content-type": "image/png"}), status)


def test_reply_before_the_body_is_sent(limited: Live, limited_control: Control) -> None:
    """Clients that send all before they read get the refusal of a body that is far too large."""
    url, kind = httpx.URL(limited.url), {"content-type": "image/png"}
    for body, chunked in ((bytes(30_000_000), False), ((bytes(100_000) for _ in range(300)), True)):
        with closing(HTTPConnection(url.host, url.port, timeout=60)) as connection:
            connection.request("POST", "/extract", body, kind, encode_chunked=chunked)
            reply = connection.getresponse()
            assert reply.status == 413
            assert "limit is" in json.load(reply)["detail"]
    limited_control.check()


def test_within_limits(limited: Live) -> None:
    """What is exactly at a limit is taken."""
    body = {"layers": ["head"], "inputs": [image(picture(size=(100, 100)))] * 4}
    assert limited.client.post("/extract", json=body).status_code == 200
    batch = np.zeros((4, 3, 32, 32), np.float32)
    layers = "head,pool,flatten,block3,block2,block2.bn1,block2.bn2,block2.conv1"
    request = raw(npy(batch), "application/x-npy", layers=layers, pool="mean")
    assert len(limited.client.post("/extract", **request).json()["features"]) == 8


def test_text_is_reserved(limited: Live) -> None:
    """A reply as text takes its bytes beside those of its arrays, from the start."""

    def count_reserved(**query: str) -> int:
        with ThreadPoolExecutor(1) as pool, hold_model(limited):
            before = limited.engine.admission.used_bytes
            sent = raw(npy(rows(4)), "application/x-npy", layers="linear", model="gated", **query)
            waits = pool.submit(limited.client.post, "/extract", **sent)
            wait_until(lambda: limited.engine.admission.used_bytes > before and admitted_rows(limited) == 5)
            reserved = limited.engine.admission.used_bytes - before
        assert waits.result().status_code == 200
        return reserved

    array = np.zeros((4, 3), np.float32)
    as_arrays, as_list = count_reserved(format="npz"), count_reserved()
    assert as_list - as_arrays == count_text("list", "float32", array.size, array.nbytes)
    as_base64 = count_reserved(encoding="base64")
    assert as_base64 - as_arrays == count_text("base64", "float32", array.size, array.nbytes)


@pytest.fixture(scope="module")
def brief(serve: Serve) -> Iterator[Live]:
    """A server that writes no more than 300 numbers in lists."""
    with serve(max_json_numbers=300, max_inputs=4) as live:
        yield live


SENT = [image(picture(seed)) for seed in range(4)]
OF_OIP = {"name": "encoded_image", "shape": [1], "datatype": "BYTES", "data": [SENT[0]["image"]]}
MAP = {"name": "block3", "parameters": {"binary_data": True}}
# Requests that fit, and what is asked for instead, by those that do not.
LISTS: dict[str, tuple[str, Json, Json, str]] = {
    "extract": (
        "/extract",
        {"layers": ["head"], "inputs": SENT},
        {"layers": ["pool", "block3"]},
        '"encoding": "base64"',
    ),
    "explain": (  # the layer's captures are longer than its maps
        "/explain",
        {"method": "grad_cam", "layer": "block3", "inputs": SENT},
        {"method": "saliency", "layer": None},
        '"encoding": "base64"',
    ),
    "sweep": (
        "/sweep",
        {"layers": ["block1"], "op": "zero", "inputs": SENT},
        {"layers": ["block1", "block2", "block3"], "each": "channel"},
        "npz",
    ),
    "embeddings": (
        "/v1/embeddings",
        {"model": "digits", "input": SENT},
        {"input": [*SENT, SENT[0]]},
        '"encoding_format": "base64"',
    ),
    "infer": (
        "/v2/models/digits/infer",
        {"inputs": [OF_OIP], "outputs": [{"name": "head"}, MAP]},
        {"outputs": [{"name": "head"}, {"name": "block3"}]},
        '"binary_data": true',
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_numbers_in_lists(brief: Live, name: str) -> None:
    """More numbers than lists may have are refused before any forward, with what to ask for."""
    path, fits, changes, instead = LISTS[name]
    assert brief.client.post(path, json=fits).status_code == 200
    reply = brief.client.post(path, json=fits | changes)
    assert reply.status_code == 413
    assert "lists, the limit is 300" in reply.text
    assert instead in reply.text.replace('\\"', '"')


@pytest.mark.parametrize("path", ["/extract", "/v1/embeddings"])
def test_numbers_that_are_no_lists(brief: Live, path: str) -> None:
    """As bytes there may be more."""
    bodies = {
        "/extract": {"layers": ["block1"], "encoding": "base64", "inputs": SENT},
        "/v1/embeddings": {"model": "digits", "encoding_format": "base64", "input": [*SENT, SENT[0]]},
    }
    assert brief.client.post(path, json=bodies[path]).status_code == 200


def test_draining(serve: Serve) -> None:
    """While the server is draining every request for a model is told to come again, and it is not ready."""
    with serve(configured(net("gated", "Gated"))) as live:
        fleet = live.engine.manager
        fleet.draining = True
        problem(post_rows(live), 503, seconds=True)
        problem(live.client.get("/models/gated/layers"), 503, seconds=True)
        problem(live.client.get("/readyz"), 503, seconds=True)
        assert live.client.get("/livez").status_code == 200
        assert live.client.get("/models").status_code == 200
        fleet.draining = False
        assert post_rows(live).status_code == 200
