"""How sounds become a model's rows: by the feature extractor of the model's library, at the rate that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.errors import InputError
from layertap.models.inputs.preprocess import Preprocessing
from layertap.models.inputs.video import VideoProcessor
from layertap.models.spec import InputSpec

RECIPE = "channels averaged in float32, resampled by soxr HQ"  # what comes before the library's own steps
MASK = "attention_mask"
MIN_FRAMES = 8  # of fewer, another layer's might be as many


@dataclass(frozen=True)
class SoundProcessor:
    """A library's feature extractor for sounds."""

    name: str
    settings: str  # a digest of them
    rate: int  # samples a second
    channels: int  # 1: mono
    # float32 (samples,) or (channels, samples) at ``rate`` → tensors by input, (1, …); thread-safe, can be pickled.
    run: Callable[[NDArray[np.float32]], Mapping[str, Tensor]] = field(compare=False, repr=False)
    max_samples: int | None = None  # of which a row is made; None: of any number
    truncates: bool = False  # the rest of a longer sound is left out; else it is refused
    step: int | None = None  # samples between two frames of the encoder's output, if known
    frames: int | None = None  # of that output, where every row is filled up with silence to as many; it has a MASK

    def make_row(self, samples: NDArray[np.float32], names: tuple[str, ...]) -> dict[str, Tensor]:
        """The row of a sound for inputs of these ``names``; InputError if the library refuses it."""
        if self.max_samples is not None and len(samples.T) > self.max_samples and not self.truncates:
            seconds, limit = len(samples.T) / self.rate, self.max_samples / self.rate
            detail = f"the sound has {seconds:.6g} s, of which {self.name} would take {limit:g} at random"
            raise InputError(detail, hint=f"send {limit:g} s or less")
        try:
            made = dict(self.run(samples))
            if self.frames is not None and self.step is not None:
                made[MASK] = (torch.arange(self.frames) * self.step < len(samples.T)).long()[None]
            return {name: made[name] for name in names}
        except (InputError, MemoryError):
            raise
        except Exception as error:  # a third party's code raises anything
            seconds = len(samples.T) / self.rate
            detail = f"{self.name} can't take a sound of {seconds:.6g} s ({type(error).__name__})"
            raise InputError(detail, hint="send a longer one, or the model's inputs as tensors") from error

    def count_cut(self, samples: int) -> int:
        """How many samples of a sound are left out."""
        return max(samples - self.max_samples, 0) if self.max_samples is not None else 0

    def find_steps(self, samples: int) -> dict[int, float]:
        """Seconds between two entries of a time axis, by its size, for a row of so many samples."""
        frames = (self.max_samples or samples) // (self.step or samples)
        near = range(frames - 1, frames + 2)  # kernels and borders make one more or less
        return dict.fromkeys(near, self.step / self.rate) if self.step and frames >= MIN_FRAMES else {}

    def describe(self) -> dict[str, Any]:
        """Everything that affects its rows, as plain data."""
        described = {"processor": self.name, "settings": self.settings, "rate": self.rate, "channels": self.channels}
        return described | {"sound": RECIPE}


def make_samples_processor(spec: InputSpec, rate: int) -> SoundProcessor:
    """How sounds become rows of an input that takes their samples, (samples,) or (channels, samples)."""
    channels = spec.shape[0] if len(spec.shape) == 2 else 1
    return SoundProcessor("samples", "", rate, channels, partial(_pass_samples, spec.name, len(spec.shape)))


def _pass_samples(name: str, axes: int, samples: NDArray[np.float32]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(samples).reshape(1, *(1,) * (axes - samples.ndim), *samples.shape)}


Media = Preprocessing | SoundProcessor | VideoProcessor  # how encoded pictures, sounds or videos become rows
