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
from tests.service.digits_reference import copy_digits, forward, gradient, random_images
from tests.service.support import (
    Array,
    Json,
    arrays_of,
    configured,
    metadata,
    problem,
    tensor,
)
from tests.service.test_explain_methods import module_of


def cam(live: Live, x: Array, layer: str, klass: int | None) -> Array:
    """Grad-CAM of a layer of the embedded model, by autograd on the model cut in two."""
    module, rows = copy_digits(live), torch.from_numpy(x)
    slopes = gradient(module, rows, layer, lambda out: out.amax(1) if klass is None else out[:, klass])
    weighted = slopes.mean((2, 3), keepdim=True) * forward(module, rows, layer)
    found: Array = weighted.sum(1).relu().detach().numpy()
    return found


def asked(x: Array, **body: Any) -> Json:
    """A JSON request for tensors."""
    return {"json": {"inputs": [tensor(row) for row in x], "encoding": "base64", **body}}


@pytest.mark.parametrize(("layer", "used", "klass"), [(None, "block3", None), ("block2#0", "block2", 4)])
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


def attended(module: Any, x: Array) -> tuple[Tensor, list[Tensor]]:
    """A torchvision ViT written out: its scores, and the attention weights of each block."""
    tokens = module._process_input(torch.from_numpy(x))
    tokens = torch.cat([module.class_token.expand(len(x), -1, -1), tokens], 1) + module.encoder.pos_embedding
    tokens = tokens.detach().requires_grad_()
    weights = []
    for block in module.encoder.layers:
        part = block.self_attention
        mixed = block.ln_1(tokens) @ part.in_proj_weight.T + part.in_proj_bias
        heads = mixed.reshape(*mixed.shape[:2], 3, part.num_heads, part.head_dim).permute(2, 0, 3, 1, 4)
        weights.append((heads[0] @ heads[1].mT / part.head_dim**0.5).softmax(-1))
        joined = (weights[-1] @ heads[2]).transpose(1, 2).flatten(2)
        tokens = tokens + part.out_proj(joined)
        tokens = tokens + block.mlp(block.ln_2(tokens))
    return module.heads(module.encoder.ln(tokens)[:, 0]), weights


def test_relevance(attentive: Live) -> None:
    """R becomes R + A R, A the mean over heads of what is above 0 of weight times gradient: Chefer et al., 2021."""
    x = random_images(2, 6)
    scores, weights = attended(module_of(attentive, "vit"), x)
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
    assert "method 'attention_rollout' or method 'gradient_rollout'" in refused["errors"][0]["hint"]


def test_a_map_of_zeros_is_said_to_be_one(attentive: Live) -> None:
    """Also of a layer that the client names: in JSON, in metadata, and in a header of every format."""
    body = asked(random_images(2, 6), model="vit", method="grad_cam", layer="encoder.ln")
    said = "the maps of rows 0, 1 are all zeros: at no position does layer 'encoder.ln' speak for the objective"
    for form in ("json", "npy", "safetensors"):
        reply = attentive.client.post("/explain", **body, params={"format": form})
        assert not next(iter(arrays_of(reply).values())).any()
        assert reply.headers["x-layertap-warnings"] == said
        if form == "json":
            assert reply.json()["warnings"] == [said]
        if form == "safetensors":
            assert json.loads(metadata(reply)["warnings"]) == [said]
