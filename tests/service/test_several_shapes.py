"""Inputs of several shapes in one request: each gets what it would alone, in one array where these are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tests.service.conftest import Serve
from tests.service.support import (
    Array,
    Json,
    arrays_of,
    configured,
    copy_module,
    encode,
    image,
    net,
    problem,
    same,
    tensor,
)

SIDES = ((16, 16), (12, 20), (16, 16), (9, 7), (12, 20))  # of inputs; the model is configured for the first
MEANS, STDS = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
SPECS = (
    net_spec("Chain", inputs=(InputSpec("image", (3, 16, 16)),)),
    replace(
        net_spec("Chain", inputs=(InputSpec("image", (3, 16, 16)),)),
        name="pictures",
        preprocess=PreprocessSpec(resize=12, crop=None, mean=MEANS, std=STDS),
    ),
    net("cnn", "Cnn", InputSpec("x", (3, 32, 32))),
    net_spec("vit", load="lazy"),
    net("meeting", "ChannelMeans", InputSpec("x", (3, 6, 6))),
)


def rows(sides: Sequence[tuple[int, int]] = SIDES) -> list[Array]:
    """A tensor of each height and width, all of other numbers."""
    return [
        np.random.default_rng(place).standard_normal((3, *side)).astype(np.float32) for place, side in enumerate(sides)
    ]


ROWS = rows()


@pytest.fixture(scope="module")
def local(serve: Serve) -> Iterator[Live]:
    """A server whose models run in its own process, so that tests may look at them."""
    with serve(configured(*SPECS)) as live:
        yield live


@pytest.fixture(scope="module")
def module(local: Live) -> Any:
    """The model offline."""
    return copy_module(local, "Chain")


def post(live: Live, inputs: Sequence[Json], *layers: Any, **fields: Any) -> httpx.Response:
    query = {name: fields.pop(name) for name in ("format", "dry_run") if name in fields}
    body = {"model": "Chain", "layers": list(layers), "inputs": list(inputs), **fields}
    if not layers:
        del body["layers"]
    return live.client.post("/extract", json=body, params=query)


def close(actual: Array, expected: Array | Tensor, rtol: float = 1e-4) -> None:
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=rtol, atol=1e-5)


def offline(module: Any, row: Array, layer: str, call: int = 0, site: str = "output") -> Array:
    """What a hook sees of one row alone."""
    return record(module, torch.from_numpy(row)[None])[layer, call, (), site].numpy()


def test_alike(local: Live, module: Any) -> None:
    """What has one shape whatever the input's is one array, rows in the order of the inputs."""
    layers = [
        "head",
        {"layer": "conv", "pool": "mean", "normalize": True, "as": "v"},
        {"layer": "relu#0", "pool": "max"},
    ]
    reply = post(local, map(tensor, ROWS), *layers, encoding="base64")
    arrays = arrays_of(reply)
    assert arrays.keys() == {"head", "v", "relu#0"}
    close(arrays["head"], np.concatenate([offline(module, row, "head") for row in ROWS]))
    means = np.stack([offline(module, row, "conv")[0].mean((1, 2)) for row in ROWS])
    close(arrays["v"], means / np.linalg.norm(means, axis=1, keepdims=True))
    close(arrays["relu#0"], np.stack([offline(module, row, "relu")[0].max((1, 2)) for row in ROWS]))


@pytest.mark.parametrize("format_", ["json", "safetensors"])
def test_apart(local: Live, module: Any, format_: str) -> None:
    """What has another shape for another input has an entry for each, named by the input's place."""
    reply = post(local, map(tensor, ROWS), "conv", "head", "relu#1:input", format=format_)
    arrays = arrays_of(reply)
    names = [f"{key}.input{place}" for key in ("conv", "relu#1:input") for place in range(5)]
    assert arrays.keys() == {*names, "head"}
    for place, row in enumerate(ROWS):
        close(arrays[f"conv.input{place}"], offline(module, row, "conv"))
        close(arrays[f"relu#1:input.input{place}"], offline(module, row, "relu", 1, "input"))
    if format_ == "json":
        assert list(arrays) == [*names[:5], "head", *names[5:]]
        shapes = [entry["shape"] for name, entry in reply.json()["features"].items() if name.startswith("conv")]
        assert shapes == [[1, 8, *side] for side in SIDES]


