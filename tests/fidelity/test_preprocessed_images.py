"""Pictures over HTTP against torchvision's own transforms: presets of several kinds, weights of a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torchvision.models import get_model_weights

from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration
from tests.fidelity.cases import torchvision_case
from tests.fidelity.client import LIMITS
from tests.fidelity.compare import Tally
from tests.fidelity.served_model import randomise, save
from tests.server import Live, serving
from tests.service.support import Array, arrays_of, text64

PICTURES = (("china.jpg", "JPEG"), ("flower.jpg", "PNG"))
# By architecture, a layer in its midst: a plain preset, and one without a crop whose model returns a dictionary.
CASES = [
    pytest.param("resnet18", "layer2.0.bn1", id="resnet18"),
    pytest.param("lraspp_mobilenet_v3_large", "classifier.cbr", id="lraspp", marks=pytest.mark.hard),
]
OPTIONS = {"lraspp_mobilenet_v3_large": {"weights_backbone": None}}


@dataclass(frozen=True)
class Pictures:
    """A served model, and what hooks saw offline when torchvision's transforms had prepared the pictures."""

    live: Live
    name: str
    wanted: dict[str, Array]

    def post(self, **request: Any) -> httpx.Response:
        """The reply, as npz."""
        return self.live.client.post("/extract", params={"format": "npz", **request.pop("params", {})}, **request)

    def check(self, reply: httpx.Response, rows: slice) -> None:
        """The right values, and the prepared pictures themselves bit for bit."""
        found = arrays_of(reply)
        wanted = {key: array[rows] for key, array in self.wanted.items()}
        assert found.keys() == wanted.keys()
        assert found[".:input"].tobytes() == wanted[".:input"].tobytes()
        Tally().add(found, wanted)


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_forms(name: str, layer: str, tmp_path: Path) -> None:
    """However a picture is sent, its features are those of a hook behind torchvision's transforms."""
    files = [_encoded(picture, kind) for picture, kind in PICTURES]
    layers = [".:input", layer, "."]
    with _hosted(name, layer, files, tmp_path) as pictures:
        jpeg, png = files
        asked = {"model": name, "layers": layers}
        inputs = [{"image": text64(jpeg)}, {"image": f"data:image/png;base64,{text64(png)}"}]
        pictures.check(pictures.post(json={**asked, "inputs": inputs}), slice(0, 2))
        parts = [("images", ("a", jpeg)), ("images", ("b", png)), ("request", (None, orjson.dumps(asked)))]
        pictures.check(pictures.post(files=parts), slice(0, 2))
        query = {"model": name, "layers": ",".join(layers)}
        for row, (file, media_type) in enumerate(zip(files, ("image/jpeg", "image/png"), strict=True)):
            reply = pictures.post(content=file, headers={"content-type": media_type}, params=query)
            pictures.check(reply, slice(row, row + 1))


@contextmanager
def _hosted(name: str, layer: str, files: list[bytes], folder: Path) -> Iterator[Pictures]:
    weights = folder / "weights.safetensors"
    module = randomise(torchvision_case(name, **OPTIONS.get(name, {})).build().eval(), 0)
    save(module, weights)
    prepare = get_model_weights(name).DEFAULT.transforms()
    batch = torch.stack([prepare(Image.open(BytesIO(file)).convert("RGB")) for file in files])
    wanted = _hooked(module, layer, batch)
    spec = ModelSpec(name, f"torchvision:{name}", str(weights), device="cpu", load="lazy")
    try:
        with serving(Configuration((spec,), name), **LIMITS) as live:
            yield Pictures(live, name, wanted)
    finally:
        weights.unlink()


def _hooked(module: nn.Module, layer: str, batch: Tensor) -> dict[str, Array]:
    """What goes into a model, what comes out of it and of one layer: the pictures are too large to keep it all."""
    seen = {".:input": batch}
    handle = module.get_submodule(layer).register_forward_hook(
        lambda part, args, output: seen.update({layer: output.clone()})
    )
    with handle, torch.no_grad():
        output = module(batch.clone())
    seen["."] = output["out"] if isinstance(output, dict) else output
    return {key: value.numpy() for key, value in seen.items()}


def _encoded(picture: str, kind: str) -> bytes:
    stream = BytesIO()
    Image.fromarray(load_sample_image(picture)).save(stream, kind)
    return stream.getvalue()
