"""``POST /explain``, against maps made offline without hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.digits_reference import copy_digits, forward, gradient, random_images
from tests.service.support import Array, Json, arrays_of, problem, tensor
from tests.service.test_explain_methods import module_of


def cam(live: Live, x: Array, layer: str, klass: int | None) -> Array:
    """Grad-CAM of a layer of the embedded model, by autograd on the model cut in two."""
    module, rows = copy_digits(live), torch.from_numpy(x)
    slopes = gradient(module, rows, layer, lambda out: out.amax(1) if klass is None else out[:, klass])
    weighted = slopes.mean((2, 3), keepdim=True) * forward(module, rows, layer)
    return weighted.sum(1).relu().detach().numpy()


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


VIT = ModelSpec("vit", "python:tests.nets:vit", weights="random:3", inputs=(InputSpec("x", (3, 32, 32)),))
attentive = server_of(VIT)  # 16 patches and a class token


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


def propagate(steps: list[Tensor], normalized: bool) -> Array:
    """What the class token sees through all layers, each of which keeps what it had."""
    whole = torch.eye(17).expand(2, -1, -1)
    for step in steps:
        mixed = step + torch.eye(17)
        whole = (mixed / mixed.sum(-1, keepdim=True) if normalized else mixed) @ whole
    return whole[:, 0, 1:].reshape(-1, 4, 4).detach().numpy()


def test_through_all_layers(attentive: Live) -> None:
    """Attention, and attention by its gradient, paired layer by layer; relevance by Chefer et al., 2021."""
    x = random_images(2, 6)
    scores, weights = attended(module_of(attentive, "vit"), x)
    slopes = torch.autograd.grad(scores[:, 5].sum(), weights)
    graded = [(a * b).clamp(min=0).mean(1) for a, b in zip(weights, slopes, strict=True)]
    wanted = {
        "attention_rollout": propagate([each.mean(1) for each in weights], normalized=True),
        "gradient_rollout": propagate(graded, normalized=True),
        "relevance": propagate(graded, normalized=False),
    }
    for method, expected in wanted.items():
        body: Json = {"model": "vit", "method": method}
        body |= {"objective": {"class": 5}} if method != "attention_rollout" else {}
        reply = attentive.client.post("/explain", **asked(x, **body))
        found = arrays_of(reply)[method]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * expected.max(), err_msg=method)
    crossed = [(a * b).clamp(min=0).mean(1) for a, b in zip(weights, slopes[::-1], strict=True)]
    assert not np.allclose(wanted["gradient_rollout"], propagate(crossed, normalized=True), rtol=1e-3)
    refused = problem(attentive.client.post("/explain", **asked(x, **body, discard_ratio=0.5)), 422)
    assert "method 'attention_rollout' or method 'gradient_rollout'" in refused["errors"][0]["hint"]


def test_a_map_of_zeros_is_said_to_be_one(attentive: Live) -> None:
    """Also of a layer that the client names."""
    body = asked(random_images(2, 6), model="vit", method="grad_cam", layer="encoder.ln")
    said = "the maps of rows 0, 1 are all zeros: at no position does layer 'encoder.ln' speak for the objective"
    reply = attentive.client.post("/explain", **body)
    assert not arrays_of(reply)["grad_cam"].any()
    assert reply.json()["warnings"] == [said]
