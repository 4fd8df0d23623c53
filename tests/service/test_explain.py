"""``POST /explain``, against maps made offline without hooks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, forward, random_images
from tests.service.support import (
    Array,
    Json,
    arrays_of,
    configured,
    image,
    metadata,
    npy,
    picture,
    problem,
    raw,
    tensor,
)
from tests.service.test_explain_methods import module_of


def cam(live: Live, x: Array, layer: str, klass: int | None) -> Array:
    """Grad-CAM of a layer of the embedded model, by autograd on the model cut in two."""
    module, names = copy_digits(live), ["block1", "block2", "block3", "pool", "flatten", "head"]
    values = forward(module, torch.from_numpy(x), layer).detach().requires_grad_()
    out = values.clone()
    for name in names[names.index(layer) + 1 :]:
        out = getattr(module, name)(out)
    score = out.amax(1) if klass is None else out[:, klass]
    slopes = torch.autograd.grad(score.sum(), values)[0].numpy()
    found: Array = np.maximum((slopes.mean((2, 3))[:, :, None, None] * values.detach().numpy()).sum(1), 0)
    return found


SAME = ModelSpec(
    "same", "python:tests.service.nets_http:Same", weights="random:0", inputs=(InputSpec("x", (3, 32, 32)),)
)


def asked(x: Array, **body: Any) -> Json:
    """A JSON request for tensors."""
    return {"json": {"inputs": [tensor(row) for row in x], "encoding": "base64", **body}}


@pytest.mark.parametrize(("layer", "used"), [(None, "block3"), ("block2#0", "block2")])
@pytest.mark.parametrize("klass", [None, 4])
def test_grad_cam(live: Live, layer: str | None, used: str, klass: int | None) -> None:
    """Of the last map or of a layer by name, for the highest score or for a class."""
    x = random_images(3, 1)
    body: Json = {"method": "grad_cam"} | ({"layer": layer} if layer else {})
    body |= {"objective": {"kind": "logit", "class": klass}} if klass is not None else {}
    reply = live.client.post("/explain", **asked(x, **body))
    wanted = cam(live, x, used, klass)
    assert wanted.max() > 0
    np.testing.assert_allclose(arrays_of(reply)["grad_cam"], wanted, rtol=1e-3, atol=1e-5 * wanted.max())
    receipt = reply.json()["receipts"]["grad_cam"]
    assert (receipt["layer"], receipt["site"], receipt["layout"]) == (used, "grad_output", "NHW")
    assert receipt["fingerprint"] == reply.json()["fingerprint"]


def test_saliency(live: Live) -> None:
    """The gradient at the input, largest over channels."""
    x = random_images(2, 2)
    reply = live.client.post("/explain", **asked(x, method="saliency", objective={"kind": "probability", "class": 7}))
    start = torch.from_numpy(x).requires_grad_()
    slopes = torch.autograd.grad(forward(copy_digits(live), start).softmax(1)[:, 7].sum(), start)[0]
    wanted = slopes.abs().amax(1).numpy()
    np.testing.assert_allclose(arrays_of(reply)["saliency"], wanted, rtol=1e-3, atol=1e-4 * wanted.max())


def test_ways_to_send(live: Live) -> None:
    """JSON, multipart and raw mean the same, in every format."""
    data = picture(3)
    query = {"method": "grad_cam", "objective": "logit", "class": "2"}
    first = arrays_of(live.client.post("/explain", **raw(data, "image/png", **query)))["grad_cam"]
    assert first.shape == (1, 8, 8)
    body = {"method": "grad_cam", "objective": {"kind": "logit", "class": 2}, "inputs": [image(data)]}
    for form in ("json", "npz", "safetensors", "npy"):
        reply = live.client.post("/explain", json={**body, "encoding": "base64"}, params={"format": form})
        assert np.array_equal(next(iter(arrays_of(reply).values())), first)
    files = [("images", ("a.png", data, "image/png"))]
    assert np.array_equal(
        arrays_of(live.client.post("/explain", files=files, params=query))["grad_cam"], first.astype(np.float32)
    )
    two = live.client.post("/explain", **raw(npy(random_images(2, 4)), "application/x-npy", method="saliency"))
    assert arrays_of(two)["saliency"].shape == (2, 32, 32)


@pytest.fixture(scope="module")
def attentive(serve: Serve) -> Iterator[Live]:
    """A server with a vision transformer: 16 patches and a class token."""
    spec = ModelSpec("vit", "python:tests.nets:vit", weights="random:3", inputs=(InputSpec("x", (3, 32, 32)),))
    with serve(configured(spec)) as live:
        yield live


def rolled(layers: list[Array]) -> Array:
    """What the class token sees through all layers."""
    whole = np.eye(17)
    for layer in layers:
        step = layer + np.eye(17)
        whole = step / step.sum(-1, keepdims=True) @ whole
    found: Array = whole[:, 0, 1:].reshape(-1, 4, 4)
    return found


def test_rollouts(attentive: Live) -> None:
    """Attention, and attention by its gradient, paired layer by layer."""
    body: Json = {"model": "vit", "inputs": [tensor(row) for row in random_images(2, 6)], "encoding": "base64"}
    names = [f"encoder.layers.encoder_layer_{number}.self_attention" for number in range(2)]
    layers = [f"{name}:{site}" for site in ("attention", "attention_grad") for name in names]
    objective = {"kind": "logit", "class": 5}
    found = arrays_of(attentive.client.post("/extract", json={**body, "layers": layers, "objective": objective}))
    weights, slopes = ([found[f"{name}:{site}"] for name in names] for site in ("attention", "attention_grad"))
    reply = attentive.client.post("/explain", json={**body, "method": "attention_rollout"})
    wanted = rolled([each.mean(1) for each in weights])
    np.testing.assert_allclose(arrays_of(reply)["attention_rollout"], wanted, rtol=1e-4)
    reply = attentive.client.post("/explain", json={**body, "method": "gradient_rollout", "objective": objective})
    wanted = rolled([np.maximum(a * b, 0).mean(1) for a, b in zip(weights, slopes, strict=True)])
    np.testing.assert_allclose(arrays_of(reply)["gradient_rollout"], wanted, rtol=1e-3, atol=1e-8)
    crossed = rolled([np.maximum(a * b, 0).mean(1) for a, b in zip(weights, slopes[::-1], strict=True)])
    assert not np.allclose(wanted, crossed, rtol=1e-3)
    plain, cut = (
        attentive.client.post("/explain", json={**body, "method": "attention_rollout", "discard_ratio": share})
        for share in (0.0, 0.9)
    )
    assert cut.json()["fingerprint"] != plain.json()["fingerprint"]
    assert not np.allclose(arrays_of(cut)["attention_rollout"], arrays_of(plain)["attention_rollout"])


def attended(module: Any, x: Array) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A torchvision ViT written out: its scores, and of each block the normed tokens and the attention weights."""
    tokens = module._process_input(torch.from_numpy(x))
    tokens = torch.cat([module.class_token.expand(len(x), -1, -1), tokens], 1) + module.encoder.pos_embedding
    norms, weights = [], []
    for block in module.encoder.layers:
        part = block.self_attention
        norms.append(block.ln_1(tokens).detach().requires_grad_() if not norms else block.ln_1(tokens))
        mixed = norms[-1] @ part.in_proj_weight.T + part.in_proj_bias
        heads = mixed.reshape(*mixed.shape[:2], 3, part.num_heads, part.head_dim).permute(2, 0, 3, 1, 4)
        weights.append((heads[0] @ heads[1].mT / part.head_dim**0.5).softmax(-1))
        joined = (weights[-1] @ heads[2]).transpose(1, 2).flatten(2)
        tokens = tokens + part.out_proj(joined)
        tokens = tokens + block.mlp(block.ln_2(tokens))
    return module.heads(module.encoder.ln(tokens)[:, 0]), norms, weights


