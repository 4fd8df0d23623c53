"""Errors: each gets its status and a problem that gives nothing away, and the server is as well as before."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from layertap.models.errors import Fault
from layertap.service.http.problems import Problem, encode_problem
from tests.server import Live
from tests.service.bad_requests import BAD, GOOD, LONG, PNG, text
from tests.service.support import Control, Json, npy, problem, raw

FIELDS = (
    *("model", "inputs", "layers", "pool", "normalize", "dtype", "encoding", "on_error", "isolated", "image", "tensor"),
    *("layer", "type", "call", "path", "site", "channels", "tokens", "as", "shape", "data", "url", "__class__"),
)
WORDS = ("digits", "pool", "head", "block*", "mean", "none", "float16", "Conv2d", "[0]", "input", "list", "#", "*", "")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(WORDS) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)
BODIES = {
    "image/png": PNG,
    "application/x-npy": npy(np.zeros((3, 32, 32), np.float32)),
    "application/x-safetensors": save({"image": np.zeros((3, 32, 32), np.float32)}),
    "application/json": json.dumps(GOOD).encode(),
    "multipart/form-data; boundary=x": b"--x\r\nContent-Disposition: form-data; name=images\r\n\r\n"
    + PNG
    + b"\r\n--x--",
}


@given(body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
@settings(max_examples=40)
def test_any_json(live: Live, body: Json) -> None:
    """Whatever stands in a JSON body, it is answered or refused in words."""
    content = json.dumps({"layers": ["pool"], "inputs": GOOD["inputs"], **body}).encode("utf-8", "surrogatepass")
    answered(live.client.post("/extract", **text(content)))


@pytest.mark.parametrize("media_type", BODIES)
@given(data=st.data())
@settings(max_examples=15)
def test_any_bytes(live: Live, media_type: str, data: st.DataObject) -> None:
    """Whatever happens to the bytes of a body, it is answered or refused in words."""
    body = bytearray(BODIES[media_type])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1) | st.integers(0, 60))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
    query = {} if "json" in media_type else {"layers": "pool"}
    request = raw(bytes(body), media_type, **query)
    answered(live.client.post("/extract", **request))


def answered(reply: httpx.Response) -> None:
    """A reply is good, or a problem that is the caller's."""
    assert reply.status_code == 200 or problem(reply, reply.status_code)["status"] in (400, 404, 413, 415, 422)


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


def test_long_faults_stay_short() -> None:
    """A problem is below 1 KiB whatever its words are."""
    for letter in ("a", "ü"):
        fault = Fault(letter * 5000, letter * 5000, "/" + letter * 5000, 7)
        problem = Problem(422, "x", letter * 5000, "i" * 64, letter * 5000, (fault,) * 30)
        assert len(encode_problem(problem).body) < 1024


@pytest.mark.parametrize("method", ["GET", "HEAD", "TRACE"])
def test_methods(live: Live, method: str) -> None:
    """Another method than a route takes is refused, and the reply says which it takes."""
    reply = live.client.request(method, "/extract")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert method == "HEAD" or problem(reply, 405)


@pytest.mark.parametrize(
    ("path", "allowed"), [("/models/digits", "GET, HEAD, PUT"), ("/v1/models", "GET, HEAD"), ("/docs", "GET, HEAD")]
)
def test_methods_of_several_routes(live: Live, path: str, allowed: str) -> None:
    """What a path takes is said of all of its routes."""
    reply = live.client.delete(path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


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
