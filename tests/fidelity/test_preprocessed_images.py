"""Pictures over HTTP, sent in every form, against a hook behind torchvision's own transforms."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision.models import get_model_weights

from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration
from tests.fidelity.cases import torchvision_case
from tests.fidelity.client import LIMITS
from tests.fidelity.compare import Tally
from tests.fidelity.served_model import randomise, save
from tests.server import serving
from tests.service.support import arrays_of, text64

NAME, LAYER = "resnet18", "layer2.0.bn1"


def encode(picture: str, kind: str) -> bytes:
    stream = BytesIO()
    Image.fromarray(load_sample_image(picture)).save(stream, kind)
    return stream.getvalue()


@pytest.mark.slow
def test_forms(tmp_path: Path) -> None:
    """However a picture is sent, the row is torchvision's bit for bit, and features are those of a hook behind it."""
    jpeg, png = encode("china.jpg", "JPEG"), encode("flower.jpg", "PNG")
    module = randomise(torchvision_case(NAME).build().eval(), 0)
    save(module, tmp_path / "weights.safetensors")
    prepare = get_model_weights(NAME).DEFAULT.transforms()
    seen = {".:input": torch.stack([prepare(Image.open(BytesIO(file)).convert("RGB")) for file in (jpeg, png)])}
    keep = module.get_submodule(LAYER).register_forward_hook(lambda _, args, out: seen.update({LAYER: out.clone()}))
    with keep, torch.no_grad():
        seen["."] = module(seen[".:input"].clone())
    asked = {"model": NAME, "layers": list(seen)}
    parts = [("images", ("a", jpeg)), ("images", ("b", png)), ("request", (None, orjson.dumps(asked)))]
    inputs = [{"image": text64(jpeg)}, {"image": f"data:image/png;base64,{text64(png)}"}]
    requests: list[tuple[slice, dict[str, Any]]] = [
        (slice(0, 2), {"json": {**asked, "inputs": inputs}}),
        (slice(0, 2), {"files": parts}),
        (slice(0, 1), {"content": jpeg, "headers": {"content-type": "image/jpeg"}}),
        (slice(1, 2), {"content": png, "headers": {"content-type": "image/png"}}),
    ]
    spec = ModelSpec(NAME, f"torchvision:{NAME}", str(tmp_path / "weights.safetensors"), device="cpu")
    with serving(Configuration((spec,), NAME), **LIMITS) as live:
        for rows, request in requests:
            query = {"model": NAME, "layers": ",".join(seen)} if "content" in request else {}
            found = arrays_of(live.client.post("/extract", params={"format": "npz", **query}, **request))
            wanted = {key: value[rows].numpy() for key, value in seen.items()}
            assert found.keys() == wanted.keys()
            assert found[".:input"].tobytes() == wanted[".:input"].tobytes()
            Tally().add(found, wanted)
