"""Decoded pictures as arrays of bytes, and bfloat16: what plain torch makes of the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms._presets import ImageClassification

from layertap.models.spec import InputSpec, PreprocessSpec
from tests.conftest import net_spec
from tests.nets import Chain
from tests.oracle import record
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.support import Array, Json, arrays_of, encode, image, npy, problem, raw, tensor

SIDE, LAYER = 24, "conv"
QUERY = {"model": "own", "layers": LAYER, "pool": "mean", "format": "npz"}
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
STEPS = PreprocessSpec(resize=32, crop=SIDE, mean=MEAN, std=STD, interpolation="bilinear")
OWN = replace(net_spec("Chain", inputs=(InputSpec("image", (3, SIDE, SIDE)),)), name="own", preprocess=STEPS)
TRANSFORM = ImageClassification(crop_size=SIDE, resize_size=32, mean=MEAN, std=STD)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """The network that is served."""
    torch.manual_seed(0)
    return Chain().eval()


own = server_of(OWN, replace(OWN, name="fast", decode="fast"))  # prepares pictures as torchvision's preset does


def pictures(count: int = 1, height: int = 40, width: int = 56) -> Array:
    return np.random.default_rng(height).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def plain(module: nn.Module, batch: Array) -> Array:
    """What torchvision's own preset and a hook give."""
    rows = torch.stack([TRANSFORM(Image.fromarray(picture)) for picture in batch])
    values: Tensor = record(module, rows)[LAYER, 0, (), "output"]
    return values.mean((2, 3)).numpy()


def body(form: str, batch: Array) -> Json:
    """A request with one picture or a batch, in one of the forms."""
    one = batch[0]
    return {
        "npy of one": raw(npy(one), "application/x-npy", **QUERY),
        "npy": raw(npy(batch), "application/x-npy", **QUERY),
        "safetensors": raw(
            safetensors.torch.save({"x": torch.from_numpy(batch.copy())}), "application/x-safetensors", **QUERY
        ),
        "multipart": {"files": [("tensors", npy(each)) for each in batch], "params": QUERY},
        "json": {
            "json": {"model": "own", "layers": [LAYER], "pool": "mean", "inputs": [tensor(each) for each in batch]},
            "params": {"format": "npz"},
        },
    }[form]


@pytest.mark.parametrize(
    ("form", "first"),
    [("npy of one", False), ("npy", True), ("safetensors", False), ("multipart", True), ("json", False)],
)
def test_equals_plain_torch(own: Live, module: nn.Module, form: str, first: bool) -> None:
    """In each form, with the channels first or last, pixels give what torchvision's preset and the module give."""
    batch = pictures(1 if form == "npy of one" else 3)
    sent = np.ascontiguousarray(batch.transpose(0, 3, 1, 2)) if first else batch
    served = arrays_of(own.client.post("/extract", **body(form, sent)))[LAYER]
    assert served.shape == (len(batch), 8)
    np.testing.assert_allclose(served, plain(module, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["own", "fast"])
def test_same_as_png(own: Live, model: str) -> None:
    """The same bits, fingerprint and receipts as of the same picture in PNG."""
    (picture,) = pictures()
    fields = {"model": model, "layers": [LAYER], "encoding": "base64"}
    answers = [
        own.client.post("/extract", json={**fields, "inputs": [each]}).json()
        for each in (image(encode(picture)), tensor(picture))
    ]
    assert answers[0]["fingerprint"] == answers[1]["fingerprint"]
    assert answers[0]["receipts"] == answers[1]["receipts"]
    assert "preprocessed" not in answers[1]["receipts"][LAYER]
    assert answers[0]["features"] == answers[1]["features"]


def test_sizes_and_kinds_in_one_request(own: Live, module: nn.Module) -> None:
    """Pictures of different sizes, encoded and decoded, and a row of floats share a request, in their order."""
    first, second = pictures(height=40)[0], pictures(height=70, width=31)[0]
    row = TRANSFORM(Image.fromarray(first)).numpy()
    inputs = [tensor(first), image(encode(second)), tensor(row), tensor(second)]
    answer = own.client.post("/extract", json={"model": "own", "layers": [LAYER], "pool": "mean", "inputs": inputs})
    assert answer.json()["receipts"][LAYER]["preprocessed"] == "mixed"
    expected = np.concatenate([plain(module, each[None]) for each in (first, second, first, second)])
    np.testing.assert_allclose(arrays_of(answer)[LAYER], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "said"),
    [((3, 40, 3), "either may be meant"), ((40, 56, 4), "are no picture"), ((0, 56, 3), "holds no pixels")],
)
def test_refused(own: Live, shape: tuple[int, ...], said: str) -> None:
    """What may be two pictures, or is none, is refused with what to send."""
    answer = own.client.post("/extract", **raw(npy(np.ones(shape, np.uint8)), "application/x-npy", **QUERY))
    fault = problem(answer, 422)["errors"][0]
    assert said in fault["detail"]
    assert fault.get("hint") or "no pixels" in said
