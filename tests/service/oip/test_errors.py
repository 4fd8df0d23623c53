"""What is wrong with a request is told in the protocol's way, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import hold_model
from tests.service.oip.support import HEADER, behind, body, connect, make_bytes, make_input, make_tensor, read_error
from tests.service.support import Json, configured, net, picture

ROWS = np.ones((1, 4), np.float32)
FOUR = b"\0\0\x80?" * 4
PICTURE = {"name": "encoded_image", "shape": [1], "datatype": "BYTES"}


def element(data: bytes) -> bytes:
    """An element of datatype BYTES."""
    return len(data).to_bytes(4, "little") + data


CLASSIFIED = {"classification": 2}
# Bodies for the model ``gated``, which takes x, FP32 [4], and words that the error has.
BAD: list[tuple[str, Json, str]] = [
    ("not JSON", {"content": b"{"}, "not JSON"),
    ("NaN", {"content": b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[NaN]}]}'}, "NaN"),
    ("no inputs", body(), "inputs"),
    ("unknown field", body(make_tensor(), extra=1), "'extra'"),
    ("no shape", body({"name": "x", "datatype": "FP32", "data": [1]}), "inputs/0/shape"),
    ("nine axes", body(make_tensor((1,) * 9, [1])), "inputs/0/shape"),
    ("huge shape", body(behind(4, (2**31 - 1,) * 8), data=FOUR[:4]), "makes no sense"),
    ("too few", body(make_tensor((1, 4), [1, 2])), "2 elements"),
    ("nested unevenly", body(make_tensor((1, 4), [[1, 2], [3]])), "unevenly"),
    ("text among numbers", body(make_tensor((1, 4), [1, 2, 3, "4"])), "numbers"),
    ("no data", body(make_tensor(data=None)), "no data"),
    ("fractions for integers", body(make_tensor((1, 4), [1.5] * 4, "INT32")), "whole numbers"),
    ("beyond INT8", body(make_tensor((1, 4), [128] * 4, "INT8")), "beyond INT8"),
    ("integers for floats", body(make_tensor((1, 4), [1] * 4, "INT32")), "float32"),
    ("unknown datatype", body(make_tensor(datatype="FP8")), "'FP8'"),
    ("unknown input", body(make_tensor() | {"name": "y"}), "'y'"),
    ("two of one name", body(make_tensor(), make_tensor()), "one name"),
    ("no rows", body(make_tensor((0, 4), [])), "no rows"),
    ("bytes that are not there", body(behind(16), data=FOUR[:8]), "16 bytes"),
    ("bytes without a header", {"content": json.dumps({"inputs": [behind(16)]}).encode()}, HEADER),
    ("bytes of nothing", body(make_tensor(), data=b"12"), "2 bytes"),
    ("bytes twice", body(make_tensor(parameters={"binary_data_size": 16}), data=FOUR), "once"),
    ("very many bytes", body(behind(2**63), data=FOUR), "binary_data_size"),
    ("header of text", {**body(make_tensor()), "headers": {HEADER: "1e2"}}, HEADER),
    ("said to be a picture", body(make_tensor()) | {"headers": {"content-type": "image/png"}}, "JSON"),
    ("picture for numbers", body(PICTURE | {"parameters": {"binary_data_size": 7}}, data=element(b"abc")), "picture"),
    ("shared memory", body(make_tensor(data=None, parameters={"shared_memory_region": "r"})), "no data"),
    ("packed otherwise", {**body(make_tensor()), "headers": {"content-encoding": "br"}}, "deflate"),
    ("unknown parameter", body(make_tensor(), parameters={"poll": "mean"}), "'pool'"),
    ("near parameter", body(make_tensor(), parameters={"normalise": True}), "'normalize'"),
    (
        "reply elsewhere",
        body(make_tensor(), outputs=[{"name": "linear", "parameters": {"shared_memory_region": "r"}}]),
        "'shared_memory_region'",
    ),
    ("objective twice", body(make_tensor(), parameters={"objective": {"class": 1}, "class": 2}), "objective"),
    ("unknown layer", body(make_tensor(), outputs=[{"name": "linaer"}]), "'linear'"),
    ("classification", body(make_tensor(), outputs=[{"name": "linear", "parameters": CLASSIFIED}]), "'classification'"),
    # For ``digits``, which takes pictures.
    ("element cut off", body(PICTURE | {"parameters": {"binary_data_size": 7}}, data=b"\4\0\0\0abc"), "cut off"),
    ("too many elements", body(PICTURE | {"parameters": {"binary_data_size": 8}}, data=b"\0" * 8), "4 bytes are left"),
    ("another shape", body(PICTURE | {"shape": [1, 2], "data": ["a", "b"]}), "[N, 1]"),
    ("another name", body(PICTURE | {"name": "image", "data": ["a"]}), "'encoded_image'"),
    ("a text", body({"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}), "takes no text"),
]
OF_DIGITS = {"element cut off", "too many elements", "another shape", "another name", "a text"}


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with connect(live) as client:
        yield client


@pytest.mark.parametrize(("name", "sent", "words"), BAD, ids=[each[0] for each in BAD])
def test_bad_request(live: Live, name: str, sent: Json, words: str) -> None:
    """What makes no sense is 400, in words that say what."""
    model = "digits" if name in OF_DIGITS else "gated"
    assert words in read_error(live.client.post(f"/v2/models/{model}/infer", **sent), 400)


def test_bad_rows_are_numbered(live: Live, client: Any) -> None:
    """Of several bad pictures the first is told, and how many others there are."""
    rows = make_bytes("encoded_image", [picture(), b"none", b"neither"], (3, 1))
    with pytest.raises(InferenceServerException, match=r"row 1: .*\(and 1 more\)") as caught:
        client.infer("digits", [rows])
    assert caught.value.status() == "400"


def test_unknown_model(live: Live, client: Any) -> None:
    """A model, a version or a route that is not there is 404, whatever is asked of it."""
    rows = [make_input("x", ROWS)]
    for ask in (
        lambda: client.infer("digit", rows),
        lambda: client.get_model_metadata("digit"),
        lambda: client.infer("gated", rows, model_version="2"),
        lambda: client.get_model_metadata("gated", "latest"),
        lambda: client.get_inference_statistics("gated"),
        lambda: client.get_model_config("gated"),
        lambda: client.load_model("gated"),
        lambda: client.get_trace_settings(),
        lambda: client.get_system_shared_memory_status(),
    ):
        with pytest.raises(InferenceServerException) as caught:
            ask()
        assert caught.value.status() == "404"
        assert caught.value.message()
    assert "'digits'" in read_error(live.client.get("/v2/models/digit"), 404)


def test_failed_model(live: Live) -> None:
    """A model that could not be loaded is 503; a client is not asked to wait for it."""
    reply = live.client.post("/v2/models/never/infer", **body(make_tensor()))
    assert "never could not be loaded" in read_error(reply, 503)
    assert "retry-after" not in reply.headers


def test_deadline(live: Live, client: Any) -> None:
    """A timeout, in microseconds, is a deadline: what is not there by then is 504 and says whose limit it was."""
    with hold_model(live), pytest.raises(InferenceServerException, match=r"the timeout of 0\.3 s") as caught:
        client.infer("gated", [make_input("x", ROWS)], timeout=300_000)
    assert caught.value.status() == "504"


def test_limits(limited: Live) -> None:
    """What is over a limit is 413, with the figure and the limit."""
    outputs = [{"name": name} for name in "abcdefghi"]
    for sent, words in (
        (body(make_tensor((5, 4), [1] * 20)), "5 inputs"),
        (body(make_tensor(), outputs=outputs), "9 results"),
        (body(PICTURE | {"shape": [5], "data": ["a"] * 5}), "5 inputs"),
        (body(PICTURE | {"shape": [2**31 - 1], "data": []}), "2147483647 inputs"),
        ({"content": b" " * 2_000_001}, "2000001 bytes"),
    ):
        assert words in read_error(limited.client.post("/v2/models/gated/infer", **sent), 413)
    maps = [{"name": name} for name in ("block1", "block2", "block3")]
    pixels = {"name": "image", "shape": [4, 3, 32, 32], "datatype": "FP32"}
    sent = body(pixels | {"parameters": {"binary_data_size": 49152}}, data=b"\0" * 49152, outputs=maps)
    assert "'binary_data': true".replace("'", '"') in read_error(
        limited.client.post("/v2/models/digits/infer", **sent), 413
    )


def test_keys(serve: Serve) -> None:
    """Health needs no key, all else does."""
    configuration = configured(net("gated", "Gated"))
    with serve(configuration, api_keys=("user",), admin_keys=("root",)) as live, connect(live) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert not client.is_model_ready("gated")
        with pytest.raises(InferenceServerException) as caught:
            client.infer("gated", [make_input("x", ROWS)])
        assert caught.value.status() == "401"
        assert client.is_model_ready("gated", headers={"X-API-Key": "user"})
        assert client.infer("gated", [make_input("x", ROWS)], headers={"Authorization": "Bearer user"})


FIELDS = (
    *("id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data", "binary_data_size", "binary_data"),
    *("pool", "stats", "timeout", "priority", "objective", "resume", "interventions"),
)
WORDS = st.sampled_from(["x", "encoded_image", "text", "linear", ".", "*", "FP32", "BF16", "INT64", "BYTES"])
SIMPLE = st.none() | st.booleans() | st.integers(-1, 40) | st.floats(allow_nan=False) | WORDS | st.text(max_size=8)
JSON = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)


@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    document=st.dictionaries(st.sampled_from(FIELDS[:4]), JSON, max_size=2),
    data=st.binary(max_size=40),
    length=st.none() | st.integers(-5, 5),
)
@settings(max_examples=60)
def test_random_bodies(live: Live, changes: Json, document: Json, data: bytes, length: int | None) -> None:
    """Whatever is sent, it is answered, or refused in the protocol's way."""
    head = json.dumps({"inputs": [make_tensor() | changes]} | document).encode()
    headers = {} if length is None else {HEADER: str(len(head) + length)}
    reply = live.client.post("/v2/models/gated/infer", content=head + data, headers=headers)
    if reply.status_code != 200:
        assert reply.status_code < 500, (document, reply.text)
        read_error(reply, reply.status_code)
