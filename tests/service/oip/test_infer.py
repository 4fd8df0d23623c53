"""``tritonclient.http``, as it is published: our inferences have the bits of the native route; metadata, and health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http.aio as aio
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from layertap.models.spec import InputDType, InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.oip.support import (
    body,
    connect,
    make_bytes,
    make_input,
    make_outputs,
    make_tensor,
    read_error,
    read_outputs,
)
from tests.service.support import Array, Json, arrays_of, configured, image, net, picture, same, tensor, text64
from tests.transformers_nets import saved, tokenizer

LAYERS = ("block1", "block2.conv2", "block2.relu:input", "block3", "head")
PICTURES = [picture(seed) for seed in range(3)]
TEXTS = ["a cat sat on the mat", "the dog saw the cat"]
DTYPES: tuple[InputDType, ...] = ("int8", "int32", "int64", "uint8", "bool", "float32", "float64")
PIXELS = np.random.default_rng(0).standard_normal((3, 3, 32, 32)).astype(np.float32)


def make_spec(name: str, factory: str, dtype: InputDType = "float32") -> ModelSpec:
    """The configuration of a module of ``nets``, which takes three numbers a row."""
    return ModelSpec(
        name,
        f"python:tests.service.oip.nets:{factory}",
        weights="random:0",
        device="cpu",
        inputs=(InputSpec("x", (3,), dtype),),
    )


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with connect(live) as client:
        yield client


@pytest.fixture(scope="module")
def typed(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of models that take integers, booleans and texts."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    saved("bert", folder)
    tokenizer(folder)
    specs = [make_spec(dtype, "Passing", dtype) for dtype in DTYPES]
    bert = ModelSpec("bert", f"transformers:{folder}", device="cpu")
    with serve(configured(*specs, make_spec("logarithm", "Logarithm"), bert), max_loaded_models=20) as live:
        yield live


def native(live: Live, *layers: str | Json, rows: Array = PIXELS, **fields: Any) -> dict[str, Array]:
    """The same layers by the native route, of the same rows."""
    request = {"layers": list(layers), "encoding": "base64", **fields} if layers else {"encoding": "base64", **fields}
    return arrays_of(live.client.post("/extract", json={"inputs": [tensor(row) for row in rows], **request}))


@pytest.mark.parametrize("binary_output", [True, False])
@pytest.mark.parametrize("binary_input", [True, False])
def test_layers(live: Live, client: Any, binary_input: bool, binary_output: bool) -> None:
    """Several layers in one request: names as they were sent, and the native route's bits, whatever the form."""
    found = client.infer(
        "digits",
        [make_input("image", PIXELS, binary=binary_input)],
        outputs=make_outputs(*LAYERS, binary=binary_output),
        request_id="again 7",
    )
    head = found.get_response()
    assert (head["model_name"], head["model_version"], head["id"]) == ("digits", "1", "again 7")
    assert same(read_outputs(found), native(live, *LAYERS))
    assert all(("data" in each) != binary_output for each in head["outputs"])


def test_embedding(live: Live, client: Any) -> None:
    """Without outputs, and by its name beside others, there is the model's embedding, one vector a row."""
    (expected,) = native(live).values()
    alone = client.infer("digits", [make_input("image", PIXELS)])
    assert same(read_outputs(alone), {"embedding": expected})
    beside = client.infer("digits", [make_input("image", PIXELS)], outputs=make_outputs("head", "embedding"))
    assert same(read_outputs(beside), {"embedding": expected, **native(live, "head")})


def test_fingerprints(live: Live) -> None:
    """The fingerprint is in a header and in parameters, that of the native route; each output has its own."""
    request = {"name": "image", "shape": [3, 3, 32, 32], "datatype": "FP32", "data": PIXELS.tolist()}
    found = live.client.post("/v2/models/digits/infer", **body(request, outputs=[{"name": "block1"}, {"name": "head"}]))
    same_layers = live.client.post(
        "/extract", json={"layers": ["block1", "head"], "inputs": [tensor(row) for row in PIXELS]}
    )
    head, receipts = found.json(), same_layers.json()["receipts"]
    assert head["parameters"] == {"fingerprint": same_layers.json()["fingerprint"]}
    assert found.headers["x-layertap-fingerprint"] == same_layers.headers["x-layertap-fingerprint"]
    assert {each["name"]: each["parameters"]["fingerprint"] for each in head["outputs"]} == {
        name: receipt["fingerprint"] for name, receipt in receipts.items()
    }


