"""Maps by the arithmetic of the code that people use, which is written out here beside plain hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.digits_reference import random_images
from tests.service.support import Json, arrays_of, copy_module, net, tensor

CLASS = 3
X = random_images(2, 6)


PICTURES = InputSpec("x", (3, 32, 32))
VIT = ModelSpec("vit", "python:tests.service.test_every_kind:fused", inputs=(PICTURES,), device="cpu")
served = server_of(VIT, net("cnn", "Cnn", PICTURES, weights="random:5"))


def explain(live: Live, model: str, method: str, **body: Any) -> tuple[Tensor, str]:
    sent: Json = {"model": model, "method": method, "inputs": [tensor(row) for row in X], "encoding": "base64", **body}
    reply = live.client.post("/explain", json=sent)
    return torch.from_numpy(arrays_of(reply)[method]), reply.json()["fingerprint"]


def take_attention(module: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, and what a backward hook that is not full calls their gradients, as they come."""
    weights, slopes = list[Tensor](), list[Tensor]()
    for block in module.requires_grad_(True).blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: weights.append(output.detach()))
        block.attn.attn_drop.register_backward_hook(lambda module, given, taken: slopes.append(given[0]))
    module(x)[:, CLASS].sum().backward()
    return weights, slopes


def roll_out(fused: list[Tensor], discard: float, keeps_first: bool) -> Tensor:
    """vit-explain's product over layers (1, T, T), in which columns are divided by the sums of rows."""
    product = torch.eye(17)
    for layer in fused:
        flat = layer.flatten().clone()
        for index in flat.argsort()[: int(len(flat) * discard)]:
            if index or not keeps_first:
                flat[index] = 0
        halved = (flat.view(1, 17, 17) + torch.eye(17)) / 2
        product = halved / halved.sum(-1) @ product
    patches = product[0, 0, 1:].view(4, 4)
    return patches / patches.max()


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("discard", [0.0, 0.6])
@pytest.mark.parametrize("method", ["attention_rollout", "gradient_rollout"])
def test_vit_explain(served: Live, method: str, discard: float) -> None:
    """With its hooks, which take gradients before softmax, and in the order of the backward."""
    maps = []
    for row in X:
        weights, slopes = take_attention(copy_module(served, "vit"), torch.from_numpy(row)[None])
        if method == "attention_rollout":
            maps.append(roll_out([each.mean(1) for each in weights], discard, keeps_first=True))
        else:
            fused = [(each * slope).mean(1).clamp(min=0) for each, slope in zip(weights, slopes, strict=True)]
            maps.append(roll_out(fused, discard, keeps_first=False))
    objective = {"objective": {"class": CLASS}} if method == "gradient_rollout" else {}
    body: Json = {"discard_ratio": discard, **objective}
    found, fingerprint = explain(served, "vit", method, rule="vit-explain", **body)
    np.testing.assert_allclose(found, torch.stack(maps), rtol=1e-4, atol=1e-6)
    plain, other = explain(served, "vit", method, **body)
    assert fingerprint != other
    assert not np.allclose(plain, found, rtol=1e-2)


def test_pytorch_grad_cam(served: Live) -> None:
    """Grad-CAM++ with what that library adds below: small gradients weigh less."""
    module, taken = copy_module(served, "cnn"), list[Tensor]()
    module.features.register_forward_hook(lambda module, args, output: taken.append(output))
    scores = module(torch.from_numpy(X).requires_grad_())
    (slopes,) = torch.autograd.grad(scores[:, CLASS].sum(), taken)
    values = taken[0].detach()
    alphas = slopes**2 / (2 * slopes**2 + values.sum((2, 3), keepdim=True) * slopes**3 + 1e-6)
    wanted = ((alphas * slopes.relu()).sum((2, 3), keepdim=True) * values).sum(1).relu()
    body: Json = {"layer": "features", "objective": {"class": CLASS}}
    found, fingerprint = explain(served, "cnn", "grad_cam_plusplus", rule="pytorch-grad-cam", **body)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5 * float(wanted.max()))
    plain, other = explain(served, "cnn", "grad_cam_plusplus", **body)
    assert fingerprint != other
    assert not np.allclose(plain, found, rtol=1e-3, atol=1e-5 * float(wanted.max()))
