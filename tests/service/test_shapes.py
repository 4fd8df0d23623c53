"""Tensors and pictures of other shapes than a model's own, alone or of several shapes in one request.

Each gets what it would alone; what is asked for is judged by its own shapes, before anything runs where it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as tvf

from layertap.models.spec import InputSpec, PreprocessSpec
from tests.conftest import net_spec
from tests.oracle import record
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.support import (
    Array,
    Json,
    arrays_of,
    copy_module,
    encode,
    image,
    net,
    npy,
    problem,
    raw,
    safetensors_of,
    same,
    tensor,
)

SIDES = ((16, 16), (12, 20), (16, 16), (9, 7), (12, 20))  # of inputs of several shapes
MEANS, STDS = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
SIDE, SMALL = 64, 16
MAX_REPLY_BYTES, MAX_QUEUE_BYTES = 100_000, 3_000_000  # a row of `conv` of the configured side has 131072
CHAIN = net_spec("Chain", inputs=(InputSpec("image", (3, SIDE, SIDE)),))
SMALL_CHAIN = replace(CHAIN, name="small", inputs=(InputSpec("image", (3, SMALL, SMALL)),))
SPECS = (
    CHAIN,
    SMALL_CHAIN,
    replace(SMALL_CHAIN, name="pictures", preprocess=PreprocessSpec(resize=12, crop=None, mean=MEANS, std=STDS)),
    net("cnn", "Cnn", InputSpec("x", (3, 32, 32))),
    net_spec("vit", load="lazy"),
    net("meeting", "ChannelMeans", InputSpec("x", (3, 6, 6))),
    net("patches", "Patches", InputSpec("x", (3, SMALL, SMALL))),
    net("branches", "Branches", InputSpec("x", (3, SMALL, SMALL))),
)
FORMS = ("tensor", "npy", "npy of a batch", "safetensors")


def row(height: int, width: int, seed: int = 0) -> Array:
    """One row."""
    return np.random.default_rng(seed).standard_normal((3, height, width)).astype(np.float32)


def rows(sides: Sequence[tuple[int, int]]) -> list[Array]:
    """A tensor of each height and width, all of other numbers."""
    return [row(*side, seed=place) for place, side in enumerate(sides)]


ROWS = rows(SIDES)


# Replies hold no layer of the chain's own shape.
LIMITS = {"max_reply_bytes": MAX_REPLY_BYTES, "max_queue_bytes": MAX_QUEUE_BYTES, "max_loaded_models": 20}
local = server_of(*SPECS, **LIMITS)


@pytest.fixture(scope="module")
def module(local: Live) -> Any:
    """The chain offline."""
    return copy_module(local, "Chain")


def post(live: Live, inputs: Sequence[Array | Json], *layers: Any, **fields: Any) -> httpx.Response:
    query = {"format": fields.pop("format", "json")}
    sent = [tensor(each) if isinstance(each, np.ndarray) else each for each in inputs]
    body = {"model": "Chain", "layers": list(layers), "inputs": sent, "encoding": "base64", **fields}
    return live.client.post("/extract", json=body, params=query)


def close(actual: Array, expected: Array | Tensor, rtol: float = 1e-4) -> None:
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=rtol, atol=1e-5)


def offline(module: Any, row: Array, layer: str, call: int = 0, site: str = "output") -> Array:
    """What a hook sees of one row alone."""
    return record(module, torch.from_numpy(row)[None])[layer, call, (), site].numpy()


@pytest.mark.parametrize("format_", ["json", "safetensors"])
def test_several_shapes(local: Live, module: Any, format_: str) -> None:
    """What has another shape for another input has an entry for each, named by the input's place; else one array."""
    unit = {"layer": "conv", "pool": "mean", "normalize": True, "as": "unit"}
    reply = post(local, ROWS, "conv", "head", "relu#1:input", unit, {"layer": "relu#0", "pool": "max"}, format=format_)
    arrays = arrays_of(reply)
    names = [f"{key}.input{place}" for key in ("conv", "relu#1:input") for place in range(5)]
    assert arrays.keys() == {*names, "head", "unit", "relu#0"}
    means = np.stack([offline(module, row, "conv")[0].mean((1, 2)) for row in ROWS])
    close(arrays["unit"], means / np.linalg.norm(means, axis=1, keepdims=True))
    close(arrays["relu#0"], np.stack([offline(module, row, "relu")[0].max((1, 2)) for row in ROWS]))
    close(arrays["head"], np.concatenate([offline(module, row, "head") for row in ROWS]))
    for place, row in enumerate(ROWS):
        close(arrays[f"conv.input{place}"], offline(module, row, "conv"))
        close(arrays[f"relu#1:input.input{place}"], offline(module, row, "relu", 1, "input"))
    if format_ == "json":
        assert list(arrays) == [*names[:5], "head", *names[5:], "unit", "relu#0"]
        shapes = [entry["shape"] for name, entry in reply.json()["features"].items() if name.startswith("conv")]
        assert shapes == [[1, 8, *side] for side in SIDES]


