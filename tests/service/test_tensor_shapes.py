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
from tests.service.support import Array, Json, arrays_of, configured, net, npy, problem, raw, tensor

SIDE, SMALL, LARGE = 64, 16, 80
MAX_REPLY_BYTES, MAX_QUEUE_BYTES = 100_000, 3_000_000  # a row of `conv` of the configured side has 131072
SPECS = (
    net_spec("Chain", inputs=(InputSpec("image", (3, SIDE, SIDE)),)),
    net("patches", "Patches", InputSpec("x", (3, SMALL, SMALL))),
    net("branches", "Branches", InputSpec("x", (3, SMALL, SMALL))),
)
FORMS = ("tensor", "npy", "npy of a batch", "safetensors")


@pytest.fixture(scope="module")
def reshaping(serve: Serve) -> Iterator[Live]:
    """A server of models that take tensors of any height and width; replies hold no layer of the configured shape."""
    with serve(configured(*SPECS), max_reply_bytes=MAX_REPLY_BYTES, max_queue_bytes=MAX_QUEUE_BYTES) as live:
        yield live


def row(height: int, width: int) -> Array:
    """One row."""
    return np.random.default_rng(height).standard_normal((3, height, width)).astype(np.float32)


def post(live: Live, model: str, rows: list[Array], layers: list[Any], **fields: Any) -> httpx.Response:
    """The reply to a request for tensors."""
    body = {"model": model, "layers": layers, "inputs": [tensor(each) for each in rows], **fields}
    return live.client.post("/extract?format=npz", json=body)


def request(form: str, array: Array) -> Json:
    """A request for a layer whose output is as large as its input, with one tensor, in one of the forms."""
    query = {"model": "Chain", "layers": "conv", "format": "npz"}
    body = {"model": "Chain", "layers": ["conv"], "inputs": [tensor(array)]}
    return {
        "npy": raw(npy(array), "application/x-npy", **query),
        "npy of a batch": raw(npy(array[None]), "application/x-npy", **query),
        "safetensors": raw(safetensors.numpy.save({"image": array}), "application/x-safetensors", **query),
        "tensor": {"json": body, "params": {"format": "npz"}},
    }[form]


def loaded(live: Live, name: str) -> LoadedModel:
    """A model of the server."""
    model = live.engine.manager.registry.get_entry(name).model
    assert model is not None
    return model


def is_surveyed(live: Live, side: int) -> bool:
    """Whether the chain has run forwards of noise of that shape lately."""
    return loaded(live, "Chain").catalogs.get_catalog(((3, side, side),)) is not None


def head_of(live: Live, values: torch.Tensor) -> Array:
    """What the rest of the chain makes of what its convolution gave."""
    module = loaded(live, "Chain").module
    with torch.no_grad():
        found: Array = module.head((values.relu() - 0.3).relu().mean((2, 3))).numpy()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_limits(reshaping: Live, form: str) -> None:
    """Small rows of a model for large ones are answered, also when their shape is known; larger ones are refused.

    That is before they are decoded, and before anything runs with a shape that is new.
    """
    small = row(SMALL + FORMS.index(form), SMALL)  # each of its own, so that none was seen before
    expected = loaded(reshaping, "Chain").module.conv(torch.from_numpy(small)[None]).detach().numpy()
    for _ in range(2):
        found = arrays_of(reshaping.client.post("/extract", **request(form, small)))
        np.testing.assert_allclose(found["conv"], expected, rtol=1e-4, atol=1e-5)
    for side in (SIDE, 2 * SIDE):
        reply = reshaping.client.post("/extract", **request(form, row(side, side)))
        assert f"limit is {MAX_REPLY_BYTES}" in problem(reply, 413)["detail"]
        assert "decode" not in reply.headers["server-timing"]
    assert not is_surveyed(reshaping, 2 * SIDE)


def test_replaced_tensor(reshaping: Live) -> None:
    """A tensor in place of a layer's has the shape that the layer has in this request, known before or not."""
    values = np.random.default_rng(1).standard_normal((8, SMALL, SMALL)).astype(np.float32)
    change = {"layer": "conv", "op": "replace", "tensor": tensor(values)["tensor"]}
    reply = post(reshaping, "Chain", [row(SMALL, SMALL)], ["head"], interventions=[change])
    np.testing.assert_allclose(arrays_of(reply)["head"], head_of(reshaping, torch.from_numpy(values)[None]), 1e-4)
    for shape in ((8, SIDE, SIDE), (8, SMALL)):  # right for the configured shape, or for none
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
    reply = post(reshaping, "Chain", [x], ["head"], interventions=[change])
    assert f"{LARGE} by {LARGE}" in problem(reply, 422)["detail"]


@pytest.mark.parametrize(
    ("width", "fields"),
    [
        (17, {"layers": ["wide#0", "wide#1"]}),
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


def test_unknown_layer_costs_no_forward(reshaping: Live) -> None:
    """What is wrong whatever the shape is refused before anything runs with a new one; so is a shape that is a lie."""
    claimed = row(SMALL + 1, SMALL + 1)
    for layer in ("nothing", {"layer": "head", "tokens": [0]}):
        problem(post(reshaping, "Chain", [claimed], [layer]), 422)
    lying = npy(claimed)[: -claimed.nbytes] + row(SMALL, SMALL + 1).tobytes()
    problem(reshaping.client.post("/extract", **raw(lying, "application/x-npy", model="Chain", layers="head")), 422)
    assert not is_surveyed(reshaping, SMALL + 1)


def test_every_row_counts_in_memory(reshaping: Live) -> None:
    """A small row beside large ones hides none of their bytes: they are refused before they are decoded."""
    large = np.zeros((3, 4 * LARGE, 4 * LARGE), np.float16)  # twice the bytes once it is decoded
    assert 2 * 2 * large.nbytes < MAX_QUEUE_BYTES < 2 * 3 * large.nbytes
    for on_error in ("fail", "skip"):
        reply = post(reshaping, "Chain", [row(SMALL, SMALL), large, large, large], ["head"], on_error=on_error)
        assert "the queue holds" in problem(reply, 413)["detail"]
        assert "decode" not in reply.headers["server-timing"]


@pytest.mark.parametrize("method", ["attention_rollout", "grad_cam"])
def test_explanations_of_a_grid_that_is_no_square(reshaping: Live, method: str) -> None:
    """Patches of a picture that is not square stand as the convolution left them that they come of."""
    for height in (2 * SMALL, 2 * SMALL, SMALL):
        body = {"model": "patches", "method": method, "inputs": [tensor(row(height, SMALL))]}
        found = arrays_of(reshaping.client.post("/explain?format=npz", json=body))
        assert found[method].shape == (1, height // 4, SMALL // 4)
