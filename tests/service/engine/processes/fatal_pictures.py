"""Pictures that are read as a broken decoder would: by a model in its process, or where one has such a side."""

from __future__ import annotations

import os
import signal
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageFile
from torch import Tensor, nn

CRASHES, HANGS, TAKES_ALL_MEMORY = (41, 7), (42, 7), (43, 7)  # width and height
BLOCK_BYTES = 2**26


def draw(size: tuple[int, int], value: int = 0, kind: str = "PNG") -> bytes:
    """A picture of one colour."""
    stream = BytesIO()
    Image.new("RGB", size, (value % 256, value * 7 % 256, 3)).save(stream, kind)
    return stream.getvalue()


class Net(nn.Module):
    """Colours, averaged over a small picture."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        ImageFile.ImageFile.load = load  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


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
        kept.append(np.empty(BLOCK_BYTES, np.uint8))  # which touches nothing, and so takes no time


WAYS = {CRASHES: crash, HANGS: hang, TAKES_ALL_MEMORY: take_all_memory}
_load = ImageFile.ImageFile.load


def load(self: ImageFile.ImageFile) -> Any:
    """As Pillow's, but for pictures of some sizes."""
    WAYS.get(self.size, lambda: None)()
    return _load(self)


class FatalSide(int):
    """A side that pictures are resized to, which those of some sizes are not: what preprocesses them ends first."""

    def __mul__(self, other: int) -> int:
        """What the longer side is computed by, in a process that decodes for a model of another one."""
        LONG_SIDES.get(other, lambda: None)()
        return int(self) * other


LONG_SIDES = {max(size): way for size, way in WAYS.items()}
