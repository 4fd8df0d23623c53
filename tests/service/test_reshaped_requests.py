"""Whatever a request asks for of tensors is judged by their own shape, and before anything runs where that can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import torch

from layertap.models.loaded_model import LoadedModel
from layertap.models.spec import InputSpec
from tests.conftest import net_spec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.support import Array, Json, arrays_of, configured, net, npy, problem, raw, tensor

SIDE, SMALL, LARGE = 64, 16, 80
MAX_REPLY_BYTES, MAX_QUEUE_ROWS, MAX_QUEUE_BYTES = 100_000, 8, 3_000_000
SPECS = (
    net_spec("Chain", inputs=(InputSpec("image", (3, SIDE, SIDE)),)),
    net("patches", "Patches", InputSpec("x", (3, SMALL, SMALL))),
    net("branches", "Branches", InputSpec("x", (3, SMALL, SMALL))),
    net("guided", "Guided", InputSpec("image", (3, SMALL, SMALL)), InputSpec("hint", (1, 2, 2))),
)


@pytest.fixture(scope="module")
def reshaping(serve: Serve) -> Iterator[Live]:
    """A server of models that take tensors of any height and width."""
    limits = {
        "max_reply_bytes": MAX_REPLY_BYTES,
        "max_queue_rows": MAX_QUEUE_ROWS,
        "max_queue_bytes": MAX_QUEUE_BYTES,
    }
    with serve(configured(*SPECS), **limits) as live:
        yield live


def row(height: int, width: int, channels: int = 3) -> Array:
    """One row."""
    return np.random.default_rng(height).standard_normal((channels, height, width)).astype(np.float32)


def post(live: Live, model: str, rows: list[Array], layers: list[Any], **fields: Any) -> httpx.Response:
    """The reply to a request for tensors."""
    body = {"model": model, "layers": layers, "inputs": [tensor(each) for each in rows], **fields}
    return live.client.post("/extract?format=npz", json=body)


def loaded(live: Live, name: str) -> LoadedModel:
    """A model of the server."""
    model = live.engine.manager.registry.get_entry(name).model
    assert model is not None
    return model


def is_surveyed(live: Live, name: str, *shapes: tuple[int, ...]) -> bool:
    """Whether forwards of noise of that shape were run lately."""
    return loaded(live, name).catalogs.get_catalog(shapes) is not None


def head_of(live: Live, values: torch.Tensor) -> Array:
    """What the rest of the chain makes of what its convolution gave."""
    module = loaded(live, "Chain").module
    with torch.no_grad():
        found: Array = module.head((values.relu() - 0.3).relu().mean((2, 3))).numpy()
    return found


def test_replaced_tensor(reshaping: Live) -> None:
    """A tensor in place of a layer's has the shape that the layer has in this request, known before or not."""
    values = np.random.default_rng(1).standard_normal((8, SMALL, SMALL)).astype(np.float32)
    change = {"layer": "conv", "op": "replace", "tensor": tensor(values)["tensor"]}
    for _ in range(2):
        reply = post(reshaping, "Chain", [row(SMALL, SMALL)], ["head"], interventions=[change])
        np.testing.assert_allclose(arrays_of(reply)["head"], head_of(reshaping, torch.from_numpy(values)[None]), 1e-4)
    for _ in range(2):  # right for the configured shape, or for none
        for shape in ((8, SIDE, SIDE), (8, SMALL)):
            change["tensor"] = tensor(np.zeros(shape, np.float32))["tensor"]
            reply = post(reshaping, "Chain", [row(SMALL, SMALL)], ["head"], interventions=[change])
            assert f"[8, {SMALL}, {SMALL}]" in problem(reply, 422)["errors"][0]["hint"]


def test_region(reshaping: Live) -> None:
    """A region may lie where only this request has pixels."""
    x = row(LARGE, LARGE)
    values = loaded(reshaping, "Chain").module.conv(torch.from_numpy(x)[None]).detach()
    values[:, :, SIDE:, SIDE:] = 0
    change = {"layer": "conv", "op": "zero", "region": [SIDE, SIDE, LARGE, LARGE]}
    for _ in range(2):
        reply = post(reshaping, "Chain", [x], ["head"], interventions=[change])
        np.testing.assert_allclose(arrays_of(reply)["head"], head_of(reshaping, values), 1e-4)
    change["region"] = [SIDE, SIDE, LARGE + 1, LARGE]
    for _ in range(2):
        reply = post(reshaping, "Chain", [x], ["head"], interventions=[change])
        assert f"{LARGE} by {LARGE}" in problem(reply, 422)["detail"]


