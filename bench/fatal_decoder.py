"""MobileNetV3-small in a process where pictures of some sizes are read as a broken decoder would."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import ImageFile
from torch import nn
from torchvision.models import mobilenet_v3_small

BLOCK_BYTES = 2**26


def build() -> nn.Module:
    """The model; from now on its process's decoder can't be trusted."""
    ImageFile.ImageFile.load = load  # type: ignore[method-assign]
    return mobilenet_v3_small()


def crash() -> None:
    """What a stray pointer does."""
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    """What a loop without an end does."""
    while True:
        pass


def take_all_memory() -> None:
    """What a decoder does that believes a header."""
    kept = []
    while True:
        kept.append(np.ones(BLOCK_BYTES, np.uint8))


FAULTS: Mapping[str, tuple[tuple[int, int], Callable[[], None]]] = {  # width and height of the picture
    "crash": ((41, 7), crash),
    "hang": ((42, 7), hang),
    "bomb": ((43, 7), take_all_memory),
}
_by_size = dict(FAULTS.values())
_load = ImageFile.ImageFile.load


def load(self: ImageFile.ImageFile) -> Any:
    """As Pillow's, but for pictures of some sizes."""
    _by_size.get(self.size, lambda: None)()
    return _load(self)
