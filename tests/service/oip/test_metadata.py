"""Metadata, configuration, health, the repository and statistics, as ``tritonclient.http`` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import gated_module, hold_model, post_rows
from tests.service.oip.support import connect, make_bytes, make_input, make_outputs, read_error
from tests.service.support import configured, net, picture
from tests.transformers_nets import saved, tokenizer

ROWS = np.ones((3, 4), np.float32)


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
    assert set(found["extensions"]) == {
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "parameters",
        "schedule_policy",
        "statistics",
    }
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


def test_config(client: Any) -> None:
    """Triton's configuration: shapes without rows, inputs in place of which others may be sent."""
    found = client.get_model_config("digits")
    assert found["max_batch_size"] == 256
    assert found["input"] == [
        {"name": "image", "data_type": "TYPE_FP32", "dims": [3, 32, 32], "optional": True},
        {"name": "encoded_image", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    ]
    assert found["output"][0] == {"name": "embedding", "data_type": "TYPE_FP32", "dims": [64]}


def test_text_model(lazy: Live) -> None:
    """A model of texts takes these, or tokens of any number; metadata load it."""
    with connect(lazy) as client:
        found = client.get_model_metadata("bert")
        config = client.get_model_config("bert")
    assert found["inputs"] == [
        {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "text", "datatype": "BYTES", "shape": [-1, 1]},
    ]
    assert all(each["optional"] for each in config["input"])
    assert found["outputs"][0] == {"name": "embedding", "datatype": "FP32", "shape": [-1, 32]}


def test_repository(lazy: Live) -> None:
    """Models are loaded and unloaded; the index tells their states and why."""

    def read_index(**query: Any) -> dict[str, tuple[str, str]]:
        return {each["name"]: (each["state"], each["reason"]) for each in client.get_model_repository_index(**query)}

    with connect(lazy) as client:
        assert read_index()["gated"][0] == "UNAVAILABLE"
        assert "load" in read_index()["gated"][1]
        assert not client.is_model_ready("gated")
        assert client.load_model("gated") is None
        assert read_index()["gated"] == ("READY", "")
        assert client.is_model_ready("gated")
        assert client.is_model_ready("gated", "1")
        assert not client.is_model_ready("gated", "2")
        with pytest.raises(InferenceServerException, match="could not be loaded"):
            client.load_model("never")
        state, reason = read_index()["never"]
        assert state == "UNAVAILABLE"
        assert "Never" in reason
        client.unload_model("gated")
        assert read_index()["gated"][0] == "UNAVAILABLE"
        ready = lazy.client.post("/v2/repository/index", json={"ready": True}).json()
        assert "digits" in [each["name"] for each in ready]
        assert {each["state"] for each in ready} == {"READY"}
        with pytest.raises(InferenceServerException, match="configured by who runs the server") as caught:
            client.load_model("gated", config='{"max_batch_size": 2}')
        assert caught.value.status() == "400"


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"all": true}'])
def test_bad_index(live: Live, content: bytes) -> None:
    """An index of what makes no sense is refused."""
    read_error(live.client.post("/v2/repository/index", content=content), 400)