def test_parameters(live: Live, client: Any) -> None:
    """Parameters are the fields of the native route, for all outputs."""
    rows = [make_input("image", PIXELS)]
    found = client.infer("digits", rows, outputs=make_outputs("block?"), parameters={"pool": "gem", "normalize": True})
    assert same(read_outputs(found), native(live, "block?", pool="gem", normalize=True))
    change = [{"layer": "block2", "op": "zero", "channels": [1]}]
    asked = {"objective": "logit", "class": 3, "interventions": change}
    found = client.infer("digits", rows, outputs=make_outputs("block3:grad_output"), parameters=asked)
    objective = {"kind": "logit", "class": 3}
    assert same(read_outputs(found), native(live, "block3:grad_output", objective=objective, interventions=change))
    found = client.infer("digits", rows, outputs=make_outputs("block1"), parameters={"dtype": "int8"})
    expected = native(live, "block1", dtype="int8")
    assert same(read_outputs(found), expected)
    assert set(expected) == {"block1", "block1.scale"}


def test_open_parameters(live: Live, client: Any) -> None:
    """What clients and proxies of other servers add is passed over, and named, where it can't change the answer."""
    ask, outputs = [make_input("image", PIXELS)], make_outputs("head")
    own = {"request_trace": "00-1", "retry": True}
    found = client.infer("digits", ask, outputs=outputs, sequence_id=7, sequence_start=True, parameters=own)
    assert same(read_outputs(found), native(live, "head"))
    assert all(name in found.get_response()["parameters"]["warnings"] for name in (*own, "sequence_id"))
    rows = {"name": "image", "shape": [3, 3, 32, 32], "datatype": "FP32", "data": PIXELS.tolist()}
    output = {"name": "head", "parameters": {"content_type": "np", "classification": 0, "headers": {}}}
    of_mlserver = {"content_type": "np", "headers": {"Ce-Id": "1"}}
    sent = body(rows | {"parameters": of_mlserver}, outputs=[output], parameters=of_mlserver)
    reply = live.client.post("/v2/models/digits/infer", **sent)
    (head,) = reply.json()["outputs"]
    np.testing.assert_allclose(np.reshape(head["data"], head["shape"]), native(live, "head")["head"], atol=1e-6)
    assert reply.json()["parameters"]["warnings"] == "fields that mean nothing here were ignored: 'headers'"


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_pictures(live: Live, client: Any, shape: tuple[int, ...]) -> None:
    """Encoded pictures are decoded and preprocessed as the native route does it."""
    found = client.infer("digits", [make_bytes("encoded_image", PICTURES, shape)], outputs=make_outputs("head"))
    sent = {"layers": ["head"], "encoding": "base64", "inputs": [image(each) for each in PICTURES]}
    expected = arrays_of(live.client.post("/extract", json=sent))
    assert same(read_outputs(found), expected)
    coded = {
        "name": "encoded_image",
        "datatype": "BYTES",
        "shape": list(shape),
        "data": [text64(each) for each in PICTURES],
    }
    body = {"inputs": [coded], "outputs": [{"name": "head"}]}
    (output,) = live.client.post("/v2/models/digits/infer", json=body).json()["outputs"]
    np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), expected["head"], atol=1e-6)


def test_texts(typed: Live) -> None:
    """Texts behind the JSON and in it give what the native route gives."""
    expected = arrays_of(
        typed.client.post("/extract", json={"model": "bert", "inputs": [{"text": each} for each in TEXTS]})
    )
    with connect(typed) as client:
        for binary in (True, False):
            found = client.infer("bert", [make_bytes("text", TEXTS, (2, 1), binary=binary)])
            assert np.array_equal(found.as_numpy("embedding"), *expected.values())