def test_receipts(local: Live) -> None:
    """Receipts say of each input what they would alone; one of several says where these differ."""
    found = post(local, map(tensor, ROWS), "conv", {"layer": "conv", "pool": "mean", "as": "v"}).json()
    alone = [post(local, [tensor(row)], "conv", {"layer": "conv", "pool": "mean", "as": "v"}).json() for row in ROWS]
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
    reply = post(local, map(tensor, inputs), *layers, model="cnn", objective={"kind": "logit", "class": "top"})
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
    good = [tensor(row) for row in rows([(32, 32)] * 3)]
    bad = [tensor(row) for row in rows([(40, 32), (48, 48)])]
    inputs = [good[0], bad[0], good[1], bad[1], bad[0], good[2]]
    errors = problem(post(local, inputs, "heads", model="vit"), 422)["errors"]
    assert [error["input"] for error in errors] == [1]
    skipped = post(local, inputs, "heads", model="vit", on_error="skip", encoding="base64", isolated=True)
    assert skipped.headers["x-layertap-skipped"] == "1,3,4"
    plain = post(local, good, "heads", model="vit", encoding="base64", isolated=True)
    assert same(arrays_of(skipped), arrays_of(plain))
    assert skipped.json()["receipts"] == plain.json()["receipts"]
    errors = problem(post(local, bad, "heads", model="vit", on_error="skip"), 422)["errors"]
    assert [error["input"] for error in errors] == [0, 1]


def test_rows_that_affect_each_other(local: Live) -> None:
    """Each runs alone; they can be no batch where their shapes differ."""
    inputs, offline_module = rows([(6, 6), (8, 6), (6, 6)]), copy_module(local, "meeting")
    reply = post(local, map(tensor, inputs), {"layer": ".", "as": "means"}, model="meeting")
    arrays = arrays_of(reply)
    for place, row in enumerate(inputs):
        close(arrays[f"means.input{place}"], offline_module(torch.from_numpy(row)[None]).detach())
        assert reply.json()["receipts"][f"means.input{place}"]["rows_per_forward"] == 1
    found = problem(post(local, map(tensor, inputs), ".", model="meeting", isolated=True), 422)
    assert "several shapes" in found["detail"]


def test_pictures(local: Live, module: Any) -> None:
    """Pictures that preprocessing leaves with several shapes, and tensors beside them."""
    sizes = [(24, 24), (40, 24), (24, 36), (80, 48)]
    pixels = [
        np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8)
        for seed, (wide, high) in enumerate(sizes)
    ]
    inputs = [image(encode(each)) for each in pixels]
    reply = post(local, [*inputs, tensor(ROWS[1])], "conv", "head", model="pictures")
    arrays = arrays_of(reply)
    for place, each in enumerate(pixels):
        resized = tvf.resize(Image.fromarray(each), 12)
        row = tvf.normalize(tvf.to_tensor(resized), MEANS, STDS).numpy()
        close(arrays[f"conv.input{place}"], offline(module, row, "conv"), 1e-3)
        close(arrays["head"][place], offline(module, row, "head")[0], 1e-3)
    close(arrays["conv.input4"], offline(module, ROWS[1], "conv"))
    assert reply.json()["receipts"]["head"]["preprocessed"] == "mixed"


@pytest.mark.parametrize("limit", ["max_reply_bytes", "max_queue_bytes"])
def test_limits(serve: Serve, limit: str) -> None:
    """Limits are of the whole request, and are kept before any forward."""
    sides = [(16, 16), (12, 20), (9, 7)]
    nbytes = sum(8 * high * wide * 4 for high, wide in sides)
    inputs = [tensor(row) for row in rows(sides)]
    more, size, says = {
        "max_reply_bytes": ([*inputs, tensor(rows([(9, 8)])[0])], nbytes, f"the limit is {nbytes}"),
        "max_queue_bytes": (inputs * 3, nbytes * 3, "the queue holds"),
    }[limit]
    with serve(configured(SPECS[0]), **{limit: size}) as live:
        assert len(arrays_of(post(live, inputs, "conv", format="npz"))) == 3
        reply = post(live, more, "conv", format="npz")
        assert says in problem(reply, 413)["detail"]
        assert "forward" not in reply.headers["server-timing"]