def test_statistics(serve: Serve) -> None:
    """Requests, rows, forwards and their times are counted, by whatever route they came."""
    with serve(configured(net("gated", "Gated"))) as live, connect(live) as client:
        (before,) = client.get_inference_statistics("gated")["model_stats"]
        assert before["inference_count"] == before["last_inference"] == before["execution_count"] == 0
        client.infer("gated", [make_input("x", ROWS)])
        assert post_rows(live).status_code == 200
        with pytest.raises(InferenceServerException):
            client.infer("gated", [make_input("x", ROWS[:, :3].copy())])
        with hold_model(live), pytest.raises(InferenceServerException):
            client.infer("gated", [make_input("x", ROWS)], timeout=1_000_000)
        (after,) = client.get_inference_statistics("gated", "1")["model_stats"]
        every = client.get_inference_statistics()["model_stats"]
    counts = {name: each["count"] for name, each in after["inference_stats"].items()}
    assert counts == {
        "success": 3,
        "fail": 2,
        "queue": 3,
        "compute_input": 3,
        "compute_infer": 3,
        "compute_output": 3,
        "cache_hit": 0,
        "cache_miss": 0,
    }
    assert after["inference_count"] == 5
    assert after["last_inference"] > 1_600_000_000_000
    times = {name: each["ns"] for name, each in after["inference_stats"].items()}
    assert times["fail"] >= 200_000_000  # the deadline that passed, which began before: when the request arrived
    assert 0 < times["compute_infer"] <= times["success"]
    assert sum(each["compute_infer"]["count"] for each in after["batch_stats"]) == after["execution_count"]
    assert {each["batch_size"] for each in after["batch_stats"]} <= {1, 2, 3}
    assert [each["name"] for each in every] == ["digits", "gated"]


def test_statistics_of_kept_answers(serve: Serve) -> None:
    """Answers that are kept count as Triton's own do: hits are successes, but nothing of what computes.

    Where an equal request is being computed, who waits for it is a hit.
    """
    with serve(configured(net("gated", "Gated")), cache_bytes=2**20) as live, connect(live) as client:
        rows = [make_input("x", ROWS)]
        for _ in range(3):
            client.infer("gated", rows)
        (kept,) = client.get_inference_statistics("gated")["model_stats"]
        module = gated_module(live)
        module.gate.clear()
        module.entered.clear()
        with ThreadPoolExecutor(3) as pool:
            try:
                pending = [pool.submit(post_rows, live)]
                assert module.entered.wait(60)
                pending.append(pool.submit(post_rows, live))
                pending.append(pool.submit(post_rows, live, timeout="0.3"))
                assert pending[2].result().status_code == 504
            finally:
                module.gate.set()
            assert [each.result().status_code for each in pending[:2]] == [200, 200]
        with pytest.raises(InferenceServerException):
            client.infer("gated", rows, outputs=make_outputs("nowhere"))
        (after,) = client.get_inference_statistics("gated")["model_stats"]

    def count(found: Any, *names: str) -> list[int]:
        return [found["inference_stats"][name]["count"] for name in names]

    computing = ("compute_input", "compute_infer", "compute_output")
    assert count(kept, "success", "queue", "cache_hit", "cache_miss", *computing) == [3, 3, 2, 1, 1, 1, 1]
    assert (kept["inference_count"], kept["execution_count"]) == (3, 1)
    times = {name: each["ns"] for name, each in kept["inference_stats"].items()}
    assert 0 < times["cache_hit"] < times["success"]
    assert times["cache_miss"] > 0
    assert count(after, "success", "queue", "cache_hit", "cache_miss", *computing) == [5, 5, 3, 2, 2, 2, 2]
    assert count(after, "fail") == [2]
    assert (after["inference_count"], after["execution_count"]) == (4, 2)
    assert after["last_inference"] >= kept["last_inference"] > 0


def test_statistics_without_kept_answers(live: Live, client: Any) -> None:
    """Where none are kept there are no hits, and no misses."""
    for _ in range(2):
        client.infer("gated", [make_input("x", ROWS)])
    (found,) = client.get_inference_statistics("gated")["model_stats"]
    assert found["inference_stats"]["cache_hit"] == found["inference_stats"]["cache_miss"] == {"count": 0, "ns": 0}


def test_not_in_the_document(live: Live) -> None:
    """The protocol's routes stay out of our own document: theirs describes them."""
    assert not [path for path in live.client.get("/openapi.json").json()["paths"] if path.startswith("/v2")]


def test_counted_by_template(live: Live, client: Any) -> None:
    """Figures are by the route, not by what callers write in it."""
    client.infer("digits", [make_bytes("encoded_image", [picture()], (1, 1))])
    assert 'route="/v2/models/{name}/infer"' in live.client.get("/metrics").text