def test_content_types(live: Live, typed: Live) -> None:
    """What MLServer's clients say of their data: base64 in JSON is decoded, all else is as without it."""
    of_clients = {"content_type": "np", "headers": {"x": "y"}}
    expected = native(live, "head").popitem()[1]
    rows = {"name": "image", "shape": list(PIXELS.shape), "datatype": "FP32", "data": PIXELS.tolist()}
    output = {"name": "head", "parameters": {"content_type": "np"}}
    sent = body(rows | {"parameters": of_clients}, outputs=[output], parameters={"content_type": "np"})
    (found,) = live.client.post("/v2/models/digits/infer", **sent).json()["outputs"]
    assert np.array_equal(np.reshape(np.array(found["data"], np.float32), found["shape"]), expected)
    for server, model, name, elements in (
        (live, "digits", "encoded_image", PICTURES),
        (typed, "bert", "text", [text.encode() for text in TEXTS]),
    ):
        entry = {"name": name, "datatype": "BYTES", "shape": [len(elements), 1]}
        coded = entry | {"data": list(map(text64, elements)), "parameters": {"content_type": "base64"}}
        with connect(server) as client:
            (expected,) = read_outputs(client.infer(model, [make_bytes(name, elements, (len(elements), 1))])).values()
        (found,) = server.client.post(f"/v2/models/{model}/infer", **body(coded)).json()["outputs"]
        np.testing.assert_allclose(np.reshape(found["data"], found["shape"]), expected, atol=1e-6)


def test_several_inputs(live: Live, client: Any) -> None:
    """A model of several inputs takes each by its name, in any order."""
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    kinds = np.array([1, 2])
    found = client.infer("two", [make_input("kind", kinds), make_input("pixels", values)], outputs=make_outputs("."))
    sent = [
        {"tensors": {"pixels": tensor(row)["tensor"], "kind": tensor(kind)["tensor"]}}
        for row, kind in zip(values, kinds, strict=True)
    ]
    expected = arrays_of(live.client.post("/extract", json={"model": "two", "layers": ["."], "inputs": sent}))
    assert same(read_outputs(found), expected)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("int8", np.array([[-128, 0, 127]], np.int8)),
        ("int32", np.array([[-(2**31), 0, 2**31 - 1]], np.int32)),
        ("int64", np.array([[-(2**53), 0, 2**62]], np.int64)),
        ("uint8", np.array([[0, 1, 255]], np.uint8)),
        ("bool", np.array([[True, False, True]])),
        ("float32", np.array([[1e-45, 0.1, -3.4e38]], np.float32)),
        ("float32", np.array([[0.1, -65504, 6e-8]], np.float16)),
        ("float64", np.array([[0.1, -1e38, 5e-324]], np.float64)),
    ],
)
def test_datatypes(typed: Live, model: str, values: Array) -> None:
    """Numbers of each datatype come to the model as they are."""
    for binary in (True, False):
        with connect(typed) as client:
            found = client.infer(model, [make_input("x", values, binary=binary)], outputs=make_outputs(".:input"))
        (reply,) = read_outputs(found).values()
        assert np.array_equal(reply, values.astype(reply.dtype))


def test_bfloat16(typed: Live) -> None:
    """BF16 comes as bytes, and only so."""
    values = np.array([[0.1, -3e38, 1e-40]], ml_dtypes.bfloat16)
    with connect(typed) as client:
        found = client.infer("float32", [make_input("x", values)], outputs=make_outputs(".:input"))
    (reply,) = read_outputs(found).values()
    assert np.array_equal(reply, values.astype(np.float32))
    refused = typed.client.post("/v2/models/float32/infer", **body(make_tensor((1, 3), [1, 2, 3], "BF16")))
    assert "BF16" in read_error(refused, 400)


@pytest.mark.parametrize(("packed", "asked"), [("gzip", None), ("deflate", "deflate"), ("gzip", "gzip")])
def test_compression(live: Live, client: Any, packed: str | None, asked: str | None) -> None:
    """Bodies packed by the client are taken, and replies come as they are, whatever it asks for."""
    for binary in (True, False):
        found = client.infer(
            "digits",
            [make_input("image", PIXELS, binary=binary)],
            outputs=make_outputs(*LAYERS, binary=binary),
            request_compression_algorithm=packed,
            response_compression_algorithm=asked,
        )
        assert same(read_outputs(found), native(live, *LAYERS))


def test_not_finite(typed: Live) -> None:
    """What is not finite is null in JSON, and comes through as bytes."""
    rows = np.array([[1, 0, -1]], np.float32)
    with connect(typed) as client:
        behind = client.infer("logarithm", [make_input("x", rows)], outputs=make_outputs("."))
        inside = client.infer("logarithm", [make_input("x", rows)], outputs=make_outputs(".", binary=False))
    assert np.array_equal(behind.as_numpy("."), [[0, -np.inf, np.nan]], equal_nan=True)
    assert inside.get_output(".")["data"] == [0, None, None]


