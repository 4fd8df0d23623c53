"""Checkpoints as training scripts and libraries leave them, each with the configuration that serves it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.models import get_model

from tests.oracle import seeded

SQUEEZENET = {  # smaller pictures and fewer classes than the library has
    "source": "torchvision:squeezenet1_1",
    "inputs": [{"name": "image", "shape": [3, 64, 64]}],
    "preprocess": {"resize": 64, "crop": 64, "mean": [0.5] * 3, "std": [0.5] * 3},
    "args": {"num_classes": 5},
}


@dataclass(frozen=True)
class Written:
    """The fields that serve a checkpoint, the model that it was made from, and layers to compare."""

    fields: dict[str, Any]
    module: nn.Module
    layers: tuple[str, str]


def squeezenet(seed: int = 0) -> Any:
    """A small architecture of torchvision with five classes."""
    return seeded(get_model("squeezenet1_1", num_classes=5), seed).eval()


def _averaged(folder: Path) -> Written:
    module = squeezenet()
    averaged = AveragedModel(nn.DataParallel(module)).state_dict()
    content = {"model": squeezenet(9).state_dict(), "model_ema": averaged, "args": argparse.Namespace(lr=1)}
    torch.save(content, folder / "averaged.pth")
    return Written({**SQUEEZENET, "weights": "averaged.pth"}, module, ("features.12", "."))


def _lost_head(folder: Path) -> Written:
    """A backbone without its head: the head is then as the seed 0 draws it."""
    module = squeezenet()
    backbone = {name: value for name, value in module.state_dict().items() if "classifier." not in name}
    torch.save(backbone, folder / "backbone.pth")
    torch.manual_seed(0)
    drawn: Any = get_model("squeezenet1_1", num_classes=5)
    module.classifier.load_state_dict(drawn.classifier.state_dict())
    return Written({**SQUEEZENET, "weights": "backbone.pth", "strict": False}, module, ("features.12", "."))


KINDS: dict[str, Callable[[Path], Written]] = {
    "torchvision's references": _averaged,
    "without a head, not strict": _lost_head,
}