def test_relevance(attentive: Live) -> None:
    """R becomes R + A R, A the mean over heads of what is above 0 of weight times gradient: Chefer et al., 2021."""
    x = random_images(2, 6)
    scores, _, weights = attended(module_of(attentive, "vit"), x)
    slopes = torch.autograd.grad(scores[:, 5].sum(), weights)
    whole = torch.eye(17).expand(2, -1, -1)
    for weight, slope in zip(weights, slopes, strict=True):
        whole = whole + (weight * slope).clamp(min=0).mean(1) @ whole
    wanted = whole[:, 0, 1:].reshape(-1, 4, 4).detach().numpy()
    assert wanted.min(axis=(1, 2)).max() < wanted.max() / 2
    body = {"model": "vit", "method": "relevance", "objective": {"class": 5}}
    reply = attentive.client.post("/explain", **asked(x, **body))
    np.testing.assert_allclose(arrays_of(reply)["relevance"], wanted, rtol=1e-3, atol=1e-5 * wanted.max())
    refused = problem(attentive.client.post("/explain", **asked(x, **body, discard_ratio=0.5)), 422)
    assert (
        refused["errors"][0]["hint"] == "leave it out, or use method 'attention_rollout' or method 'gradient_rollout'"
    )
    described = attentive.client.get("/openapi.json").json()
    assert "relevance" in described["components"]["schemas"]["ExplainBody"]["properties"]["method"]["anyOf"][0]["enum"]