def test_async_clients(live: Live, client: Any) -> None:
    """The client's own asynchronous call, and the client for asyncio."""
    rows, outputs = [make_input("image", PIXELS)], make_outputs("head")
    expected = native(live, "head")
    pending = [client.async_infer("digits", rows, outputs=outputs) for _ in range(3)]
    assert all(same(read_outputs(each.get_result()), expected) for each in pending)

    async def ask() -> Any:
        async with aio.InferenceServerClient(live.url.removeprefix("http://")) as asyncio_client:
            assert await asyncio_client.is_server_ready()
            with pytest.raises(InferenceServerException, match="block9"):
                await asyncio_client.infer("digits", rows, outputs=make_outputs("block9"))
            return await asyncio_client.infer("digits", rows, outputs=outputs)

    assert same(read_outputs(asyncio.run(ask())), expected)


# Metadata and health


def test_server(client: Any) -> None:
    """The server tells the extensions that it has, and health as ``/livez`` and ``/readyz`` do."""
    found = client.get_server_metadata()
    assert found["name"] == "layertap"
    assert found["version"]
    assert set(found["extensions"]) == {"binary_tensor_data", "parameters", "schedule_policy"}
    assert client.is_server_live()
    assert client.is_server_ready()


def test_not_ready(serve: Serve) -> None:
    """A server that is not ready says so here too, and is alive."""
    configuration = configured(net("never", "Never"))
    with serve(configuration, wait=False) as live, connect(live) as client:
        wait_until(lambda: live.client.get("/models/never").json()["state"] == "failed")
        assert not client.is_server_ready()
        assert client.is_server_live()
        read_error(live.client.get("/v2/health/ready"), 503)


def test_model(live: Live, client: Any) -> None:
    """A model's metadata are true of what it takes and gives."""
    found = client.get_model_metadata("digits")
    assert found == client.get_model_metadata("digits", "1")
    assert found == {
        "name": "digits",
        "versions": ["1"],
        "platform": "pytorch",
        "inputs": [
            {"name": "image", "datatype": "FP32", "shape": [-1, 3, 32, 32]},
            {"name": "encoded_image", "datatype": "BYTES", "shape": [-1, 1]},
        ],
        "outputs": [
            {"name": "embedding", "datatype": "FP32", "shape": [-1, 64]},
            {"name": ".", "datatype": "FP32", "shape": [-1, 10]},
        ],
    }


@pytest.mark.parametrize("model", ["digits", "structured", "encoder", "gated", "two", "centred"])
def test_outputs_are_as_told(live: Live, client: Any, model: str) -> None:
    """Inputs as metadata tell them are taken, and outputs asked for by their names come as it tells them."""
    told = client.get_model_metadata(model)
    rows = [
        make_input(each["name"], np.ones([3, *each["shape"][1:]], triton_to_np_dtype(each["datatype"])))
        for each in told["inputs"]
        if each["datatype"] != "BYTES"
    ]
    found = client.infer(model, rows, outputs=make_outputs(*(each["name"] for each in told["outputs"])))
    for output in told["outputs"]:
        reply = found.get_output(output["name"])
        assert reply["datatype"] == output["datatype"]
        assert reply["shape"] == [3 if size == -1 else size for size in output["shape"]]


def test_text_model(typed: Live) -> None:
    """A model of texts takes these, or tokens of any number."""
    with connect(typed) as client:
        found = client.get_model_metadata("bert")
    assert found["inputs"] == [
        {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "token_type_ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "text", "datatype": "BYTES", "shape": [-1, 1]},
    ]
    assert found["outputs"][0] == {"name": "embedding", "datatype": "FP32", "shape": [-1, 32]}


def test_model_ready(serve: Serve) -> None:
    """A model is ready once it is in memory; its metadata load it."""
    specs = net("gated", "Gated", load="lazy"), net("never", "Never", load="lazy", required=False)
    with serve(configured(*specs)) as lazy, connect(lazy) as client:
        assert not client.is_model_ready("gated")
        assert client.get_model_metadata("gated")["name"] == "gated"
        assert client.is_model_ready("gated")
        assert client.is_model_ready("gated", "1")
        assert not client.is_model_ready("gated", "2")
        with pytest.raises(InferenceServerException, match="could not be loaded"):
            client.get_model_metadata("never")
        reply = lazy.client.get("/v2/models/never/ready")
        assert "Never" in read_error(reply, 503)
