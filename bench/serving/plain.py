"""What a reader of the PyTorch tutorial writes: a model, its preset's preprocessing, a hook that copies."""

from __future__ import annotations

import argparse
import io
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights

from bench.serving.pictures import written

SEED = 0
LAYER = "avgpool"


class Plain:
    """A model with seeded weights and a hook on ``avgpool``, for any number of threads at once."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(SEED)
        self._model = get_model(name, weights=None).eval()
        self._prepare = get_model_weights(name).DEFAULT.transforms()
        self._kept = threading.local()
        self._model.get_submodule(LAYER).register_forward_hook(self._keep)

    def __call__(self, pictures: Iterable[bytes]) -> Tensor:
        """From JPEG bytes to flattened features, in one forward."""
        batch = torch.stack([self._prepare(Image.open(io.BytesIO(data)).convert("RGB")) for data in pictures])
        with torch.inference_mode():
            self._model(batch)
        kept: Tensor = self._kept.features
        return kept

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._kept.features = output.flatten(1).clone()


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that the loop and the single images share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="mobilenet_v3_small", help="a torchvision classifier with an avgpool")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pictures", type=Path, nargs="+", help="files; scikit-learn's two samples without it")
    return parser


def read(paths: list[Path] | None, folder: Path) -> list[bytes]:
    """The bytes of the pictures; the samples are made in the folder where none are named."""
    return [path.read_bytes() for path in paths or written(folder)]