def test_receipts(local: Live) -> None:
    """Receipts say of each input what they would alone; one of several says where these differ."""
    layers = ("conv", {"layer": "conv", "pool": "mean", "as": "v"})
    found = post(local, ROWS, *layers, model="small").json()
    alone = [post(local, [row], *layers, model="small").json() for row in ROWS]
    joined, fingerprints = found["receipts"]["v"], [each["receipts"]["v"]["fingerprint"] for each in alone]
    assert joined["captured"] == [1, 8, None, None]
    assert joined["fingerprints"] == fingerprints
    assert joined["fingerprint"] not in fingerprints
    assert joined["preprocessed"] == "mixed"
    for place, each in enumerate(alone):
        assert found["receipts"][f"conv.input{place}"] == each["receipts"]["conv"]
    assert found["rows"] == len(ROWS)
    assert len(set(fingerprints)) == 3


def test_gradients(local: Live) -> None:
    """Each input's gradient is that of its own objective, by plain autograd; classes go with the rows."""
    inputs, cnn = rows([(32, 40), (40, 32), (32, 40), (48, 48)]), copy_module(local, "cnn")
    layers = [".:grad_input", "head:grad_input"]
    reply = post(local, inputs, *layers, model="cnn", objective={"kind": "logit", "class": "top"})
    arrays, classes = arrays_of(reply), []
    for place, row in enumerate(inputs):
        x = torch.from_numpy(row)[None].requires_grad_()
        scores = cnn(x)
        (gradient,) = torch.autograd.grad(scores.max(), x)
        classes.append(int(scores.argmax()))
        close(arrays[f".:grad_input.input{place}"], gradient, 1e-3)
        assert reply.json()["receipts"][f".:grad_input.input{place}"]["classes"] == classes[-1:]
        close(arrays["head:grad_input"][place], cnn.head.weight[classes[-1]].detach())
    assert reply.json()["receipts"]["head:grad_input"]["classes"] == classes


def test_shapes_that_the_model_refuses(local: Live) -> None:
    """They fail the request, which names the input; or are left out, where that is asked for."""
    good = rows([(32, 32)] * 3)
    bad = rows([(40, 32), (48, 48)])
    inputs = [good[0], bad[0], good[1], bad[1], bad[0], good[2]]
    errors = problem(post(local, inputs, "heads", model="vit"), 422)["errors"]
    assert [error["input"] for error in errors] == [1]
    skipped = post(local, inputs, "heads", model="vit", on_error="skip", isolated=True)
    assert skipped.headers["x-layertap-skipped"] == "1,3,4"
    plain = post(local, good, "heads", model="vit", isolated=True)
    assert same(arrays_of(skipped), arrays_of(plain))
    assert skipped.json()["receipts"] == plain.json()["receipts"]
    errors = problem(post(local, bad, "heads", model="vit", on_error="skip"), 422)["errors"]
    assert [error["input"] for error in errors] == [0, 1]