def test_grad_cam_where_a_class_token_answers(attentive: Live) -> None:
    """Without a layer it is of the last block's first norm, the last place where patches bear on the answer."""
    x = random_images(2, 6)
    scores, norms, _ = attended(module_of(attentive, "vit"), x)
    slopes = torch.autograd.grad(scores[:, 5].sum(), norms[-1])[0][:, 1:]
    summed = (slopes.mean(1, keepdim=True) * norms[-1][:, 1:]).sum(2).clamp(min=0)
    wanted = summed.reshape(2, 4, 4).detach().numpy()
    assert (wanted.max((1, 2)) > 0).all()
    body = {"model": "vit", "method": "grad_cam", "objective": {"class": 5}}
    reply = attentive.client.post("/explain", **asked(x, **body))
    np.testing.assert_allclose(arrays_of(reply)["grad_cam"], wanted, rtol=1e-3, atol=1e-5 * wanted.max())
    assert reply.json()["receipts"]["grad_cam"]["layer"] == "encoder.layers.encoder_layer_1.ln_1"
    assert "warnings" not in reply.json()
    assert "x-layertap-warnings" not in reply.headers
    named = asked(x, **body, layer="encoder.layers.encoder_layer_1.ln_1")
    assert attentive.client.post("/explain", **named).json()["fingerprint"] == reply.json()["fingerprint"]


def test_a_map_of_zeros_is_said_to_be_one(attentive: Live) -> None:
    """Also of a layer that the client names: in JSON, in metadata, and in a header of every format."""
    body = asked(random_images(2, 6), model="vit", method="grad_cam", layer="encoder.ln")
    said = "the maps of rows 0, 1 are all zeros: at no position does layer 'encoder.ln' speak for the objective"
    for form in ("json", "npy", "npz", "safetensors"):
        reply = attentive.client.post("/explain", **body, params={"format": form})
        assert not next(iter(arrays_of(reply).values())).any()
        assert reply.headers["x-layertap-warnings"] == said
        if form == "json":
            assert reply.json()["warnings"] == [said]
        if form == "safetensors":
            assert json.loads(metadata(reply)["warnings"]) == [said]


def test_a_model_that_answers_the_same_to_all(serve: Serve) -> None:
    """Where no layer bears on the objective the last map is taken, and its zeros are said to be zeros; so elsewhere."""
    with serve(configured(SAME)) as live:
        for method in ("grad_cam", "saliency"):
            reply = live.client.post("/explain", **asked(random_images(1, 6), model="same", method=method))
            assert not arrays_of(reply)[method].any()
            assert reply.json()["warnings"][0].startswith("the map of row 0 is all zeros: ")
        again = live.client.post("/explain", **asked(random_images(1, 7), model="same", method="grad_cam"))
        assert again.json()["receipts"]["grad_cam"]["layer"] == "conv"


BAD: dict[str, tuple[Json, str]] = {
    "unknown method": ({"method": "lime"}, "/method"),
    "a layer that is no map": ({"method": "grad_cam", "layer": "head"}, ""),
    "a layer for saliency": ({"method": "saliency", "layer": "block1"}, ""),
    "a model without attention": ({"method": "attention_rollout"}, ""),
    "nothing but discarded": ({"method": "attention_rollout", "discard_ratio": 1.0}, "/discard_ratio"),
    "discarding elsewhere": ({"method": "saliency", "discard_ratio": 0.5}, ""),
}


@pytest.mark.parametrize("kind", BAD)
def test_refused(live: Live, kind: str) -> None:
    """422 with the place and what to type instead."""
    body, pointer = BAD[kind]
    told = problem(live.client.post("/explain", **asked(random_images(1, 5), **body)), 422)
    assert not pointer or told["errors"][0]["pointer"] == pointer
    if body.get("layer") == "head":
        assert "'block3'" in told["hint"]
