"""Metadata and health, as ``tritonclient.http`` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.oip.support import connect, make_input, make_outputs, read_error
from tests.service.support import configured, net
from tests.transformers_nets import saved, tokenizer


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with connect(live) as client:
        yield client


@pytest.fixture(scope="module")
def lazy(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of models that are loaded when they are wanted."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    saved("bert", folder)
    tokenizer(folder)
    specs = [
        net("gated", "Gated", load="lazy"),
        net("never", "Never", load="lazy", required=False),
        ModelSpec("bert", f"transformers:{folder}", device="cpu", load="lazy"),
    ]
    with serve(configured(*specs), max_inputs=8) as live:
        yield live


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
        httpx.get(f"{live.url}/models/never/layers", timeout=60)  # which waits until it has failed
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


def test_text_model(lazy: Live) -> None:
    """A model of texts takes these, or tokens of any number; metadata load it."""
    with connect(lazy) as client:
        found = client.get_model_metadata("bert")
    assert found["inputs"] == [
        {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "text", "datatype": "BYTES", "shape": [-1, 1]},
    ]
    assert found["outputs"][0] == {"name": "embedding", "datatype": "FP32", "shape": [-1, 32]}


def test_model_ready(lazy: Live) -> None:
    """A model is ready once it is in memory; its metadata load it."""
    with connect(lazy) as client:
        assert not client.is_model_ready("gated")
        assert client.get_model_metadata("gated")["name"] == "gated"
        assert client.is_model_ready("gated")
        assert client.is_model_ready("gated", "1")
        assert not client.is_model_ready("gated", "2")
        with pytest.raises(InferenceServerException, match="could not be loaded"):
            client.get_model_metadata("never")
        reply = lazy.client.get("/v2/models/never/ready")
        assert "Never" in read_error(reply, 503)