def test_rows_that_affect_each_other(local: Live) -> None:
    """Each runs alone; they can be no batch where their shapes differ."""
    inputs, offline_module = rows([(6, 6), (8, 6), (6, 6)]), copy_module(local, "meeting")
    reply = post(local, inputs, {"layer": ".", "as": "means"}, model="meeting")
    arrays = arrays_of(reply)
    for place, row in enumerate(inputs):
        close(arrays[f"means.input{place}"], offline_module(torch.from_numpy(row)[None]).detach())
        assert reply.json()["receipts"][f"means.input{place}"]["rows_per_forward"] == 1
    found = problem(post(local, inputs, ".", model="meeting", isolated=True), 422)
    assert "several shapes" in found["detail"]
    found = problem(post(local, inputs[:1], ".:grad_input", model="meeting", objective={"kind": "sum"}), 422)
    assert "of all rows of a forward together" in found["detail"]


def test_pictures(local: Live, module: Any) -> None:
    """Pictures that preprocessing leaves with several shapes, and tensors beside them."""
    sizes = [(24, 24), (40, 24), (24, 36), (80, 48)]
    pixels = [
        np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8)
        for seed, (wide, high) in enumerate(sizes)
    ]
    inputs = [image(encode(each)) for each in pixels]
    reply = post(local, [*inputs, ROWS[1]], "conv", "head", model="pictures")
    arrays = arrays_of(reply)
    for place, each in enumerate(pixels):
        resized = tvf.resize(Image.fromarray(each), 12)
        row = tvf.normalize(tvf.to_tensor(resized), MEANS, STDS).numpy()
        close(arrays[f"conv.input{place}"], offline(module, row, "conv"), 1e-3)
        close(arrays["head"][place], offline(module, row, "head")[0], 1e-3)
    close(arrays["conv.input4"], offline(module, ROWS[1], "conv"))
    assert reply.json()["receipts"]["head"]["preprocessed"] == "mixed"


def test_limit_of_a_reply(local: Live) -> None:
    """It is of the whole request, and is kept before any forward."""
    sides = [(32, 32), (32, 32), (40, 20)]
    assert len(arrays_of(post(local, rows(sides), "conv", format="npz"))) == 3
    reply = post(local, rows([*sides, (20, 24)]), "conv", format="npz")
    assert f"the limit is {MAX_REPLY_BYTES}" in problem(reply, 413)["detail"]
    assert "forward" not in reply.headers["server-timing"]


def request(form: str, array: Array) -> Json:
    """A request for a layer whose output is as large as its input, with one tensor, in one of the forms."""
    query = {"model": "Chain", "layers": "conv", "format": "npz"}
    body = {"model": "Chain", "layers": ["conv"], "inputs": [tensor(array)]}
    return {
        "npy": raw(npy(array), "application/x-npy", **query),
        "npy of a batch": raw(npy(array[None]), "application/x-npy", **query),
        "safetensors": raw(safetensors_of(image=array), "application/x-safetensors", **query),
        "tensor": {"json": body, "params": {"format": "npz"}},
    }[form]


def is_surveyed(live: Live, side: int) -> bool:
    """Whether the chain has run forwards of noise of that shape lately."""
    model = live.engine.manager.registry.get_entry("Chain").model
    assert model is not None
    return model.catalogs.get_catalog(((3, side, side),)) is not None


def head_of(module: Any, values: Tensor) -> Array:
    """What the rest of the chain makes of what its convolution gave."""
    return module.head((values.relu() - 0.3).relu().mean((2, 3))).detach().numpy()


@pytest.mark.parametrize("form", FORMS)
def test_limits(local: Live, module: Any, form: str) -> None:
    """Small rows of a model for large ones are answered, also when their shape is known; larger ones are refused.

    That is before they are decoded, and before anything runs with a shape that is new.
    """
    small = row(SMALL + FORMS.index(form), SMALL)  # each of its own, so that none was seen before
    expected = module.conv(torch.from_numpy(small)[None]).detach().numpy()
    for _ in range(2):
        found = arrays_of(local.client.post("/extract", **request(form, small)))
        np.testing.assert_allclose(found["conv"], expected, rtol=1e-4, atol=1e-5)
    for side in (SIDE, 2 * SIDE):
        reply = local.client.post("/extract", **request(form, row(side, side)))
        assert f"limit is {MAX_REPLY_BYTES}" in problem(reply, 413)["detail"]
        assert "decode" not in reply.headers["server-timing"]
    assert not is_surveyed(local, 2 * SIDE)


