"""What a configuration may say against the usual: train mode, and pictures of one channel without any step."""

from __future__ import annotations

import copy
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_tensor

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.support import arrays_of, image, tensor

DIGIT = InputSpec("x", (1, 28, 28))
ROWS = np.random.default_rng(2).normal(size=(4, 1, 28, 28)).astype(np.float32)


class Normed(nn.Module):
    """A convolution with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of pictures (N, 1, 28, 28)."""
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


SHARED: Any = {"weights": "random:3", "device": "cpu", "inputs": (DIGIT,), "preprocess": "none"}
PLAIN = ModelSpec("plain", f"python:{__name__}:Normed", **SHARED)
served = server_of(PLAIN, replace(PLAIN, name="training", mode="train"))


def module_of(live: Live, name: str) -> Any:
    entry: Any = live.engine.manager.registry.get_entry(name)
    return entry.model.module


def test_train(served: Live) -> None:
    """Batch statistics are those of the rows of a request; what they leave on the module is put back."""
    before = copy.deepcopy(module_of(served, "training"))
    with torch.no_grad():
        wanted = copy.deepcopy(before).train()(torch.from_numpy(ROWS))
    body = {"model": "training", "layers": ["head"], "inputs": [tensor(row) for row in ROWS], "isolated": True}
    replies = [served.client.post("/extract", json=body) for _ in range(2)]
    for reply in replies:
        np.testing.assert_allclose(arrays_of(reply)["head"], wanted, rtol=1e-4, atol=1e-6)
    slopes = served.client.post("/extract", json=body | {"layers": [".:grad_input"], "objective": {"class": 3}})
    rows = torch.from_numpy(ROWS).requires_grad_()
    (expected,) = torch.autograd.grad(copy.deepcopy(before).train()(rows)[:, 3].sum(), rows)
    np.testing.assert_allclose(arrays_of(slopes)[".:grad_input"], expected, rtol=1e-3, atol=1e-6)
    after = module_of(served, "training").state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.state_dict().items())
    assert served.client.get("/models/training").json()["deterministic"] is False
    assert replies[0].json()["fingerprint"] != replies[1].json()["fingerprint"]


def test_a_picture_of_one_channel(served: Live) -> None:
    """It is what ToTensor makes of it, and as comparable as the tensor."""
    stream = BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (28, 28), np.uint8)).save(stream, "PNG")
    row = to_tensor(Image.open(stream))
    body = {"model": "plain", "layers": [".:input", "head"], "encoding": "base64"}
    drawn, sent = (
        served.client.post("/extract", json=body | {"inputs": [each]})
        for each in (image(stream.getvalue()), tensor(row.numpy()))
    )
    np.testing.assert_array_equal(arrays_of(drawn)[".:input"][0], row)
    np.testing.assert_array_equal(arrays_of(drawn)["head"], arrays_of(sent)["head"])
    assert drawn.json()["fingerprint"] == sent.json()["fingerprint"]
