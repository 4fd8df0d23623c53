"""What several tests of the benchmarks need."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.models import MobileNet_V3_Small_Weights, mobilenet_v3_small

MODEL = "mobilenet_v3_small"


def jpeg() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=95)
    return encoded.getvalue()


def forward(layers: tuple[str, ...], data: bytes) -> dict[str, np.ndarray]:
    """Each layer's mean over space, by nothing but torchvision."""
    torch.manual_seed(0)
    model = mobilenet_v3_small(weights=None).eval()
    kept: dict[str, np.ndarray] = {}
    for layer in layers:
        model.get_submodule(layer).register_forward_hook(
            lambda module, inputs, output, layer=layer: kept.update({layer: output.numpy().mean((2, 3))[0]})
        )
    batch = MobileNet_V3_Small_Weights.DEFAULT.transforms()(Image.open(io.BytesIO(data)).convert("RGB"))[None]
    with torch.no_grad():
        model(batch)
    return kept


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody has asked for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