def test_replaced_tensor(local: Live, module: Any) -> None:
    """A tensor in place of a layer's has the shape that the layer has in this request, known before or not."""
    values = np.random.default_rng(1).standard_normal((8, SMALL, SMALL)).astype(np.float32)
    change = {"layer": "conv", "op": "replace", "tensor": tensor(values)["tensor"]}
    reply = post(local, [row(SMALL, SMALL)], "head", interventions=[change])
    np.testing.assert_allclose(arrays_of(reply)["head"], head_of(module, torch.from_numpy(values)[None]), 1e-4)
    for shape in ((8, SIDE, SIDE), (8, SMALL)):  # right for the configured shape, or for none
        change["tensor"] = tensor(np.zeros(shape, np.float32))["tensor"]
        reply = post(local, [row(SMALL, SMALL)], "head", interventions=[change])
        assert f"[8, {SMALL}, {SMALL}]" in problem(reply, 422)["errors"][0]["hint"]


@pytest.mark.parametrize(
    ("width", "fields"),
    [
        (17, {"layers": ["wide#0", "wide#1"]}),
        (19, {"layers": ["."], "interventions": [{"layer": "wide", "op": "zero"}]}),
        (20, {"layers": ["narrow:grad_output"], "objective": {"kind": "layer", "layer": "wide"}}),
    ],
    ids=str,
)
def test_layer_that_runs_for_this_shape_only(local: Live, width: int, fields: Json) -> None:
    """It may be named whether the shape is known already or not; not for a shape for which it does not run."""
    for _ in range(2):
        reply = post(local, [row(SMALL, width)], model="branches", **fields)
        assert reply.status_code == 200, reply.text
    assert problem(post(local, [row(width, SMALL)], model="branches", **fields), 422)["errors"]


def test_unknown_layer_costs_no_forward(local: Live) -> None:
    """What is wrong whatever the shape is refused before anything runs with a new one; so is a shape that is a lie."""
    claimed = row(SMALL + 1, SMALL + 1)
    for layer in ("nothing", {"layer": "head", "tokens": [0]}):
        problem(post(local, [claimed], layer), 422)
    lying = npy(claimed)[: -claimed.nbytes] + row(SMALL, SMALL + 1).tobytes()
    problem(local.client.post("/extract", **raw(lying, "application/x-npy", model="Chain", layers="head")), 422)
    assert not is_surveyed(local, SMALL + 1)


def test_every_row_counts_in_memory(local: Live) -> None:
    """A small row beside large ones hides none of their bytes: they are refused before they are decoded."""
    large = np.zeros((3, 5 * SIDE, 5 * SIDE), np.float16)  # twice the bytes once it is decoded
    assert 2 * 2 * large.nbytes < MAX_QUEUE_BYTES < 2 * 3 * large.nbytes
    for on_error in ("fail", "skip"):
        reply = post(local, [row(SMALL, SMALL), large, large, large], "head", on_error=on_error)
        assert "the queue holds" in problem(reply, 413)["detail"]
        assert "decode" not in reply.headers["server-timing"]


@pytest.mark.parametrize("method", ["attention_rollout", "grad_cam"])
def test_explanations_of_a_grid_that_is_no_square(local: Live, method: str) -> None:
    """Patches of a picture that is not square stand as the convolution left them that they come of."""
    for height in (2 * SMALL, 2 * SMALL, SMALL):
        body = {"model": "patches", "method": method, "inputs": [tensor(row(height, SMALL))]}
        found = arrays_of(local.client.post("/explain?format=npz", json=body))
        assert found[method].shape == (1, height // 4, SMALL // 4)
