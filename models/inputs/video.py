"""How videos become a model's rows: some of their frames, each preprocessed as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from layertap.models.errors import InputError
from layertap.models.inputs.preprocess import LibraryProcessor, Preprocessing, make_row, preprocess

SAMPLING = "numpy.linspace(0, length, frames), cut to length - 1 and rounded down"


@dataclass(frozen=True)
class VideoProcessor:
    """The frames that a model takes of a video, and how each is preprocessed."""

    name: str
    of_frame: Preprocessing  # a library's own processor for videos treats every frame alike
    frames: int
    axis: int = 0  # of a row, along which frames are stacked

    def choose_frames(self, length: int) -> list[int]:
        """The numbers of the frames that are taken of a video with so many, in order; InputError if it has too few.

        Evenly spaced over all of it, as in the documentation of VideoMAE in transformers for a whole clip.
        """
        if length < self.frames:
            detail = f"the video has {length} frames, and the model takes {self.frames}"
            raise InputError(detail, hint="send a longer one, or its frames as often as each is to count")
        spaced = np.linspace(0, length, self.frames)
        return [int(number) for number in np.clip(spaced, 0, length - 1)]

    def make_frame(self, image: Image.Image) -> Tensor:
        """A frame, RGB, as float32 (channels, height, width); InputError if the library refuses it."""
        how = self.of_frame
        return make_row(image, how) if isinstance(how, LibraryProcessor) else preprocess(image, how)

    def join_frames(self, frames: Sequence[Tensor]) -> Tensor:
        """The row of a video, without an axis of rows; InputError if its frames differ in size."""
        if len({each.shape for each in frames}) > 1:
            raise InputError("the frames of the video become rows of several sizes", hint="send frames of one size")
        return torch.stack(list(frames), self.axis)

    def describe(self) -> dict[str, Any]:
        """Everything that affects its rows, as plain data."""
        return {"frames": self.frames, "sampling": SAMPLING, "each": self.of_frame.describe()}