@pytest.mark.parametrize(
    ("width", "fields"),
    [
        (17, {"layers": ["wide"]}),
        (18, {"layers": ["wide#0", "wide#1"]}),
        (19, {"layers": ["."], "interventions": [{"layer": "wide", "op": "zero"}]}),
        (20, {"layers": ["narrow:grad_output"], "objective": {"kind": "layer", "layer": "wide"}}),
    ],
    ids=str,
)
def test_layer_that_runs_for_this_shape_only(reshaping: Live, width: int, fields: Json) -> None:
    """It may be named whether the shape is known already or not; not for a shape for which it does not run."""
    for _ in range(2):
        reply = post(reshaping, "branches", [row(SMALL, width)], **fields)
        assert reply.status_code == 200, reply.text
    assert problem(post(reshaping, "branches", [row(width, SMALL)], **fields), 422)["errors"]


def test_tokens(reshaping: Live) -> None:
    """Tokens may be named that only this request has."""
    x, last = row(2 * SMALL, 2 * SMALL), 4 * (SMALL // 4) ** 2 - 1
    for _ in range(2):
        found = arrays_of(post(reshaping, "patches", [x], ["norm", {"layer": "norm", "tokens": [last], "as": "last"}]))
        np.testing.assert_array_equal(found["last"], found["norm"][:, last:])
        reply = post(reshaping, "patches", [x], [{"layer": "norm", "tokens": [last + 1]}])
        assert f"between {-last - 1} and {last}" in problem(reply, 422)["detail"]


def test_known_shape_is_judged_before_decoding(reshaping: Live) -> None:
    """What a shape that is known does not have is refused before anything is decoded."""
    x = row(SMALL + 4, SMALL)
    assert post(reshaping, "Chain", [x], ["head"]).status_code == 200
    change = {"layer": "conv", "op": "zero", "region": [0, 0, SIDE, SIDE]}
    reply = post(reshaping, "Chain", [x], ["head"], interventions=[change])
    assert f"{SMALL + 4} by {SMALL}" in problem(reply, 422)["detail"]
    assert "decode" not in reply.headers["server-timing"]


def test_mixed_shapes(reshaping: Live) -> None:
    """Where the rows of a request have several shapes those that are left out have no say in what the others may do."""
    nothing = np.full((3, SMALL + 8, SMALL + 8), np.nan, np.float32)
    assert post(reshaping, "Chain", [np.nan_to_num(nothing)], ["head"]).status_code == 200  # a shape that is known
    change = {"layer": "conv", "op": "zero", "region": [0, 0, LARGE, LARGE]}
    reply = post(reshaping, "Chain", [nothing, row(LARGE, LARGE)], ["head"], interventions=[change], on_error="skip")
    expected = head_of(reshaping, torch.zeros(1, 8, LARGE, LARGE))
    np.testing.assert_allclose(arrays_of(reply)["head"], expected, 1e-4)
    reply = post(reshaping, "Chain", [row(LARGE, LARGE), row(SMALL, SMALL)], ["head"], interventions=[change])
    assert problem(reply, 422)["errors"][0]["input"] == 1  # every other has


def test_unknown_layer_costs_no_forward(reshaping: Live) -> None:
    """What is wrong whatever the shape is refused before anything runs with a new one."""
    side = SMALL + 1
    for wrong in ({"layers": ["nothing"]}, {"layers": [{"layer": "head", "tokens": [0]}]}):
        problem(post(reshaping, "Chain", [row(side, side)], wrong["layers"]), 422)
    change = {"layer": "conv", "op": "zero", "region": [0, 0, 0, 0]}
    problem(post(reshaping, "Chain", [row(side, side)], ["head"], interventions=[change | {"layer": "head"}]), 422)
    assert not is_surveyed(reshaping, "Chain", (3, side, side))


def test_full_queue_costs_no_forward(reshaping: Live) -> None:
    """Rows that the queue can't hold are refused before they are decoded, and before anything runs with their shape."""
    batch = np.zeros((MAX_QUEUE_ROWS + 1, 3, SMALL + 2, SMALL + 2), np.float32)
    reply = reshaping.client.post("/extract", **raw(npy(batch), "application/x-npy", model="Chain", layers="head"))
    assert str(MAX_QUEUE_ROWS) in problem(reply, 413)["detail"]
    assert "decode" not in reply.headers["server-timing"]
    assert not is_surveyed(reshaping, "Chain", (3, SMALL + 2, SMALL + 2))


def test_every_row_counts_in_memory(reshaping: Live) -> None:
    """A small row beside large ones hides none of their bytes: they are refused before they are decoded."""
    large = np.zeros((3, 4 * LARGE, 4 * LARGE), np.float16)  # twice the bytes once it is decoded
    assert 2 * 2 * large.nbytes < MAX_QUEUE_BYTES < 2 * 3 * large.nbytes
    inputs = [tensor(each) for each in (row(SMALL, SMALL), large, large, large)]
    body: Json = {"model": "Chain", "layers": ["head"], "inputs": inputs}
    assert len(str(body)) < MAX_QUEUE_BYTES
    for on_error in ("fail", "skip"):
        reply = reshaping.client.post("/extract", json=body | {"on_error": on_error})
        assert "the queue holds" in problem(reply, 413)["detail"]
        assert "decode" not in reply.headers["server-timing"]


@pytest.mark.parametrize("layer", ["conv", "guide"])
def test_one_input_grows(reshaping: Live, layer: str) -> None:
    """Of a model of two inputs no more is taken to grow than what grew."""
    x = {"image": row(SMALL, SMALL), "hint": row(40, 40, 1)}
    item = {"tensors": {name: tensor(value)["tensor"] for name, value in x.items()}}
    for _ in range(2):
        body = {"model": "guided", "layers": [layer], "inputs": [item]}
        found = arrays_of(reshaping.client.post("/extract?format=npz", json=body))
        assert found[layer].shape == {"conv": (1, 8, SMALL, SMALL), "guide": (1, 8, 40, 40)}[layer]


@pytest.mark.parametrize("method", ["attention_rollout", "gradient_rollout", "relevance", "grad_cam"])
def test_explanations_of_a_grid_that_is_no_square(reshaping: Live, method: str) -> None:
    """Patches of a picture that is not square stand as the convolution left them that they come of."""
    body = {"model": "patches", "method": method, "inputs": [tensor(row(2 * SMALL, SMALL))]}
    for _ in range(2):
        found = arrays_of(reshaping.client.post("/explain?format=npz", json=body))
        assert found[method].shape == (1, SMALL // 2, SMALL // 4)
    body["inputs"] = [tensor(row(2 * SMALL, 2 * SMALL))]
    found = arrays_of(reshaping.client.post("/explain?format=npz", json=body))
    assert found[method].shape == (1, SMALL // 2, SMALL // 2)


def test_attention_of_a_grid_that_is_no_square(reshaping: Live) -> None:
    """Each patch has its own place: what a rollout of one layer says of it is made of that layer's attention."""
    body: Json = {"model": "patches", "inputs": [tensor(row(2 * SMALL, SMALL))]}
    asked = body | {"layers": ["attention:attention"], "encoding": "base64"}
    reply = reshaping.client.post("/extract", json=asked)
    (weights,) = arrays_of(reply).values()
    assert next(iter(reply.json()["receipts"].values()))["grid_size"] == [SMALL // 2, SMALL // 4]
    mixed = weights[0].mean(0) + np.eye(weights.shape[-1])
    patches = (mixed / mixed.sum(-1, keepdims=True)).mean(0)
    rolled = reshaping.client.post("/explain?format=npz", json=body | {"method": "attention_rollout"})
    found = arrays_of(rolled)["attention_rollout"]
    np.testing.assert_allclose(found[0], patches.reshape(SMALL // 2, SMALL // 4), rtol=1e-4)


def test_claimed_shape(reshaping: Live) -> None:
    """A header whose shape the numbers do not have is refused as ever, and nothing is made ready for it."""
    claimed, sent = row(SMALL + 3, SMALL + 3), row(SMALL + 2, SMALL + 3)
    lying = npy(claimed)[: -claimed.nbytes] + sent.tobytes()
    inline = {**tensor(sent)["tensor"], "shape": list(claimed.shape)}
    body: Json = {"model": "Chain", "layers": ["head"], "inputs": [{"tensor": inline}]}
    query = {"model": "Chain", "layers": "head"}
    archive = safetensors.numpy.save({"image": sent})
    header = archive.replace(b"[3,18,19]", b"[3,19,19]")
    assert header != archive
    for request in (
        raw(lying, "application/x-npy", **query),
        raw(header, "application/x-safetensors", **query),
        {"json": body},
    ):
        problem(reshaping.client.post("/extract", **request), 422)
    assert not is_surveyed(reshaping, "Chain", (3, SMALL + 3, SMALL + 3))
    assert not is_surveyed(reshaping, "Chain", (3, SMALL + 2, SMALL + 3))
    wait_until(lambda: reshaping.engine.take_snapshot().queue_bytes == 0)
